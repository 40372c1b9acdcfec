"""Gradients against finite differences of the NumPy reference."""

import numpy as np
import pytest

from tests.helpers import reference
from tests.helpers.common import BATCH
from tests.helpers.common import BOTH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import each_form
from tests.helpers.common import fix_noise
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import random_noise
from tests.helpers.common import randomise
from tests.helpers.common import set_cell_weights

STEP = 1e-6

SMOOTH = {
    "soft": {"addressing": "soft"},
    "relaxed": {"addressing": "relaxed"},
    "soft, everything": {
        "addressing": "soft",
        "layer_norm": True,
        "memory_dim": DIM,
        "write_inputs": True,
        "content_addressing": True,
        "learn_initial_state": True,
        "state_activation": "tanh",
        "zoneout": 0.4,
    },
    "relaxed, everything": {
        "addressing": "relaxed",
        "layer_norm": True,
        "memory_dim": DIM,
        "write_inputs": True,
        "content_addressing": True,
        "recency_addressing": True,
        "learn_initial_state": True,
        "noise_scale": 0.8,
        "zoneout": 0.4,
    },
}


def finite_differences(loss, weights, rng, per_weight=4):
    """Central differences at a few entries of each weight."""
    for name, value in weights.items():
        value = np.array(value)
        for _ in range(per_weight):
            index = tuple(rng.integers(0, size) for size in value.shape)
            moved = []
            for sign in (1, -1):
                changed = value.copy()
                changed[index] += sign * STEP
                moved.append(loss({**weights, name: changed}))
            yield name, index, (moved[0] - moved[1]) / (2 * STEP)


@pytest.mark.slow("jax")
@pytest.mark.slow_after(1, "tensorflow")
@each_form
@pytest.mark.parametrize(
    "case", ["soft", "relaxed", "soft, everything", "relaxed, everything"]
)
def test_training_gradients_match_finite_differences(
    case, make, rng, float64, monkeypatch
):
    # The relaxed write goes to one slot, and no small step moves an argmax:
    # finite differences hold after slots have been overwritten too. A soft
    # write spreads with weights that have no gradient, which finite
    # differences would see: there the memory never fills.
    slots = TIME if SMOOTH[case]["addressing"] == "soft" else 3
    options = {**SMOOTH[case], "memory_slots": slots}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, dtype="float64")
    noise = random_noise(rng, slots=slots)
    width = UNITS + reference.slot_width(
        UNITS, options.get("memory_dim", "half")
    )
    weigh = rng.normal(size=(BATCH, TIME, width))

    def loss(weights):
        y, *_ = reference.run(UNITS, options, weights, x, True, noise)
        return (y * weigh).sum()

    fix_noise(monkeypatch, noise)
    layer = make(units=UNITS, dtype="float64", return_sequences=True, **options)
    layer.build(x.shape)
    set_cell_weights(layer.cell, weights)
    found, _ = gradients(layer, x, training=True, weigh=weigh)

    for name, index, expected in finite_differences(loss, weights, rng):
        assert found[name][index] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_form
@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.slow("jax", "tensorflow")
def test_gradients_do_not_depend_on_training(
    return_sequences, make, rng, float64
):
    options = {
        "memory_slots": 3,
        "memory_dim": DIM,
        "layer_norm": True,
        "content_addressing": True,
        "recency_addressing": True,
        "learn_initial_state": True,
        "temperature": 0.7,
        "return_sequences": return_sequences,
    }
    x = inputs(rng, dtype="float64")
    layer = make(units=UNITS, dtype="float64", **options)
    layer.build(x.shape)
    randomise(layer, rng)
    found = {}
    for training in (False, True):
        grads, grad_x = gradients(layer, x, training=training)
        found[training] = {**grads, "x": grad_x}

    assert np.abs(found[False]["address_recurrent_kernel"]).max() > 1e-3
    for name, gradient in found[False].items():
        np.testing.assert_allclose(
            gradient, found[True][name], rtol=1e-10, atol=1e-12, err_msg=name
        )


