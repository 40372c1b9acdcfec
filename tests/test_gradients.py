"""Gradients against finite differences of the NumPy reference."""

import numpy as np
import pytest

from keras_armin import ARMIN
from tests import reference
from tests.helpers import BATCH
from tests.helpers import BOTH
from tests.helpers import DIM
from tests.helpers import FEATURES
from tests.helpers import SLOTS
from tests.helpers import TIME
from tests.helpers import UNITS
from tests.helpers import fix_noise
from tests.helpers import gradients
from tests.helpers import inputs
from tests.helpers import random_noise
from tests.helpers import randomise
from tests.helpers import set_cell_weights

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
        "learn_initial_state": True,
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


@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("case", SMOOTH)
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
    width = UNITS + (options.get("memory_dim") or UNITS)
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


@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_inference_gradients_are_those_of_what_it_computes(
    addressing, rng, float64
):
    options = {"addressing": addressing, "memory_slots": 3, "memory_dim": DIM}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, dtype="float64")
    weigh = rng.normal(size=(BATCH, TIME, UNITS + DIM))

    def loss(weights):
        y, *_ = reference.run(UNITS, options, weights, x)
        return (y * weigh).sum()

    layer = ARMIN(UNITS, dtype="float64", return_sequences=True, **options)
    layer.build(x.shape)
    set_cell_weights(layer.cell, weights)
    found, found_x = gradients(layer, x, training=False, weigh=weigh)

    assert np.isfinite(found_x).all() and np.abs(found_x).min() > 0
    for name, index, expected in finite_differences(loss, weights, rng):
        got = 0.0 if found[name] is None else found[name][index]
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_hard_addressing_has_the_gradient_of_the_relaxed_sample(
    rng, float64, monkeypatch
):
    """One step: the read is one-hot, its gradient that of the softmax."""
    options = {"memory_slots": SLOTS, "learn_initial_state": True}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, time=1, dtype="float64")
    noise = random_noise(rng, time=1)
    fix_noise(monkeypatch, noise)

    found = {}
    for temperature in (0.5, 2.0):
        layer = ARMIN(
            UNITS, dtype="float64", temperature=temperature, **options
        )
        layer.build(x.shape)
        set_cell_weights(layer.cell, weights)
        found[temperature], _ = gradients(layer, x, training=True)

    # A finite difference of the relaxed read around the one-hot value.
    for temperature, grads in found.items():
        expected = straight_through(options, weights, x, noise, temperature)
        np.testing.assert_allclose(
            grads["bias"][:SLOTS], expected, rtol=1e-5, atol=1e-8
        )


def straight_through(options, weights, x, noise, temperature):
    """d loss / d address bias with ds taken from the softmax."""
    start = reference.initial_state(UNITS, options, weights)
    total = np.zeros(SLOTS)
    for b in range(BATCH):
        logits = (
            (x[b, 0] @ weights["kernel"] + weights["bias"])[:SLOTS]
            + start.h @ weights["address_recurrent_kernel"]
            + noise["gumbel"][b, 0]
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


@pytest.mark.parametrize("addressing", ["hard", "relaxed", "soft"])
@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
def test_gradients_reach_every_weight(make, addressing, rng):
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
        return_sequences=True,
    )
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    found, found_x = gradients(layer, x, training=True)

    for name, gradient in found.items():
        assert gradient is not None, name
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, name
    assert np.isfinite(found_x).all()


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
