"""The calculation of examples/scaling.py, and what SCALING.md shows of it."""

import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from examples import scaling
from keras_armin import ARMIN
from keras_armin import PAPER
from tests.helpers import BACKEND

DOCUMENT = pathlib.Path(scaling.__file__).with_name("SCALING.md")

# Small enough for a pencil.
SMALL = scaling.Network(
    "small", units=10, slots=2, embedding=3, symbols=5, steps=4, batch=8
)
MACHINE = scaling.Machine(
    "slow",
    peak=1000.0,
    achieved=0.5,
    memory=100.0,
    link=50.0,
    hop=2.0,
    launch=0.1,
    kernels=3,
)


def test_operations_by_hand():
    # u n + 10 u u = 20 + 1000
    assert scaling.loop_products(SMALL) == 1020
    # e (n + 7 u) + 4 u u + 2 u V = 216 + 400 + 100
    assert scaling.other_products(SMALL) == 716
    assert scaling.forward_flops(SMALL) == 2 * 1736
    # Another layer, and 2 u e = 60 between the two.
    assert scaling.forward_flops(SMALL._replace(layers=2)) == 2 * (
        2 * 1020 + 716 + 616 + 60
    )
    # Four steps of eight sequences, there and twice back.
    assert scaling.update_flops(SMALL, 8) == 3 * 3472 * 32


def test_times_by_hand():
    # 2 * 1020 * 8 / 500 = 32.64 s a step; reading 2040 bytes takes 20.4.
    assert scaling.loop_pass(SMALL, MACHINE, 8) == pytest.approx(4 * 32.64)
    assert scaling.loop_pass(SMALL, MACHINE, 1) == pytest.approx(4 * 20.4)
    assert scaling.waiting(SMALL, MACHINE) == pytest.approx(1.2)
    # 2 * (1020 + 3 * 716) * 32 / 500
    outside = 405.504
    assert scaling.compute_time(SMALL, MACHINE, 8) == pytest.approx(
        2 * 4 * 32.64 + outside + 1.2
    )
    # 3 * 2 * 1736 * 4 / 500 = 83.328 s for a sequence: 1.2 s are 0 of them.
    assert scaling.balanced_batch(SMALL, MACHINE) == 0
    slow = MACHINE._replace(launch=100.0)
    assert scaling.balanced_batch(SMALL, slow) == round(1200 / 83.328)


def test_exchanges_by_hand():
    # Four devices: three quarters, twice, and six hops.
    assert scaling.all_reduce_time(100, 4, MACHINE) == 150 / 50 + 6 * 2
    assert scaling.all_gather_time(100, 4, MACHINE) == 75 / 50 + 3 * 2
    assert scaling.all_reduce_time(100, 1, MACHINE) == 0
    assert scaling.all_gather_time(100, 1, MACHINE) == 0


def test_sharing_by_hand():
    reduced = scaling.all_reduce_time(4 * scaling.parameters(SMALL), 4, MACHINE)
    alone = scaling.compute_time(SMALL, MACHINE, 8)
    batch, seconds, speed_up = scaling.strong(SMALL, MACHINE, 4)

    assert batch == 2
    assert seconds == pytest.approx(
        scaling.compute_time(SMALL, MACHINE, 2) + reduced
    )
    assert speed_up == pytest.approx(alone / seconds)
    assert scaling.strong(SMALL, MACHINE, 9) is None
    assert scaling.weak(SMALL, MACHINE, 4) == pytest.approx(
        (alone + reduced, alone / (alone + reduced))
    )


def test_a_shared_layer_by_hand():
    computing, sending = scaling.shared_layer(SMALL, MACHINE, 2)
    # Half the products: 16.32 s a step, there and back, and the waiting.
    assert computing == pytest.approx(8 * 16.32 + 1.2)
    # h and r of 8 sequences are 320 bytes, half of which are sent: 3.2 + 2 s;
    # h alone 1.6 + 2; a norm 64 bytes, all of them sent: 1.28 + 4.
    assert sending == pytest.approx(8 * (5.2 + 3.6 + 3 * 5.28))


def test_from_where_on_a_shared_layer_is_faster():
    machine = scaling.MACHINES["tpu"]
    network = scaling.NETWORKS["ptb"]
    least = scaling.break_even_units(network, machine, 8)
    times = {
        (units, n): sum(
            scaling.shared_layer(network._replace(units=units), machine, n)
        )
        for units in (least - 100, least)
        for n in (1, 8)
    }

    assert times[least - 100, 8] >= times[least - 100, 1]
    assert times[least, 8] < times[least, 1]


def build(network):
    """The network, all zeros: to draw millions of weights takes long."""
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(network.symbols, network.embedding, "zeros"),
        ]
    )
    for number in range(network.layers):
        if number:
            model.add(
                keras.layers.Dense(
                    network.embedding, kernel_initializer="zeros"
                )
            )
        model.add(
            ARMIN(
                network.units,
                network.slots,
                layer_norm=True,
                return_sequences=True,
                kernel_initializer="zeros",
                recurrent_initializer="zeros",
                **PAPER,
            )
        )
    model.add(keras.layers.Dense(network.symbols, kernel_initializer="zeros"))
    return model


