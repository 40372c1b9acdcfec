"""Models of a single step: the same numbers as over the whole sequence."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin.recurrent_step import RecurrentStep
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.networks import each_network

layers = keras.layers


def sequential(*stack, features=FEATURES):
    return keras.Sequential([keras.Input((None, features)), *stack])


def small_armin(**arguments):
    return ARMIN(UNITS, memory_slots=SLOTS, **arguments)


def run_steps(step, x, states=None):
    """Step over `x`; the outputs of all steps, states left out."""
    states = step.initial_states(len(x)) if states is None else states
    first, after = step.num_outputs, step.num_outputs + step.num_states
    kept = []
    for t in range(x.shape[1]):
        results = step.predict_on_batch([x[:, t], *states])
        states = results[first:after]
        kept.append([*results[:first], *results[after:]])
    return [np.stack(column, axis=1) for column in zip(*kept)]


def check_steps(model, x, **arguments):
    step = keras_armin.step_model(model, **arguments)
    stepped, *reads = run_steps(step, x)
    whole = model.predict(x, verbose=0)  # compiled, unlike a call
    if whole.ndim == 2:  # the last output alone
        stepped = stepped[:, -1]
    np.testing.assert_allclose(stepped, whole, atol=1e-5)
    return reads


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_network
def test_steps_give_the_outputs_of_the_sequence(network, rng):
    layer = network.make(return_sequences=True)
    model = sequential(layer, layers.Dense(2))
    randomise(layer, rng)

    check_steps(model, inputs(rng))


MODELS = {
    "stacked": lambda: sequential(
        small_armin(return_sequences=True, layer_norm=True, zoneout=0.2),
        layers.LayerNormalization(),
        small_armin(memory_dim=3),
        layers.Dense(2),
    ),
    "a learnt start": lambda: sequential(small_armin(learn_initial_state=True)),
    "soft reads": lambda: sequential(
        small_armin(addressing="soft", return_sequences=True)
    ),
    "a bare cell": lambda: sequential(
        layers.RNN(ARMINCell(UNITS, memory_slots=SLOTS))
    ),
    "layers of Keras": lambda: sequential(
        layers.LSTM(5, return_sequences=True),
        layers.RNN(
            [ARMINCell(UNITS, memory_slots=SLOTS), layers.GRUCell(3)],
            return_sequences=True,
        ),
        layers.GRU(2),
    ),
    "a model inside": lambda: sequential(
        sequential(small_armin(return_sequences=True), layers.Dense(3)),
        layers.Dense(2),
    ),
    "last output padded with zeros": lambda: sequential(
        layers.Masking(),
        small_armin(zero_output_for_mask=True, return_sequences=True),
    ),
}


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_agree_for_models_of_many_kinds(make, rng):
    model = make()
    randomise(model, rng)
    x = inputs(rng)
    x[1, 2:4] = 0.0  # what Masking masks

    check_steps(model, x)


@pytest.mark.slow("jax", "tensorflow")
def test_a_sum_beside_a_layer_of_a_fixed_length(rng):
    sequence = keras.Input((TIME, FEATURES))
    y = small_armin(return_sequences=True)(sequence)
    model = keras.Model(sequence, layers.Dense(FEATURES)(y) + sequence)

    check_steps(model, inputs(rng))


def test_masked_steps_leave_the_states_and_read_nothing(rng):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(6, FEATURES, mask_zero=True),
            small_armin(return_sequences=True),
        ]
    )
    randomise(model, rng)
    ids = np.array([[3, 0, 5, 1], [0, 2, 2, 4], [1, 1, 0, 0]], "int32")

    (reads,) = check_steps(model, ids, reads=True)

    np.testing.assert_array_equal(reads == -1, ids == 0)


def test_reads_are_those_of_the_trace(rng):
    layer = small_armin(return_sequences=True)
    model = sequential(layer)
    randomise(layer, rng, scale=1.0)
    x = inputs(rng, time=20)

    (reads,) = check_steps(model, x, reads=True)

    trace = keras_armin.trace_memory(layer, x)
    np.testing.assert_array_equal(reads, trace.read_slots)
    assert len(np.unique(reads)) > 1


def test_names_tell_whose_state_an_input_or_output_is():
    step = keras_armin.step_model(
        sequential(small_armin(name="reader", return_sequences=True)),
        reads=True,
    )

    names = [x.name for x in step.inputs[1:]]

    assert names == [
        f"reader_{x}"
        for x in ("output", "h", "memory", "pointer", "write_order")
    ]
    assert step.num_states == 5 and step.num_outputs == 1
    assert step.output_names == [
        "reader",
        *(f"new_{name}" for name in names),
        "reader_read",
    ]


def test_names_of_outputs_are_unique():
    x = keras.Input((None, FEATURES), name="x")
    y = small_armin(name="y", return_sequences=True)(x)
    step = keras_armin.step_model(keras.Model(x, [x, y, y]))

    assert step.output_names[:3] == ["x_1", "y", "y_1"]


def test_a_step_without_its_states_is_told_how_to_start(rng):
    step = keras_armin.step_model(sequential(small_armin()))
    x = inputs(rng)[:, 0]
    for inputs_, got in (
        (x, "ndarray"),
        (keras.ops.convert_to_tensor(x), "Tensor|Array"),
        ([x], "1 of them"),
    ):
        with pytest.raises(
            ValueError, match=rf"6 tensors.*({got}).*step\.initial_states\("
        ):
            step(inputs_)


def test_a_stateful_model_with_resets_becomes_a_step(rng):
    sequence = keras.Input(batch_shape=(BATCH, None, FEATURES))
    reset = keras.Input(batch_shape=(BATCH,), dtype="bool")
    layer = small_armin(stateful=True, return_sequences=True)
    model = keras.Model([sequence, reset], layer(sequence, reset=reset))
    x = inputs(rng)

    step = keras_armin.step_model(model)
    (stepped,) = run_steps(step, x)

    whole = model([x, np.ones(BATCH, bool)])
    np.testing.assert_allclose(stepped, array(whole), atol=1e-5)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.slow("torch")
def test_a_thousand_steps_do_not_drift(rng):
    layer = small_armin(return_sequences=True, layer_norm=True)
    model = sequential(layer, layers.Dense(2))
    randomise(layer, rng)

    check_steps(model, inputs(rng, time=1000))


@pytest.mark.skipif(BACKEND == "torch", reason="torch does not compile")
def test_a_step_is_compiled_once(rng, monkeypatch):
    step = keras_armin.step_model(sequential(small_armin(), layers.Dense(2)))
    x = inputs(rng, time=1)[:, 0]
    states = step.initial_states(BATCH)
    step.predict_on_batch([x, *states])
    monkeypatch.setattr(
        RecurrentStep,
        "call",
        lambda *args, **kwargs: pytest.fail("traced once more"),
    )

    step.predict_on_batch([x, *states])


def rejected(model, **arguments):
    with pytest.raises(ValueError) as caught:
        keras_armin.step_model(model, **arguments)
    return str(caught.value)


def test_unsupported_layers_are_rejected():
    assert "bidirectional" in rejected(
        sequential(layers.Bidirectional(small_armin()))
    )
    assert "`go_backwards=True`" in rejected(
        sequential(small_armin(go_backwards=True))
    )
    assert "Conv1D" in rejected(sequential(layers.Conv1D(3, 2), small_armin()))
    assert "recurrent layer" in rejected(sequential(layers.Dense(3)))


def test_a_layer_used_twice_is_rejected():
    half = FEATURES // 2
    layer = ARMIN(half, SLOTS, memory_dim=half, return_sequences=True)

    assert "more than once" in rejected(sequential(layer, layer))


def test_a_subclassed_model_is_rejected():
    class Custom(keras.Model):
        def call(self, x):
            return x

    model = Custom()
    model(np.zeros((1, 2, 3)))

    assert "functional" in rejected(model)
    with pytest.raises(TypeError, match="keras.Model"):
        keras_armin.step_model(small_armin())


@pytest.mark.slow("jax", "tensorflow")
def test_a_layer_of_ones_own_can_be_vouched_for(rng):
    class Double(layers.Layer):
        def call(self, x):
            return 2 * x

    model = sequential(Double(), small_armin())

    assert "Double" in rejected(model)
    check_steps(model, inputs(rng), stepwise=(Double,))


# --- steps that keep their states -------------------------------------------


@pytest.fixture
def streamed(rng):
    """A model with a learnt start, its stream, and what it should give."""
    layer = small_armin(return_sequences=True, learn_initial_state=True)
    model = sequential(layer, layers.Dense(2))
    randomise(layer, rng)
    x = inputs(rng)
    stream = keras_armin.streaming_model(model, BATCH)
    return stream, x, array(model(x, training=False))


def flow(stream, x):
    return np.stack(
        [stream.predict_on_batch(x[:, t]) for t in range(x.shape[1])], axis=1
    )


@pytest.mark.slow("tensorflow")
def test_a_stream_keeps_its_memory(streamed):
    stream, x, whole = streamed

    halves = np.concatenate([flow(stream, x[:, :3]), flow(stream, x[:, 3:])], 1)

    np.testing.assert_allclose(halves, whole, atol=1e-5)


@pytest.mark.slow("jax", "tensorflow")
def test_a_stream_can_restart_while_others_continue(streamed):
    stream, x, whole = streamed
    flow(stream, x)

    stream.reset(np.array([True, False, True]))
    y = flow(stream, x)

    np.testing.assert_allclose(y[[0, 2]], whole[[0, 2]], atol=1e-5)
    assert np.abs(y[1] - whole[1]).max() > 1e-3
    stream.reset()
    np.testing.assert_allclose(flow(stream, x), whole, atol=1e-5)


def test_a_stream_says_what_it_takes(streamed):
    stream, x, _ = streamed

    with pytest.raises(ValueError, match=r"inputs.*\(2, 4\)"):
        stream(x[:2, 0])
    with pytest.raises(ValueError, match=r"samples.*bool.*\(3,\).*`reset\(\)`"):
        stream.reset([True, False])
    with pytest.raises(ValueError, match=r"samples.*bool.*\[0, 2, 1\]"):
        stream.reset([0, 2, 1])
    with pytest.raises(ValueError, match="batch_size"):
        keras_armin.StreamingModel(stream.step, 0)


_SERVE = """
import sys
# TensorFlow imports Keras if it can, which it must not here.
sys.modules.update(keras=None, keras_armin=None)
import numpy as np
import tensorflow as tf

folder, data = sys.argv[1:]
arrays = np.load(data)
served = tf.saved_model.load(folder)
everybody = tf.ones(len(arrays["x"]), "bool")
restart = served.signatures["reset"]
sequence = tf.unstack(tf.constant(arrays["x"]), axis=1)
for _ in range(2):
    steps = [served.serve(x).numpy() for x in sequence]
    np.testing.assert_allclose(
        np.stack(steps, axis=1), arrays["whole"], atol=1e-4)
    restart(samples=everybody)
"""


@pytest.mark.slow("tensorflow")
@pytest.mark.slow("jax")
def test_a_served_stream_keeps_its_memory(streamed, tmp_path):
    stream, x, whole = streamed
    if BACKEND == "torch":
        with pytest.raises(ValueError, match="step_model"):
            stream.export(tmp_path / "served")
        return
    with pytest.raises(ValueError, match="step_model"):
        stream.export(tmp_path / "served.onnx", format="onnx")

    stream.export(tmp_path / "served", verbose=False)

    np.savez(tmp_path / "data.npz", x=x, whole=whole)
    subprocess.run(
        [sys.executable, "-c", _SERVE, "served", "data.npz"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
