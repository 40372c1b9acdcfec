"""The Keras contract, tested for every network of the package."""

import functools
import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import trace_memory
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import compiled
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor
from tests.helpers.networks import FIXED
from tests.helpers.networks import NETWORKS
from tests.helpers.networks import armin_then_others
from tests.helpers.networks import each_network
from tests.helpers.networks import each_with_memory
from tests.helpers.networks import layer_arguments
from tests.helpers.networks import marks_of

HALF = 4
LENGTHS = np.array([4, 7, 2])
MASK = np.arange(TIME)[None] < LENGTHS[:, None]
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(2.0, 10, 0.9)


def classes():
    found = {}
    for name, network in NETWORKS.items():
        arguments = layer_arguments(network)
        found[f"{name}Cell"] = network.cell, network.full
        found[name] = network.layer, arguments
        for scheduled in {"temperature", "slope"} & set(arguments):
            found[f"{name} with a schedule"] = (
                network.layer,
                {**arguments, scheduled: SCHEDULE},
            )
    return found


CLASSES = classes()
each_class = pytest.mark.parametrize("case", CLASSES)


def comparable(value):
    """Something to compare objects of Keras by."""
    if hasattr(value, "get_config"):
        return type(value), json.dumps(value.get_config(), sort_keys=True)
    return value


def arguments_of(cls):
    parameters = inspect.signature(cls).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name != "kwargs"
    }


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(array(a), array(b), atol=atol, rtol=1e-5)


def built(network, rng, shape=(BATCH, TIME, FEATURES), **arguments):
    layer = network.make(**arguments)
    layer.build(shape)
    randomise(layer, rng)
    return layer


# --- arguments --------------------------------------------------------------


@each_class
def test_no_argument_is_at_its_default_in_this_test(case):
    cls, arguments = CLASSES[case]
    parameters = arguments_of(cls)
    fixed = FIXED.get(case.split()[0].removesuffix("Cell"), ())

    assert set(arguments) == set(parameters)
    for name, value in arguments.items():
        default = comparable(parameters[name].default)
        assert comparable(value) != default or name in fixed, name


@each_class
def test_config_survives_json(case):
    cls, arguments = CLASSES[case]
    original = cls(**arguments, name="original", dtype="mixed_bfloat16")
    text = json.dumps(keras.saving.serialize_keras_object(original))
    copy = keras.saving.deserialize_keras_object(json.loads(text))

    assert type(copy) is cls
    assert copy.name == "original"
    assert copy.dtype_policy.name == "mixed_bfloat16"
    assert json.dumps(copy.get_config()) == json.dumps(original.get_config())
    assert set(arguments) <= set(original.get_config())
    for name, given in arguments.items():
        if name in ("temperature", "noise_scale", "slope"):
            continue  # a weight, see tests/package/test_temperature.py
        assert comparable(getattr(copy, name)) == comparable(
            getattr(original, name)
        ), name
        if isinstance(given, (int, float)) or name in ("addressing", "variant"):
            assert getattr(copy, name) == given, name


@each_network
def test_the_layer_has_every_argument_of_the_cell_with_its_default(network):
    layer, cell = arguments_of(network.layer), arguments_of(network.cell)

    assert list(layer)[: len(cell)] == list(cell)
    for name, parameter in cell.items():
        assert layer[name].default == parameter.default, name


@each_class
def test_every_argument_is_documented(case):
    cls, arguments = CLASSES[case]
    text = inspect.getdoc(cls)

    for name in arguments:
        assert f"{name}:" in text or f"{name}," in text or f"{name}\n" in text


@pytest.mark.slow_after(1, "jax")
@each_network
def test_units_alone_are_enough(network, rng):
    layer = network.layer(UNITS)
    y = layer(inputs(rng), training=True)

    assert tuple(y.shape) == (BATCH, layer.cell.output_size)
    assert np.isfinite(array(y)).all()


