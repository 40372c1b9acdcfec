"""No NaN: silence, constant and huge inputs, long sequences.

A batch holds each hazard as a sample of its own, so that one compiled model
meets all of them.
"""

import functools

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import PAPER
from keras_armin import backends
from keras_armin import gradient_clipping
from keras_armin.baselines import LayerNormLSTM
from tests.helpers.common import BACKEND
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import fix_noise
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.networks import NETWORKS
from tests.package import test_fused

# Long enough for a slope of 32 at each step to leave float32.
STEPS = 50
# Float16 ends at 65504: no 1e30 there.
CONSTANTS = (0.0, 30.0, -30.0)
HUGE = 1e30
# Where the loop is not compiled, 20,000 steps would take a minute.
LONG = 20_000 if BACKEND == "jax" else 1_000

OPTIONS = {
    "write_inputs": True,
    "content_addressing": True,
    "learn_initial_state": True,
}
NOISE = {"zoneout": 0.3, "dropout": 0.3, "recurrent_dropout": 0.3}
VARIETIES = {
    "ARMIN": {"layer_norm": True},
    "ARMIN of the paper": {"layer_norm": True, **PAPER},
    "ARMIN wide memory": {"layer_norm": True, "memory_dim": UNITS},
    "ARMIN plain, options": OPTIONS,
    "ARMIN hard, all": {"layer_norm": True, **OPTIONS, **NOISE},
    "ARMIN relaxed, all": {
        "layer_norm": True,
        "addressing": "relaxed",
        "noise_scale": 1.0,
        **OPTIONS,
        **NOISE,
    },
    "ARMIN soft, all": {
        "layer_norm": True,
        "addressing": "soft",
        **OPTIONS,
        **NOISE,
    },
    "LayerNormLSTM": {"zoneout_cell": 0.3, "zoneout_hidden": 0.3},
    "NTM": {"layer_norm": True, "learn_initial_state": True},
    "DNC": {"layer_norm": True},
    "SAM": {"layer_norm": True},
    "TARDIS": {"layer_norm": True},
    "AwTA": {"layer_norm": True},
    "SAB": {"layer_norm": True, "truncate_every": STEPS},
}
# The others take seconds each.
QUICK = ("ARMIN", "LayerNormLSTM")

# Those whose outputs are bounded. On others, such as what is read from a
# learned initial memory, a regression may diverge by itself at this learning
# rate: they have a bounded head.
LINEAR_HEAD = (
    "ARMIN",
    "ARMIN of the paper",
    "ARMIN wide memory",
    "LayerNormLSTM",
)


def make(variety, **arguments):
    network = NETWORKS[variety.split()[0]]
    options = {**VARIETIES[variety], "return_sequences": True, **arguments}
    return network.make(**options)


def hazards(rng, time=STEPS, huge=True):
    """Each constant along one sample, and one row repeated along another."""
    rows = [np.full(FEATURES, x) for x in CONSTANTS + (HUGE,) * huge]
    rows.append(rng.normal(size=FEATURES))
    x = np.repeat(np.array(rows)[:, None], time, axis=1)
    return x.astype("float32")


def updated(layer, x, optimizer=None, updates=5, head="tanh"):
    """The layer after some updates, finite after each of them."""
    # XLA would take longer to compile than all the rest to run.
    fast = {"jit_compile": False} if BACKEND == "tensorflow" else {}
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model = keras.Sequential(
        [
            keras.Input(batch_shape=x.shape),
            layer,
            keras.layers.Dense(2, activation=head),
        ]
    )
    model.compile(optimizer, "mse", **fast)
    target = np.ones((*x.shape[:2], 2), "float32")
    before = [array(v) for v in layer.trainable_variables]
    for _ in range(updates):
        model.train_on_batch(x, target)
        for variable in model.trainable_variables:
            assert_finite(variable, variable.path)
    assert_finite(model.predict_on_batch(x), "outputs")
    return before


def changed(layer, before):
    return any(
        not np.array_equal(old, array(new))
        for old, new in zip(before, layer.trainable_variables)
    )


def assert_finite(x, name):
    assert np.isfinite(array(x).astype("float64")).all(), name


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize(
    "variety",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in VARIETIES
    ],
)
def test_updates_on_any_constant_input_stay_finite(variety, rng):
    layer = make(variety)
    head = "linear" if variety in LINEAR_HEAD else "tanh"
    before = updated(layer, hazards(rng), head=head)

    assert changed(layer, before)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    "variety",
    [
        pytest.param(
            "ARMIN hard, all", marks=pytest.mark.slow("jax", "tensorflow")
        ),
        "LayerNormLSTM",
    ],
)
def test_updates_by_adam_stay_finite(variety, rng):
    updated(make(variety), hazards(rng), keras.optimizers.Adam(1e-3))


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize(
    "training", [pytest.param(False, marks=pytest.mark.slow("jax")), True]
)
@pytest.mark.parametrize("variety", ["ARMIN", "LayerNormLSTM"])
@pytest.mark.slow("jax", "tensorflow")
def test_gradients_of_silence_are_finite(variety, training):
    layer = make(variety)
    x = np.zeros((1, STEPS, FEATURES), "float32")
    layer.build(x.shape)
    found, found_x = gradients(layer, x, training=training, in_graph=True)

    assert_finite(found_x, "x")
    for name, gradient in found.items():
        if gradient is not None:
            assert_finite(gradient, name)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    "variety",
    [
        "ARMIN hard, all",
        "LayerNormLSTM",
        pytest.param("NTM", marks=pytest.mark.slow),
    ],
)
def test_updates_in_bfloat16_stay_finite(variety, rng):
    layer = make(variety, dtype="mixed_bfloat16")
    before = updated(layer, hazards(rng))

    assert changed(layer, before)


