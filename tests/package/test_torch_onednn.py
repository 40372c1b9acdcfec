"""Products by oneDNN: the numbers and gradients of torch's own."""

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from tests.helpers.common import BACKEND
from tests.helpers.common import array

if BACKEND != "torch":
    pytest.skip("torch alone has two libraries", allow_module_level=True)

import torch

from keras_armin.backends import torch_onednn


def test_torch_still_has_the_operation():
    assert torch_onednn._linear is not None


@pytest.fixture
def wanted(monkeypatch):
    """Whatever the processor and the sizes are."""
    monkeypatch.setattr(torch_onednn, "is_wanted", lambda x, y: True)
    monkeypatch.setattr(torch_onednn, "LONGEST", 4)


def layouts(rows, columns):
    """A matrix as it is, transposed, and as part of a larger one."""
    return {
        "dense": torch.randn(rows, columns),
        "transposed": torch.randn(columns, rows).t(),
        "columns": torch.randn(rows, columns + 5)[:, 2 : 2 + columns],
        "rows": torch.randn(rows + 5, columns)[2 : 2 + rows],
        "columns, transposed": torch.randn(columns, rows + 5)[:, :rows].t(),
    }


@pytest.mark.parametrize("k", [3, 11])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_layout_gives_the_product(with_bias, k, wanted):
    bias = torch.randn(7) if with_bias else None
    with torch.no_grad():
        for x_layout, x in layouts(6, k).items():
            for y_layout, y in layouts(k, 7).items():
                assert torch_onednn.is_faster(x, y)
                found = torch_onednn.affine(x, y, bias)
                expected = x.double() @ y.double()
                expected = expected + bias if with_bias else expected
                np.testing.assert_allclose(
                    *map(array, (found, expected)),
                    rtol=1e-4,
                    atol=1e-5,
                    err_msg=f"{x_layout} times {y_layout}",
                )


def test_first_and_second_derivatives_are_those_of_torch(wanted):
    x, y = torch.randn(2, 6, 3), torch.randn(3, 7)
    bias, term = torch.randn(7), torch.randn(2, 6, 7)
    found = []
    for affine in (
        torch_onednn.affine,
        lambda x, y, bias, term: torch.matmul(x, y) + bias + term,
    ):
        tensors = [t.clone().requires_grad_() for t in (x, y, bias, term)]
        first = torch.autograd.grad(
            affine(*tensors).square().sum(), tensors, create_graph=True
        )
        loss = sum(d.square().sum() for d in first)
        found.append([*first, *torch.autograd.grad(loss, tensors)])

    for own, expected in zip(*found):
        np.testing.assert_allclose(
            array(own.detach()), array(expected.detach()), rtol=1e-4, atol=1e-3
        )


def test_it_is_used_where_it_serves(wanted, monkeypatch):
    x, y = torch.randn(6, 3), torch.randn(3, 7)

    assert not torch_onednn.is_faster(x, y)  # without a gradient
    with torch_onednn.gradients_allowed():
        assert torch_onednn.is_faster(x, y)
    with torch.no_grad():
        assert torch_onednn.is_faster(x, y)
        assert not torch_onednn.is_faster(x.double(), y.double())
        assert not torch_onednn.is_faster(x, torch.randn(2, 3, 7))
        assert not torch_onednn.is_faster(x.to("meta"), y.to("meta"))
        with torch.backends.mkldnn.flags(enabled=False):
            assert not torch_onednn.is_faster(x, y)
        monkeypatch.setattr(torch_onednn, "is_wanted", lambda x, y: False)
        assert not torch_onednn.is_faster(x, y)


@pytest.mark.parametrize(
    "family, dense, small, transposed",
    [(26, True, True, True), (25, True, False, False), (0, *[False] * 3)],
)
def test_it_is_wanted_where_it_was_measured_to_pay(
    family, dense, small, transposed, monkeypatch
):
    monkeypatch.setattr(torch_onednn, "amd_family", lambda: family)
    x, y = torch.empty(1024, 1024), torch.empty(1024, 16)
    assert torch_onednn.is_wanted(x, y) == dense
    assert torch_onednn.is_wanted(x[:100], y) == small
    assert torch_onednn.is_wanted(x.t(), y) == transposed
    assert not torch_onednn.is_wanted(x[:10], y)


def test_the_processor_is_recognised(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(torch_onednn.pathlib, "Path", lambda _: path)
    capability = torch.backends.cpu
    found = []
    for simd, text in [
        ("AVX512", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\n"),
        ("AVX512", "vendor_id\t: GenuineIntel\ncpu family\t: 6\n"),
        ("AVX2", "vendor_id\t: AuthenticAMD\ncpu family\t: 23\n"),
        ("AVX512", None),
    ]:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(
            capability, "get_cpu_capability", lambda simd=simd: simd
        )
        found.append(torch_onednn.amd_family.__wrapped__())
    assert found == [25, 0, 0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_has_the_same_outputs_and_gradients(
    training, wanted, monkeypatch, rng
):
    x = torch.tensor(rng.normal(size=(3, 9, 4)), dtype=torch.float32)
    layer = ARMIN(5, 3, write_inputs=True, return_sequences=True, seed=1)
    layer.build(tuple(x.shape))
    calls, found = [], []
    linear = torch_onednn._linear
    monkeypatch.setattr(
        torch_onednn, "_linear", lambda *a: calls.append(1) or linear(*a)
    )
    for used in (True, False):
        monkeypatch.setattr(
            torch_onednn, "is_wanted", lambda x, y, used=used: used
        )
        x = x.detach().requires_grad_()
        y = layer(x, training=training)
        weights = [v.value for v in layer.trainable_variables]
        gradients = torch.autograd.grad(y.square().sum(), [x, *weights])
        found.append([y.detach(), *gradients])
        # Projections, three products forward and four backward in each step.
        assert len(calls) > 7 * 9 if used else not calls
        calls.clear()

    for own, expected in zip(*found):
        np.testing.assert_allclose(
            array(own), array(expected), rtol=1e-4, atol=1e-5
        )


def test_a_model_that_is_compiled_trains(wanted, rng):
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    losses = []
    for jit_compile in (False, True):
        torch.compiler.reset()
        keras.utils.set_random_seed(1)
        layer = ARMIN(5, 3, 3, seed=1)
        model = keras.Sequential([keras.Input((3, 4)), layer])
        model.compile("sgd", "mse", jit_compile=jit_compile)
        y = np.zeros((2, layer.cell.output_size))
        losses.append([float(model.train_on_batch(x, y)) for _ in range(2)])

    np.testing.assert_allclose(*losses, rtol=1e-4)
