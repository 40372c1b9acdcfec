"""State carried across batches, on every backend."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import ARMIN
from keras_armin.callbacks import ValidationState
from keras_armin.memory_rnn import MemoryRNN
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import randomise

NAMES = ["output", "h", "memory", "pointer", "write_order"]
SIZES = [UNITS + DIM, UNITS, SLOTS * DIM, 4, SLOTS]
HALF = 4


def stateful_model(rng, batch=BATCH, time=None, **options):
    layer = ARMIN(
        UNITS,
        SLOTS,
        memory_dim=DIM,
        stateful=True,
        return_sequences=True,
        **{"addressing": "soft", **options},
    )
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(batch, time, FEATURES)),
            layer,
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
    if rng is not None:
        randomise(model, rng)
    return model, layer


def same_state(a, b, atol=1e-5):
    assert list(a) == list(b) == NAMES
    for name in NAMES:
        np.testing.assert_allclose(a[name], b[name], atol=atol, err_msg=name)


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("addressing", ["hard", "soft"])
def test_two_halves_by_predict_end_like_the_whole(addressing, rng):
    model, layer = stateful_model(rng, addressing=addressing)
    x = inputs(rng, time=2 * HALF)
    whole = model.predict(x, batch_size=BATCH, verbose=0)
    expected = layer.get_state()
    layer.reset_state()
    halves = [
        model.predict(part, batch_size=BATCH, verbose=0)
        for part in (x[:, :HALF], x[:, HALF:])
    ]

    np.testing.assert_allclose(np.concatenate(halves, 1), whole, atol=1e-5)
    same_state(layer.get_state(), expected)
    assert expected["pointer"][0].tolist() == [2 * HALF, 0, 0, 0]


def test_two_halves_by_fit_end_like_the_whole(rng):
    model, layer = stateful_model(rng)
    x = inputs(rng, time=2 * HALF)
    y = np.zeros((BATCH, 2 * HALF, 2), "float32")
    fit = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
    model.fit(x, y, **fit)
    expected = layer.get_state()
    layer.reset_state()
    # One fit with two batches: the state passes from batch to batch inside.
    both_x = np.concatenate([x[:, :HALF], x[:, HALF:]])
    both_y = np.zeros((2 * BATCH, HALF, 2), "float32")
    model.fit(both_x, both_y, **fit)

    same_state(layer.get_state(), expected)
    assert np.abs(expected["memory"]).max() > 0.1


@pytest.mark.slow("jax", "tensorflow")
def test_evaluate_and_predict_go_on_from_the_same_state(rng):
    model, layer = stateful_model(rng)
    x = inputs(rng, time=HALF)
    y = np.zeros((BATCH, HALF, 2), "float32")
    counts = []
    for run in (
        lambda: model.fit(x, y, batch_size=BATCH, verbose=0),
        lambda: model.evaluate(x, y, batch_size=BATCH, verbose=0),
        lambda: model.predict(x, batch_size=BATCH, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: model(x),
    ):
        run()
        counts.append(layer.get_state()["pointer"][0, 0])

    assert counts == [4, 8, 12, 16, 20]


@pytest.mark.parametrize("learnt", [False, True])
def test_reset_state_restores_the_true_initial_state(learnt, rng):
    model, layer = stateful_model(rng, learn_initial_state=learnt)
    x = inputs(rng)
    layer.reset_state()
    first = model.predict(x, batch_size=BATCH, verbose=0)
    second = model.predict(x, batch_size=BATCH, verbose=0)
    layer.reset_state()

    state = layer.get_state()
    expected = [array(s) for s in layer.get_initial_state(BATCH)]
    same_state(state, dict(zip(NAMES, expected)), atol=0)
    assert (np.abs(state["h"]).max() > 0) == learnt
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_allclose(
        model.predict(x, batch_size=BATCH, verbose=0), first, atol=1e-6
    )


class TwoBatches(keras.layers.Layer):
    """Two calls of a stateful layer inside one differentiated call."""

    def __init__(self, layer, earlier):
        super().__init__()
        self.layer, self.earlier = layer, earlier

    def call(self, x, training=False):
        self.layer(self.earlier, training=training)
        return self.layer(x, training=training)


@pytest.mark.slow("jax")
def test_gradients_are_cut_between_batches(rng):
    """The gradient is that of a call which is given the state as data."""
    _, layer = stateful_model(rng)
    x, later = inputs(rng), inputs(rng)
    layer.reset_state()
    layer(x, training=True)
    state = layer.get_state()
    layer.reset_state()
    both = TwoBatches(layer, x)
    both.build(x.shape)
    carried, carried_x = gradients(both, later, training=True)
    layer.reset_state()
    given, given_x = gradients(
        layer,
        later,
        training=True,
        initial_state=[ops.convert_to_tensor(state[n]) for n in NAMES],
    )

    np.testing.assert_allclose(carried_x, given_x, atol=1e-6)
    for name in given:
        np.testing.assert_allclose(
            carried[name], given[name], atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow("jax", "tensorflow")
def test_training_over_many_batches_learns(rng):
    model, _ = stateful_model(None, time=TIME, addressing="hard", seed=3)
    model.compile(keras.optimizers.Adam(0.02), "mse")
    x = inputs(rng, BATCH * 4)
    y = rng.normal(size=(BATCH * 4, TIME, 2))
    history = model.fit(
        x, y, batch_size=BATCH, epochs=12, verbose=0, shuffle=False
    )

    losses = history.history["loss"]
    assert losses[-1] < 0.9 * losses[0]


def test_get_and_set_state_round_trip(rng):
    model, layer = stateful_model(rng)
    x = inputs(rng)
    model.predict(x, batch_size=BATCH, verbose=0)
    state = layer.get_state()
    assert {k: v.shape for k, v in state.items()} == {
        name: (BATCH, size) for name, size in zip(NAMES, SIZES)
    }
    after = model.predict(x, batch_size=BATCH, verbose=0)
    layer.set_state(state)

    np.testing.assert_allclose(
        model.predict(x, batch_size=BATCH, verbose=0), after, atol=1e-6
    )
    assert state["pointer"][0, 0] == TIME, "a copy, not a view"


def test_a_state_can_be_set_from_a_file_of_numpy(rng, tmp_path):
    _, layer = stateful_model(rng)
    layer(inputs(rng))
    state = layer.get_state()
    np.savez(tmp_path / "state.npz", **state)
    layer.reset_state()

    with np.load(tmp_path / "state.npz") as saved:
        layer.set_state(saved)

    same_state(layer.get_state(), state, atol=0)


@pytest.mark.slow("jax", "tensorflow")
def test_weights_hold_no_state_and_load_at_another_batch_size(rng, tmp_path):
    model, layer = stateful_model(rng)
    x = inputs(rng)
    model.predict(x, batch_size=BATCH, verbose=0)
    shapes = [tuple(w.shape) for w in model.weights]
    assert all(BATCH not in shape for shape in shapes)
    model.save_weights(tmp_path / "a.weights.h5")

    other, other_layer = stateful_model(None, batch=2)
    other.predict(x[:2], batch_size=2, verbose=0)
    other.load_weights(tmp_path / "a.weights.h5")

    assert (other_layer.get_state()["pointer"] == 0).all(), "loading resets"
    layer.reset_state()
    np.testing.assert_allclose(
        other.predict(x[:2], batch_size=2, verbose=0),
        model.predict(x, batch_size=BATCH, verbose=0)[:2],
        atol=1e-6,
    )
    other.set_weights(model.get_weights())


def test_loading_resets_to_the_loaded_initial_state(rng, tmp_path):
    model, layer = stateful_model(rng, learn_initial_state=True)
    model.save_weights(tmp_path / "a.weights.h5")
    layer.reset_state()
    expected = layer.get_state()
    other, other_layer = stateful_model(rng, learn_initial_state=True)

    other.load_weights(tmp_path / "a.weights.h5")

    same_state(other_layer.get_state(), expected)


def test_loading_resets_all_layers_that_share_the_cell(rng, tmp_path):
    model, layer = stateful_model(rng)
    other = MemoryRNN(layer.cell, stateful=True)
    model.save_weights(tmp_path / "a.weights.h5")
    layer(inputs(rng))
    other(inputs(rng))

    model.load_weights(tmp_path / "a.weights.h5")

    assert (layer.get_state()["pointer"] == 0).all()
    assert (other.get_state()["pointer"] == 0).all()


def test_a_loaded_stateful_model_restarts(rng, tmp_path):
    model, layer = stateful_model(rng)
    x = inputs(rng)
    first = model.predict(x, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")

    np.testing.assert_allclose(
        loaded.predict(x, batch_size=BATCH, verbose=0), first, atol=1e-6
    )


# --- reset, sample by sample ------------------------------------------------


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("learnt", [False, True])
def test_reset_restarts_single_samples(go_backwards, learnt, rng):
    layer = ARMIN(
        UNITS,
        SLOTS,
        memory_dim=DIM,
        stateful=True,
        go_backwards=go_backwards,
        learn_initial_state=learnt,
    )
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    layer.reset_state()
    fresh = array(layer(x))
    state = layer.get_state()
    carried = array(layer(x))
    layer.set_state(state)

    mixed = array(layer(x, reset=np.array([True, False, True])))

    np.testing.assert_allclose(mixed[[0, 2]], fresh[[0, 2]], atol=1e-6)
    np.testing.assert_allclose(mixed[1], carried[1], atol=1e-6)


@pytest.mark.slow("jax")
def test_reset_inside_a_sequence_equals_two_sequences(rng):
    layer = ARMIN(UNITS, SLOTS, learn_initial_state=True, return_sequences=True)
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    reset = np.zeros((BATCH, TIME), bool)
    reset[1, 3] = True
    y = array(layer(x, reset=reset))

    np.testing.assert_allclose(y[[0, 2]], array(layer(x))[[0, 2]], atol=1e-6)
    np.testing.assert_allclose(y[1:2, 3:], array(layer(x[1:2, 3:])), atol=1e-6)
    np.testing.assert_allclose(y[1:2, :3], array(layer(x[1:2, :3])), atol=1e-6)


@pytest.mark.slow("jax")
def test_a_reset_takes_place_at_a_masked_step(rng):
    layer = ARMIN(UNITS, SLOTS, return_sequences=True)
    x = inputs(rng)
    reset, mask = np.zeros((BATCH, TIME), bool), np.ones((BATCH, TIME), bool)
    reset[:, 3], mask[:, 3] = True, False
    y = array(layer(x, reset=reset, mask=mask))

    assert (y[:, 3] == 0).all()
    np.testing.assert_allclose(y[:, 4:], array(layer(x[:, 4:])), atol=1e-6)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("shape", ["sample", "step"])
def test_reset_sends_gradients_into_a_learnt_start(shape, rng):
    layer = ARMIN(
        UNITS, SLOTS, addressing="soft", stateful=True, learn_initial_state=True
    )
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    reset = np.zeros((BATCH, TIME), bool)
    reset[0, 0] = True
    if shape == "sample":
        reset = reset[:, 0]
    kept, _ = gradients(layer, x, training=True)
    started, _ = gradients(layer, x, training=True, reset=reset)

    for name in ("initial_state", "initial_memory"):
        nothing = kept[name] is None or (kept[name] == 0).all()
        assert nothing, "a carried state is data"
        assert np.abs(started[name]).max() > 0


def test_reset_in_a_functional_model(rng):
    x_in = keras.Input(batch_shape=(BATCH, TIME, FEATURES))
    reset_in = keras.Input(batch_shape=(BATCH,), dtype="bool")
    layer = ARMIN(UNITS, SLOTS, stateful=True)
    model = keras.Model([x_in, reset_in], layer(x_in, reset=reset_in))
    x = inputs(rng)
    keep, renew = np.zeros(BATCH, bool), np.ones(BATCH, bool)
    first = model.predict([x, keep], batch_size=BATCH, verbose=0)
    second = model.predict([x, keep], batch_size=BATCH, verbose=0)
    third = model.predict([x, renew], batch_size=BATCH, verbose=0)

    assert np.abs(first - second).max() > 1e-4
    np.testing.assert_allclose(third, first, atol=1e-6)


# --- validation inside fit --------------------------------------------------


class Recorder(keras.callbacks.Callback):
    """The pointer of sample 0 around validation."""

    def __init__(self, name):
        super().__init__()
        self.name, self.seen = name, []

    def _note(self, event):
        layer = self.model.get_layer(self.name)
        self.seen.append((event, int(layer.get_state()["pointer"][0, 0])))

    def on_test_begin(self, logs=None):
        self._note("validation starts")

    def on_test_batch_end(self, batch, logs=None):
        self._note("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch ends")


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("reset_each_epoch", [False, True])
def test_validation_does_not_disturb_training(reset_each_epoch, rng):
    model, layer = stateful_model(rng, time=TIME)
    x, y = inputs(rng, 2 * BATCH), np.zeros((2 * BATCH, TIME, 2))
    recorder = Recorder(layer.name)
    model.fit(
        x,
        y,
        validation_data=(x[:BATCH], y[:BATCH]),
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[ValidationState(reset_each_epoch), recorder],
    )
    second = 2 * TIME if reset_each_epoch else 4 * TIME

    assert recorder.seen == [
        ("validation starts", 0),
        ("validation", TIME),
        ("epoch ends", 2 * TIME),
        ("validation starts", 0),
        ("validation", TIME),
        ("epoch ends", second),
    ]
    assert layer.get_state()["pointer"][0, 0] == second


@pytest.mark.slow("jax", "tensorflow")
def test_without_the_callback_validation_advances_the_state(rng):
    model, layer = stateful_model(rng, time=TIME)
    x, y = inputs(rng), np.zeros((BATCH, TIME, 2))
    model.fit(x, y, validation_data=(x, y), batch_size=BATCH, verbose=0)

    assert layer.get_state()["pointer"][0, 0] == 2 * TIME


@pytest.mark.slow("jax", "tensorflow")
def test_a_plain_evaluate_is_left_alone_by_the_callback(rng):
    model, layer = stateful_model(rng, time=TIME)
    x, y = inputs(rng), np.zeros((BATCH, TIME, 2))
    callback = ValidationState()
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])

    assert layer.get_state()["pointer"][0, 0] == 2 * TIME


# --- errors -----------------------------------------------------------------


def test_a_wrong_batch_size_is_named(rng):
    model, layer = stateful_model(rng)

    with pytest.raises(ValueError, match="carries the state of a batch of 3"):
        layer(inputs(rng, batch=2))


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("jit_compile", [False, "auto"])
@pytest.mark.slow("jax", "tensorflow")
def test_a_partial_batch_in_fit_is_named(jit_compile, rng):
    model, _ = stateful_model(rng, time=TIME)
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x, y = inputs(rng, BATCH + 1), np.zeros((BATCH + 1, TIME, 2))

    error, message = ValueError, "carries the state of a batch of 3"
    if BACKEND == "tensorflow":  # finds out inside a graph
        import tensorflow as tf

        error = tf.errors.InvalidArgumentError
        message = "stateful_layer_needs_a_batch_size_of_3"
    with pytest.raises(error, match=message):
        model.fit(x, y, batch_size=BATCH, verbose=0)


def test_an_unknown_batch_size_is_refused():
    with pytest.raises(ValueError, match="stateful=True.*fixed batch size"):
        ARMIN(UNITS, stateful=True)(keras.Input((TIME, FEATURES)))


def test_state_of_a_layer_without_one_is_refused(rng):
    layer = ARMIN(UNITS)
    layer(inputs(rng))
    with pytest.raises(ValueError, match="stateful=True"):
        layer.get_state()
    with pytest.raises(ValueError, match="needs a built layer"):
        ARMIN(UNITS, stateful=True).set_state({})


def test_a_wrong_state_is_refused_and_nothing_changes(rng):
    _, layer = stateful_model(rng)
    layer(inputs(rng))
    state = layer.get_state()
    with pytest.raises(ValueError, match="keys.*output.*pointer"):
        layer.set_state({"h": state["h"]})
    with pytest.raises(ValueError, match=r"state\['memory'\].*\(3, 10\)"):
        layer.set_state({**state, "h": 0 * state["h"], "memory": state["h"]})

    with pytest.raises(ValueError, match="`pointer`.*0 to 127"):
        layer.set_state({**state, "pointer": state["pointer"] - 100})

    same_state(layer.get_state(), state, atol=0)