PARAMETERS = {"ptb": 9_800_230, "enwik8": 21_656_821, "light": 4_019_095}


@pytest.mark.parametrize("name", scaling.NETWORKS)
def test_the_networks_are_those_of_keras(name):
    network = scaling.NETWORKS[name]
    variables = build(network).trainable_variables

    assert scaling.parameters(network) == PARAMETERS[name]
    assert sum(int(np.prod(v.shape)) for v in variables) == PARAMETERS[name]


def test_the_networks_are_those_of_the_language_model():
    pytest.importorskip("tensorflow", reason="char_lm.py reads text by it")
    from examples import char_lm

    presets = {"ptb": "paper-ptb", "enwik8": "paper-enwik8"}
    presets["light"] = "paper-light"
    for name, preset in presets.items():
        options = char_lm.parse_arguments(["--preset", preset])
        network = scaling.NETWORKS[name]
        for ours, theirs in {
            "units": "units",
            "slots": "slots",
            "embedding": "embedding",
            "steps": "steps",
            "batch": "batch_size",
            "layers": "layers",
        }.items():
            assert getattr(network, ours) == getattr(options, theirs), ours


@pytest.mark.skipif(BACKEND != "jax", reason="JAX counts operations")
def test_jax_counts_as_many_operations():
    """Of loops it counts one round: so this has none."""
    import jax

    network = SMALL._replace(units=128, embedding=16, steps=2)
    layer = ARMIN(128, 2, layer_norm=True, return_sequences=True, unroll=True)
    layer.build((8, 2, 16))
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def run(weights, x, training):
        return layer.stateless_call(weights, others, x, training=training)[0]

    def flops(function):
        x = np.zeros((8, 2, 16), "float32")
        return jax.jit(function).lower(weights, x).cost_analysis()["flops"]

    logits = 2 * 128 * network.symbols
    expected = 2 * 8 * 2 * (scaling.forward_flops(network) / 2 - logits)
    forward = flops(lambda w, x: run(w, x, False))
    back = flops(jax.grad(lambda w, x: run(w, x, True).sum(), argnums=(0, 1)))

    # What is not a product is counted there too.
    assert 1.0 < forward / expected < 1.1
    assert 1.0 < back / (3 * expected) < 1.2


@pytest.mark.skipif(BACKEND != "torch", reason="torch runs them one by one")
def test_torch_runs_as_many_operations():
    """A view starts nothing on a device."""
    import torch
    from torch.utils import _python_dispatch

    class Count(_python_dispatch.TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.total += not (op.is_view or "detach" in str(op))
            return op(*args, **(kwargs or {}))

    def operations(steps):
        x = torch.ones((3, steps, 4))
        layer = ARMIN(
            6,
            5,
            layer_norm=True,
            zoneout=0.1,
            return_sequences=True,
            **PAPER,
        )
        layer.build(tuple(x.shape))
        with Count() as count:
            layer(x, training=True).sum().backward()
        return count.total

    a_step = (operations(20) - operations(10)) / 10
    assert a_step == pytest.approx(
        scaling.MACHINES["gpu-torch"].kernels, rel=0.1
    )


def run_script(*arguments):
    done = subprocess.run(
        [sys.executable, scaling.__file__, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_document_shows_what_the_script_prints():
    shown = re.search(
        r"<!-- scaling.py -->\n(.*)<!-- end -->",
        DOCUMENT.read_text(),
        re.DOTALL,
    ).group(1)

    assert shown == run_script()


def test_the_document_names_what_the_script_assumes():
    text = DOCUMENT.read_text()
    gpu, slow, tpu = scaling.MACHINES.values()
    for row in (
        f"312 TFLOP/s | {slow.peak / 1e12:g} | {tpu.peak / 1e12:g} |",
        f"| {100 * gpu.achieved:g} % | {100 * slow.achieved:g} % |",
        f"| {gpu.memory / 1e12:g} TB/s | 1.5 | {tpu.memory / 1e12:g} |",
        f"| {gpu.link / 1e9:g} GB/s | 50 | {tpu.link / 1e9:g} |",
        f"| hop | {1e6 * gpu.hop:g} µs | 5 | {1e6 * tpu.hop:g} |",
        f"| {1e6 * gpu.launch:g} µs | {1e6 * slow.launch:g} | "
        f"{1e6 * tpu.launch:g} |",
        f"| {gpu.kernels} | {slow.kernels} | {tpu.kernels} |",
    ):
        assert row in text


def test_links_of_the_document_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", DOCUMENT.read_text()):
        assert (DOCUMENT.parent / link).exists(), link


def test_the_picture_is_drawn_and_small(tmp_path):
    pytest.importorskip("matplotlib", reason="it draws the picture")
    printed = run_script(
        *("--preset", "light", "--machine", "tpu", "--devices", "1", "4"),
        *("--plot", str(tmp_path / "scaling.png")),
    )
    picture = (tmp_path / "scaling.png").read_bytes()

    assert picture.startswith(b"\x89PNG") and len(picture) < 60_000
    assert "| 4 |" in printed and "800 units" not in printed


def test_bad_numbers_of_devices_are_explained(capsys):
    with pytest.raises(SystemExit):
        scaling.parse(["--devices", "0"])
    assert "--devices must be at least 1" in capsys.readouterr().err