@pytest.mark.slow("tensorflow")
@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    "variety",
    [
        pytest.param(
            "ARMIN hard, all", marks=pytest.mark.slow("jax", "tensorflow")
        ),
        "LayerNormLSTM",
    ],
)
def test_weights_stay_finite_in_float16(variety, rng, monkeypatch):
    """Keras leaves out updates in which a gradient overflows."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        updated(make(variety), hazards(rng, huge=False))
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.slow("jax", "tensorflow")
def test_long_sequences_stay_finite(rng):
    x = hazards(rng, time=LONG)[[0, -1]]
    layer = ARMIN(2, 2, layer_norm=True)
    layer.build(x.shape)
    found, found_x = gradients(layer, x, training=True, in_graph=True)

    assert_finite(found_x, "x")
    for name, gradient in found.items():
        assert_finite(gradient, name)


def test_a_scale_out_of_all_bounds_leaves_values_finite(rng):
    layer = ARMIN(UNITS, SLOTS, content_addressing=True)
    x = inputs(rng)
    layer.build(x.shape)
    layer.cell.content_scale.assign(1e5)

    assert_finite(layer(x), "outputs")
    assert_finite(layer(x, training=True), "outputs")


# --- the bound itself -------------------------------------------------------


class Square(keras.layers.Layer):
    """Its gradient is 2 * scale * x, less what is above the bound."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x, training=False):
        x = backends.clip_gradient(x, 10.0)
        return self.scale * x * x


def test_a_clipped_gradient_leaves_the_value_alone():
    x = np.array([[-3.0, 2.0, 30.0, -3e38]], "float32")
    layer = Square()
    layer.build(x.shape)
    value = array(backends.clip_gradient(keras.ops.convert_to_tensor(x), 1.0))
    _, found = gradients(layer, x)

    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(found, [[-6.0, 4.0, 10.0, -10.0]])


EVERYTHING = {"units": UNITS, "memory_slots": 3, **test_fused.EVERYTHING}


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    "masked", [pytest.param(False, marks=pytest.mark.slow("jax")), True]
)
def test_both_ways_agree_where_the_bound_is_met(
    masked, rng, float64, monkeypatch
):
    """So low a bound that ordinary gradients meet it at each place."""
    monkeypatch.setattr(gradient_clipping, "LARGEST_GRADIENT", 0.05)
    test_fused.compare(rng, EVERYTHING, masked=masked)


@pytest.mark.slow("tensorflow")
@pytest.mark.slow("jax")
def test_both_ways_agree_on_silence(float64, rng, monkeypatch):
    layer = ARMIN(UNITS, 3, DIM, layer_norm=True, dtype="float64")
    x = np.zeros((1, STEPS, FEATURES))
    layer.build(x.shape)
    noise = {"gumbel": rng.gumbel(size=(1, STEPS, 3))}
    fix_noise(monkeypatch, noise)
    found, _ = gradients(layer, x, training=True, in_graph=True)
    with test_fused.reference_loop():
        expected, _ = gradients(layer, x, training=True, in_graph=True)

    largest = max(np.abs(gradient).max() for gradient in found.values())
    assert gradient_clipping.LARGEST_GRADIENT < largest < 1e12
    for name, gradient in found.items():
        np.testing.assert_allclose(
            gradient, expected[name], rtol=1e-9, err_msg=name
        )


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("layer_class", [ARMIN, LayerNormLSTM])
def test_ordinary_gradients_do_not_meet_the_bound(
    layer_class, rng, float64, monkeypatch
):
    layer = layer_class(
        UNITS, layer_norm=True, dtype="float64", return_sequences=True
    )
    x = inputs(rng, time=30, dtype="float64")
    layer.build(x.shape)
    randomise(layer, rng)
    if layer_class is ARMIN:
        slots = layer.memory_slots
        noise = {"gumbel": rng.gumbel(size=(*x.shape[:2], slots))}
        fix_noise(monkeypatch, noise)
    found = []
    # The last one shows that the bound is looked at.
    for bound in (gradient_clipping.LARGEST_GRADIENT, np.inf, 1e-3):
        monkeypatch.setattr(gradient_clipping, "LARGEST_GRADIENT", bound)
        found.append(gradients(layer, x, training=True, in_graph=True))

    (bounded, of_x), (free, free_of_x), (low, _) = found
    # XLA rounds differently where it compiles another bound.
    close = functools.partial(
        np.testing.assert_allclose, rtol=1e-10, atol=1e-14
    )
    close(of_x, free_of_x)
    for name, gradient in bounded.items():
        close(gradient, free[name], err_msg=name)
    assert np.abs(low["kernel"] - free["kernel"]).max() > 1e-3