BAD = {
    "units": [(0, ValueError), (2.5, TypeError)],
    "dropout": [(1.5, ValueError)],
    "layer_norm": [(1, TypeError)],
    "zoneout_cell": [(1.0, ValueError), ("much", TypeError)],
    "zoneout_hidden": [(-0.1, ValueError)],
    "memory_slots": [(0, ValueError), (True, TypeError)],
    "memory_dim": [(-1, ValueError)],
    "num_reads": [(0, ValueError)],
    "num_writes": [(1.5, TypeError)],
    "shift_range": [(0, ValueError)],
    "top_k": [("all", TypeError)],
    "store_every": [(0, ValueError)],
    "truncate_every": [(0, ValueError)],
    "key_dim": [(0, ValueError)],
    "address_units": [(0, ValueError)],
    "variant": [("paper", ValueError)],
    "addressing": [("sharp", ValueError)],
    "temperature": [(0.0, ValueError)],
    "noise_scale": [(-0.5, ValueError), ("loud", TypeError)],
    "recency_addressing": [(1, TypeError)],
    "learn_initial_state": [("yes", TypeError)],
    "use_bias": [("yes", TypeError)],
    "unit_forget_bias": [(None, TypeError)],
    "seed": [(1.5, TypeError)],
    "max_length": [(0, ValueError), (2.5, TypeError)],
    "depth": [(0, ValueError)],
    "coupled": [(1, TypeError)],
    "transform_bias": [("low", TypeError)],
    "hyper_units": [(0, ValueError)],
    "embedding_units": [(True, TypeError)],
    "projection_units": [(-1, ValueError)],
    "slow_units": [(0, ValueError)],
    "fast_cells": [(1, ValueError), (2.5, TypeError)],
    "levels": [(1, ValueError)],
    "slope": [(0.0, ValueError)],
}


@each_network
def test_bad_arguments_are_named(network):
    for cls in (network.layer, network.cell):
        for name in set(BAD) & set(arguments_of(cls)):
            for value, error in BAD[name]:
                with pytest.raises(error, match=f"`{name}` must be") as caught:
                    cls(**{**network.small, name: value})
                assert repr(value) in str(caught.value)


@each_network
def test_a_cell_can_be_subclassed_as_usual(network):
    class Mine(network.cell):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.twice = 2 * extra

    cell = Mine(UNITS, extra=3)

    assert cell.twice == 6 and cell.get_config()["units"] == UNITS


# --- values and shapes ------------------------------------------------------


@pytest.mark.slow_after(1, "jax")
@each_network
def test_the_layer_and_the_bare_cell_are_one(network, rng):
    layer = built(
        network, rng, return_sequences=True, return_state=True, name="net"
    )
    bare = network.make_bare(layer, return_sequences=True, return_state=True)
    bare.build((None, None, FEATURES))
    bare.set_weights(layer.get_weights())
    x = inputs(rng)

    for a, b in zip(layer(x), bare(x), strict=True):
        close(a, b)
    assert [(w.name, w.shape) for w in bare.weights] == [
        (w.name, w.shape) for w in layer.weights
    ]
    assert {w.path for w in layer.weights} == {
        f"net/{layer.cell.name}/{w.name}" for w in layer.cell.weights
    }


@each_network
def test_symbolic_and_eager_shapes_agree(network, rng):
    layer = network.make(return_sequences=True, return_state=True)
    symbolic = layer(keras.Input((None, FEATURES)))
    eager = layer(inputs(rng))
    computed = layer.compute_output_shape((BATCH, TIME, FEATURES))

    output = (TIME, layer.cell.output_size)
    shapes = [output, *((size,) for size in layer.cell.state_size)]
    names = ["outputs", *layer.cell.state_names]
    assert len(names) == len(symbolic) == len(eager) == len(shapes)
    for s, e, c, expected in zip(symbolic, eager, computed, shapes):
        assert tuple(e.shape) == tuple(c) == (BATCH, *expected)
        assert s.shape[-1] == expected[-1] and len(s.shape) == len(e.shape)