@pytest.mark.slow("jax")
@each_form
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
@pytest.mark.parametrize("training", [False, True])
def test_a_discrete_read_has_the_gradient_of_the_relaxed_one(
    training, addressing, make, rng, float64, monkeypatch
):
    """One step: the read is one-hot, its gradient that of the softmax."""
    if addressing == "relaxed" and training:
        pytest.skip("it reads the relaxed sample itself")
    options = {
        "addressing": addressing,
        "memory_slots": SLOTS,
        "learn_initial_state": True,
        "noise_scale": 0.8,
    }
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, time=1, dtype="float64")
    noise = random_noise(rng, time=1)
    fix_noise(monkeypatch, noise)
    gumbel = noise["gumbel"] * (0.8 if training else 0.0)

    for temperature in (0.5, 2.0):
        layer = make(
            units=UNITS, dtype="float64", temperature=temperature, **options
        )
        layer.build(x.shape)
        set_cell_weights(layer.cell, weights)
        found, _ = gradients(layer, x, training=training)
        # A finite difference of the relaxed read around the one-hot value.
        expected = straight_through(options, weights, x, gumbel, temperature)
        np.testing.assert_allclose(
            found["bias"][:SLOTS], expected, rtol=1e-5, atol=1e-8
        )


def straight_through(options, weights, x, gumbel, temperature):
    """d loss / d address bias with ds taken from the softmax."""
    start = reference.initial_state(UNITS, options, weights)
    total = np.zeros(SLOTS)
    for b in range(BATCH):
        logits = (
            (x[b, 0] @ weights["kernel"] + weights["bias"])[:SLOTS]
            + start.h @ weights["address_recurrent_kernel"]
            + gumbel[b, 0]
            # At the start slot 0 is the oldest.
            + weights["recency_scale"] * np.log(np.arange(SLOTS, 0, -1))
        )
        soft = reference.softmax(logits / temperature)
        jacobian = (np.diag(soft) - np.outer(soft, soft)) / temperature
        total += jacobian @ read_gradient(options, weights, x, b, logits)
    return total


def read_gradient(options, weights, x, b, logits):
    """d loss / d read weights, by finite differences at the one-hot read."""
    read = np.eye(SLOTS)[np.argmax(logits)]

    def loss(read):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "address", lambda *_: (read, read))
            y, *_ = reference.run(UNITS, options, weights, x[b : b + 1], True)
        return y.sum()

    return np.array(
        [
            (loss(read + STEP * e) - loss(read - STEP * e)) / (2 * STEP)
            for e in np.eye(SLOTS)
        ]
    )


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("addressing", ["hard", "relaxed", "soft"])
@each_form
@pytest.mark.parametrize("training", [False, True])
def test_gradients_reach_every_weight(training, make, addressing, rng):
    layer = make(
        units=UNITS,
        memory_slots=3,
        memory_dim=DIM,
        addressing=addressing,
        write_inputs=True,
        learn_initial_state=True,
        layer_norm=True,
        zoneout=0.2,
        content_addressing=True,
        recency_addressing=True,
        return_sequences=True,
    )
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    found, found_x = gradients(layer, x, training=training)

    for name, gradient in found.items():
        assert gradient is not None, name
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, name
    assert np.isfinite(found_x).all()


@pytest.mark.slow("jax", "tensorflow")
def test_gradients_of_the_layer_equal_those_of_the_bare_cell(
    rng, float64, monkeypatch
):
    options = {
        "units": UNITS,
        "memory_slots": 3,
        "memory_dim": DIM,
        "layer_norm": True,
        "zoneout": 0.3,
        "learn_initial_state": True,
        "content_addressing": True,
        "recency_addressing": True,
        "noise_scale": 0.6,
        "write_inputs": True,
        "return_sequences": True,
        "dtype": "float64",
    }
    x = inputs(rng, dtype="float64")
    fix_noise(monkeypatch, random_noise(rng, slots=3))
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    found = []
    for make in BOTH.values():
        layer = make(**options)
        layer.build(x.shape)
        set_cell_weights(layer.cell, weights)
        grads, grad_x = gradients(layer, x, training=True)
        found.append({**grads, "x": grad_x})

    for name, gradient in found[0].items():
        np.testing.assert_allclose(
            gradient, found[1][name], rtol=1e-9, atol=1e-10, err_msg=name
        )
