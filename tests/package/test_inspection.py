"""Traces, plots and the callback that logs slot usage."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import plot_memory
from keras_armin import trace_memory
from keras_armin.callbacks import SlotUsage
from keras_armin.inspection import MemoryTrace
from tests.helpers import reference
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import as_rnn
from tests.helpers.common import each_form
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor


@each_form
@pytest.mark.parametrize("addressing", ["hard", "soft"])
def test_the_trace_is_what_the_reference_read_and_wrote(make, addressing, rng):
    options = {"memory_slots": 3, "addressing": addressing}
    layer = make(units=UNITS, **options)
    x = inputs(rng)
    layer.build(x.shape)
    randomise(layer, rng)
    weights = {w.name: array(w) for w in layer.trainable_weights}
    mask = rng.random((BATCH, TIME)) < 0.8
    _, _, reads, writes = reference.run(UNITS, options, weights, x, mask=mask)

    trace = trace_memory(layer, x, mask=mask)

    np.testing.assert_allclose(trace.read_weights, reads, atol=1e-5)
    np.testing.assert_allclose(trace.write_weights, writes, atol=1e-5)
    assert (trace.read_slots[~mask] == -1).all()
    assert (trace.write_slots[mask] == writes[mask].argmax(-1)).all()


def test_a_trace_leaves_a_carried_state_alone(rng):
    layer = ARMIN(UNITS, SLOTS, stateful=True)
    x = inputs(rng)
    layer(x)
    state = layer.get_state()
    trace = trace_memory(layer, x)
    after = layer.get_state()

    assert (trace.write_slots[:, 0] == trace.read_slots[:, 0]).all(), "full"
    for name, value in state.items():
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.slow("jax")
def test_a_stateful_bare_cell_is_traced_from_its_state(rng):
    layer = as_rnn(units=UNITS, memory_slots=TIME + 2, stateful=True)
    x = inputs(rng)
    layer(x)
    trace = trace_memory(layer, x)

    assert trace.write_slots[0, :2].tolist() == [TIME, TIME + 1]


@pytest.mark.slow("jax")
def test_a_float64_bare_cell_is_traced_in_float64(rng, float64):
    options = {"memory_slots": 3, "addressing": "soft"}
    layer = as_rnn(units=UNITS, dtype="float64", **options)
    x = inputs(rng, dtype="float64")
    layer.build(x.shape)
    randomise(layer, rng)
    weights = {w.name: array(w) for w in layer.trainable_weights}
    _, _, reads, _ = reference.run(UNITS, options, weights, x)

    trace = trace_memory(layer, tensor(x))

    np.testing.assert_allclose(trace.read_weights, reads, rtol=1e-11)


def test_a_trace_of_training_shows_the_samples(rng):
    layer = ARMIN(UNITS, SLOTS, addressing="relaxed", temperature=5.0)
    trace = trace_memory(layer, inputs(rng), training=True)

    assert ((trace.read_weights > 0) & (trace.read_weights < 1)).all()
    np.testing.assert_allclose(trace.read_weights.sum(-1), 1.0, rtol=1e-5)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_trace_in_mixed_precision(frozen, rng):
    layer = ARMIN(UNITS, SLOTS, dtype="mixed_bfloat16", trainable=not frozen)
    exact = ARMIN(UNITS, SLOTS)
    x = inputs(rng)
    exact.build(x.shape)
    layer.build(x.shape)
    layer.set_weights(exact.get_weights())

    np.testing.assert_array_equal(
        trace_memory(layer, x).write_slots, trace_memory(exact, x).write_slots
    )
    outputs = layer(x, training=True)
    assert tuple(outputs.shape) == (BATCH, layer.cell.output_size)


@pytest.mark.slow("jax", "tensorflow")
def test_the_inputs_of_a_masked_layer_in_a_model(rng):
    """`layer.input` is then a list of inputs and mask."""
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]])
    x = keras.Input((5,), dtype="int32")
    embedding = keras.layers.Embedding(6, FEATURES, mask_zero=True)
    layer = ARMIN(UNITS, SLOTS)
    model = keras.Model(x, keras.layers.Dense(1)(layer(embedding(x))))
    inputs_model = keras.Model(model.inputs, layer.input)
    expected = (tokens == 0).tolist()

    for given in (inputs_model(tokens), embedding(tokens)):
        slots = trace_memory(layer, given).read_slots
        assert (slots == -1).tolist() == expected
    model.compile("sgd", "mse")
    history = model.fit(
        tokens,
        np.zeros((2, 1)),
        verbose=0,
        callbacks=[SlotUsage(layer, tokens, inputs_model)],
    )
    assert 0 < history.history["slot_usage"][0] <= 1


def test_pictures_say_what_they_take(rng):
    trace = trace_memory(ARMIN(UNITS, SLOTS), inputs(rng))
    with pytest.raises(ValueError, match="`sample`.*0 to 2.*9"):
        plot_memory(trace, sample=9)
    with pytest.raises(TypeError, match="`trace`.*trace_memory.*ARMIN"):
        plot_memory(ARMIN(UNITS))


def test_only_memory_layers_can_be_traced(rng):
    with pytest.raises(TypeError, match="`layer` must be an `ARMIN`"):
        trace_memory(keras.layers.LSTM(3), inputs(rng))


def test_a_model_is_told_how_to_trace_its_layer(rng):
    x = keras.Input((None, FEATURES), name="x")
    model = keras.Model({"x": x}, ARMIN(UNITS, SLOTS)(x))

    with pytest.raises(TypeError, match=r"`layer`.*\(model\.inputs, layer\.in"):
        trace_memory(model, {"x": inputs(rng)})


def test_the_picture_tells_reads_and_writes_apart():
    """Time across, slots up; reads in blue, writes as orange frames."""
    import matplotlib.pyplot as plt

    eye = np.eye(SLOTS)
    read, write = np.array([1, 1, 4]), np.array([0, 2, 4])
    ax = plot_memory(
        MemoryTrace(eye[read][None], eye[write][None]), title="three steps"
    )
    (image,) = ax.images
    (frames,) = ax.collections
    corners = sorted(
        tuple(path.vertices.min(axis=0)) for path in frames.get_paths()
    )

    assert image.origin == "lower"
    np.testing.assert_array_equal(np.asarray(image.get_array()), eye[read].T)
    assert corners == [(-0.5, -0.5), (0.5, 1.5), (1.5, 3.5)]
    assert ax.get_xlabel() == "time step" and ax.get_ylabel() == "memory slot"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "read",
        "written",
    ]
    assert ax.get_title(loc="right") == "three steps"
    plt.close(ax.figure)


def test_a_picture_can_be_drawn_on_given_axes_and_saved(rng, tmp_path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2)
    layer = ARMIN(UNITS, 1)
    trace = trace_memory(layer, inputs(rng))
    assert plot_memory(trace, sample=2, ax=axes[1]) is axes[1]
    figure.savefig(tmp_path / "memory.png")
    plt.close(figure)

    assert (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_package_imports_without_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import keras_armin"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow("tensorflow")
def test_slot_usage_is_logged(rng):
    inputs_ = keras.Input((TIME, FEATURES))
    layer = ARMIN(UNITS, SLOTS)
    model = keras.Model(inputs_, keras.layers.Dense(1)(layer(inputs_)))
    # Steps so large that stale weights would show.
    model.compile(keras.optimizers.SGD(30.0), "mse")
    x = inputs(rng)
    usage = SlotUsage(layer, x, prefix="a_")
    through_model = SlotUsage(
        layer, x, inputs_model=keras.Model(inputs_, layer.input)
    )
    history = model.fit(
        x,
        np.ones((BATCH, 1)),
        epochs=2,
        verbose=0,
        callbacks=[usage, through_model],
    ).history
    slots = trace_memory(layer, x).read_slots.ravel()
    share = np.bincount(slots, minlength=SLOTS) / slots.size
    entropy = -sum(p * np.log2(p) for p in share if p)

    for prefix in ("a_", ""):
        assert history[f"{prefix}slot_usage"][-1] == np.mean(share > 0)
        assert history[f"{prefix}read_entropy"][-1] == pytest.approx(
            entropy, rel=1e-5
        )


def test_slot_usage_of_a_soft_read_counts_favoured_slots():
    from keras_armin.callbacks import slot_usage

    weights = np.array([[[0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]])
    assert slot_usage(MemoryTrace(weights, weights)) == 1 / 3


def test_the_entropy_of_one_slot_is_zero_and_of_all_is_log2(rng):
    from keras_armin.callbacks import entropy_in_bits

    assert entropy_in_bits(np.array([0.0, 1.0])) == 0.0
    assert entropy_in_bits(np.full(8, 1 / 8)) == pytest.approx(3.0)