@pytest.mark.slow_after(1, "jax")
@each_network
def test_backwards_and_unrolled_give_the_same(network, rng):
    forward = built(network, rng, return_sequences=True)
    backward = network.make(
        return_sequences=True, go_backwards=True, unroll=True
    )
    backward.build((BATCH, TIME, FEATURES))
    backward.set_weights(forward.get_weights())
    x = inputs(rng)

    close(backward(x), forward(x[:, ::-1].copy()))


@pytest.mark.slow_after(1, "jax")
@each_network
def test_bidirectional(network, rng):
    layer = keras.layers.Bidirectional(network.make(return_sequences=True))
    x = inputs(rng)
    y = array(layer(x, mask=MASK))
    forward, backward = layer.forward_layer, layer.backward_layer
    width = forward.cell.output_size

    assert y.shape == (BATCH, TIME, 2 * width)
    close(y[..., :width], forward(x, mask=MASK))
    close(y[..., width:], array(backward(x, mask=MASK))[:, ::-1])


# --- masks ------------------------------------------------------------------


@pytest.mark.slow_after(1, "jax")
@each_network
def test_a_masked_tail_equals_a_shorter_sequence(network, rng):
    layer = built(network, rng, return_state=True)
    x = inputs(rng)
    masked = layer(x, mask=MASK)

    for b, length in enumerate(LENGTHS):
        shorter = layer(x[b : b + 1, :length])
        for whole, part in zip(masked, shorter, strict=True):
            close(whole[b : b + 1], part)


@pytest.mark.slow("jax")
@armin_then_others("jax", "tensorflow")
def test_nan_in_masked_steps_reaches_nothing(network, rng):
    layer = built(network, rng, return_sequences=True)
    x = inputs(rng)
    poisoned = np.where(MASK[..., None], x, np.nan).astype("float32")

    close(layer(poisoned, mask=MASK), layer(x, mask=MASK))
    found, found_x = gradients(layer, poisoned, training=True, mask=MASK)
    for name, gradient in found.items():
        assert gradient is None or np.isfinite(gradient).all(), name
    assert np.isfinite(found_x).all()
    assert (found_x[~MASK] == 0).all()


# --- state ------------------------------------------------------------------


@pytest.mark.slow_after(1, "jax")
@each_network
def test_two_halves_with_the_state_passed_on_equal_the_whole(network, rng):
    layer = built(network, rng, return_state=True)
    x = inputs(rng)
    whole = layer(x)
    _, *state = layer(x[:, :3])
    rest = layer(x[:, 3:], initial_state=state)

    for a, b in zip(whole, rest, strict=True):
        close(a, b)


def same_state(a, b):
    assert list(a) == list(b)
    for name in a:
        close(a[name], b[name])


@armin_then_others("jax", "tensorflow")
def test_a_stateful_layer_carries_its_state(network, rng):
    """Through predict and through fit, as one call goes over the whole."""
    options = {"return_sequences": True}
    if "learn_initial_state" in network.full:
        options["learn_initial_state"] = True
    if "addressing" in network.full:
        options["addressing"] = "soft"  # nothing is drawn that way
    plain = built(network, rng, return_state=True, **options)
    layer = network.make(stateful=True, **options)
    model = compiled(
        layer, (BATCH, HALF, FEATURES), optimizer=keras.optimizers.SGD(0.0)
    )
    layer.set_weights(plain.get_weights())
    layer.reset_state()
    start = layer.get_state()
    x = inputs(rng, time=2 * HALF)
    outputs, *states = plain(x)
    expected = dict(zip(layer.cell.state_names, states))
    both = np.concatenate([x[:, :HALF], x[:, HALF:]])

    shown = keras.Model(model.inputs, layer.output)
    found = shown.predict(both, batch_size=BATCH, verbose=0)
    close(np.concatenate(np.split(found, 2), axis=1), outputs)
    same_state(layer.get_state(), expected)
    assert layer.get_state()["pointer"].tolist() == [[2 * HALF, 0, 0, 0]] * 3
    layer.reset_state()
    same_state(layer.get_state(), start)
    if network.layer.__name__ != "TARDIS":  # whose switches draw in training
        targets = np.zeros((2 * BATCH, HALF, 2))
        model.fit(both, targets, batch_size=BATCH, verbose=0, shuffle=False)
        same_state(layer.get_state(), expected)
    layer.set_state(start)
    same_state(layer.get_state(), start)


@pytest.mark.slow_after(1, "jax")
@each_network
def test_reset_inside_a_sequence_equals_two_sequences(network, rng):
    layer = built(network, rng, return_sequences=True)
    x = inputs(rng)
    reset = np.zeros((BATCH, TIME), bool)
    reset[1, 3] = True
    y = array(layer(x, reset=reset))

    close(y[[0, 2]], array(layer(x))[[0, 2]])
    close(y[1:2, 3:], array(layer(x[1:2, 3:])))


@each_network
def test_zeros_are_a_state_to_start_from(network, rng):
    """`keras.layers.RNN.reset_state` knows no other."""
    layer = built(network, rng, return_state=True)
    start = layer.get_initial_state(BATCH)
    zeros = [ops.zeros_like(state) for state in start]
    x = inputs(rng)

    close(layer(x, initial_state=zeros)[0], layer(x)[0], atol=1e-3)


# --- files ------------------------------------------------------------------


@pytest.mark.slow_after(1, "tensorflow")
@each_network
def test_a_saved_model_and_saved_weights_load(network, rng, tmp_path):
    model = compiled(network.make(), (None, TIME, FEATURES))
    randomise(model, rng)
    x = inputs(rng)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")

    loaded = keras.models.load_model(tmp_path / "model.keras")
    close(loaded.predict(x, verbose=0), expected)
    fresh = keras.models.clone_model(model)
    assert np.abs(fresh.predict(x, verbose=0) - expected).max() > 1e-3
    fresh.load_weights(tmp_path / "model.weights.h5")
    close(fresh.predict(x, verbose=0), expected)


# --- training ---------------------------------------------------------------


@armin_then_others()
# Without jit JAX compiles hundreds of operations, each by itself; the tests of
# gradients here do that already.
@pytest.mark.parametrize(
    "jit_compile",
    [
        pytest.param(False, marks=pytest.mark.slow("jax", "tensorflow")),
        pytest.param(True, marks=pytest.mark.slow("torch")),
    ],
)
def test_training_with_and_without_jit(network, jit_compile, rng, monkeypatch):
    if BACKEND == "torch":
        import torch

        # The graph is what may fail. To make C++ of it, which takes most of a
        # minute, is left to the test of the bare cell.
        compile_graph = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", compile_graph)
    model = compiled(
        network.make(seed=3), (None, None, FEATURES), jit_compile=jit_compile
    )
    x, y = inputs(rng, 4, 2), rng.normal(size=(4, 2))
    # Without compilation JAX traces the loop again in each update.
    traced_each_time = BACKEND == "jax" and not jit_compile
    updates = 3 if traced_each_time else 40
    losses = [float(model.train_on_batch(x, y)) for _ in range(updates)]

    assert np.isfinite(losses).all() and len(set(losses)) == updates
    if not traced_each_time:
        assert np.mean(losses[-10:]) < np.mean(losses[:10])


def with_variants():
    """Every network, and those that differ in the released code again."""
    for name, network in NETWORKS.items():
        marks = marks_of(name)
        yield pytest.param(network, {}, id=name, marks=marks)
        if "variant" in network.full:
            released = {"variant": "released"}
            yield pytest.param(
                network, released, id=f"{name} released", marks=marks
            )


@pytest.mark.slow_after(1, "jax")
@pytest.mark.parametrize(("network", "variant"), with_variants())
def test_gradients_reach_every_weight_and_are_finite(network, variant, rng):
    options = {"layer_norm": True, "seed": 2, **variant}
    if "learn_initial_state" in network.full:
        options["learn_initial_state"] = True
    # The state an untrained layer starts with, not a random one.
    layer = network.make(return_sequences=True, **options)
    x = inputs(rng)
    x[:, 0] = 0  # with h = 0 what is normalised first is constant
    layer.build(x.shape)
    width = layer.cell.output_size
    weigh = rng.normal(size=(BATCH, TIME, width)).astype("float32")

    found, of_x = gradients(layer, x, training=True, weigh=weigh)

    assert np.isfinite(of_x).all()
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        assert np.abs(gradient).max() > 0, name


@pytest.mark.slow_after(1, "jax")
@each_network
def test_a_seed_repeats_what_is_drawn_and_inference_draws_nothing(network, rng):
    rates = {
        name: 0.3
        for name in ("dropout", "recurrent_dropout", "zoneout", "zoneout_cell")
        if name in network.full
    }
    first = built(network, rng, seed=4, **rates)
    second = network.make(seed=4, **rates)
    second.build((BATCH, TIME, FEATURES))
    second.set_weights(first.get_weights())
    x = inputs(rng)
    a, b = (array(first(x, training=True)) for _ in range(2))

    np.testing.assert_array_equal(array(second(x, training=True)), a)
    assert np.abs(a - b).max() > 1e-3
    np.testing.assert_array_equal(array(first(x)), array(second(x)))


@each_network
def test_regularizers_act_on_kernels_and_biases(network, rng):
    of_all = {
        f"{kind}_regularizer": keras.regularizers.L1(1.0)
        for kind in ("kernel", "recurrent", "bias")
    }
    layer = built(network, rng, layer_norm=True, **of_all)
    governed = [
        w
        for w in layer.trainable_weights
        if "norm" not in w.name
        and w.name not in ("address_keys", "recency_scale")
    ]
    expected = sum(np.abs(array(w)).sum() for w in governed)

    assert array(sum(layer.losses)) == pytest.approx(expected, rel=1e-5)


# --- precision --------------------------------------------------------------


@armin_then_others("jax", "tensorflow")
def test_mixed_precision_follows_float32_and_trains(network, rng):
    exact = network.make(return_sequences=True)
    layer = network.make(dtype="mixed_bfloat16", return_sequences=True)
    x = inputs(rng)
    model = compiled(layer, (None, TIME, FEATURES))
    exact.build(x.shape)
    exact.set_weights(layer.get_weights())
    y = layer(x)

    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    # With layer norm over a few units a rounding error may grow in a few steps.
    errors = np.abs(array(ops.cast(y, "float32")) - array(exact(x)))
    assert np.quantile(errors, 0.95) < 0.05 and errors.max() < 0.2
    loss = model.train_on_batch(x, np.ones((BATCH, TIME, 2)))
    assert np.isfinite(loss)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.slow_after(1, "jax")
@each_network
def test_float64_is_float64(network, rng, float64):
    layer = network.make(dtype="float64", return_state=True)
    outputs = layer(tensor(inputs(rng, dtype="float64")))

    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in outputs}
    assert dtypes == {"float64"}
    assert layer.cell.dtype_policy.name == "float64"


# --- looking inside ---------------------------------------------------------


@each_with_memory
def test_reads_and_writes_can_be_traced(network, rng):
    layer = built(network, rng)
    x = inputs(rng)
    trace = trace_memory(layer, x)
    slots = layer.cell.memory_slots

    for weights in trace:
        assert weights.shape == (BATCH, TIME, slots)
        assert (weights > -1e-6).all() and (weights.sum(-1) < 1 + 1e-4).all()
    # At the first step nothing is stored that SAB could recall.
    assert (trace.read_weights[:, -1].sum(-1) > 0.1).all()
    assert (trace.write_weights.sum(-1) > 0).all()


def test_without_a_memory_there_is_nothing_to_trace(rng):
    with pytest.raises(TypeError, match="no memory"):
        trace_memory(NETWORKS["LayerNormLSTM"].make(), inputs(rng))
