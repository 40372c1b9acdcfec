"""What a new user tries works, or raises an error with a remedy."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import export_lib
from keras_armin.memory_rnn import MemoryRNN
from keras_armin.reference_loop import LoopResult
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import BOTH
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.networks import NETWORKS

only_on_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="TensorFlow alone has ragged tensors"
)
only_on_torch = pytest.mark.skipif(
    BACKEND != "torch", reason="layers are modules on PyTorch only"
)


def made(x, rng, **arguments):
    # JAX would recompile a loop at every call outside of a model.
    layer = ARMIN(UNITS, SLOTS, **{"unroll": True, **arguments})
    layer.build(x.shape)
    randomise(layer, rng)
    if layer.stateful:
        layer.reset_state()
    return layer


def random_h(rng):
    return rng.normal(size=(BATCH, UNITS)).astype("float32")


def as_dict(names, name, value):
    return {name: value}


def as_list(names, name, value):
    return [value if other == name else None for other in names]


each_form = pytest.mark.parametrize("form", [as_dict, as_list])


# --- an initial state of which some parts are given -------------------------


@pytest.fixture(scope="module", params=NETWORKS)
def built(request):
    """Each network with an initial state that is not zero, if it has one."""
    network = NETWORKS[request.param]
    learnt = {"learn_initial_state": True}
    layer = network.make(
        return_state=True,
        **learnt if "learn_initial_state" in network.full else {},
    )
    layer.build((BATCH, 1, FEATURES))
    randomise(layer, np.random.default_rng(11))
    return layer


@pytest.fixture
def no_loop(monkeypatch):
    """Layers return what enters their loop, in the place of states."""

    def loop(layer, sequences, states, mask=None, **arguments):
        mask = [] if mask is None else [mask]
        return LoopResult([sequences, *states, *mask])

    for layer in (MemoryRNN, ARMIN):
        monkeypatch.setattr(layer, "_loop", loop)


@pytest.mark.slow_after(3, "jax")
def test_missing_states_start_from_the_initial_state(built, rng, no_loop):
    x = inputs(rng, time=1)
    names = built.cell.state_names
    expected = [array(state) for state in built.get_initial_state(BATCH)]

    for place, name in enumerate(names):
        given = rng.normal(size=expected[place].shape).astype("float32")
        wanted = [*expected[:place], given, *expected[place + 1 :]]
        for form in (as_dict, as_list):
            _, _, *states = built(x, initial_state=form(names, name, given))
            assert len(states) == len(wanted)
            for state, value in zip(states, wanted):
                np.testing.assert_array_equal(array(state), value)


def test_a_part_of_the_state_changes_the_outputs(rng):
    x, h = inputs(rng, time=1), random_h(rng)
    layer = made(x, rng)
    whole = [array(state) for state in layer.get_initial_state(BATCH)]
    whole[layer.cell.state_names.index("h")] = h
    y = array(layer(x, initial_state={"h": h}))

    np.testing.assert_allclose(y, array(layer(x, initial_state=whole)))
    assert np.abs(array(layer(x)) - y).max() > 1e-3


def test_nothing_given_is_the_initial_state(rng):
    x = inputs(rng, time=1)
    layer = made(x, rng, learn_initial_state=True, stateful=True)
    first, second = array(layer(x)), array(layer(x))

    assert np.abs(first - second).max() > 1e-4
    for nothing in ({}, {"h": None}, [None] * len(layer.cell.state_names)):
        y = layer(x, initial_state=nothing)
        np.testing.assert_allclose(array(y), first, atol=1e-6)


@each_form
def test_what_is_given_wins_over_the_carried_state(form, rng):
    x, h = inputs(rng, time=1), random_h(rng)
    layer = made(x, rng, learn_initial_state=True, stateful=True)
    given = form(layer.cell.state_names, "h", h)
    fresh = array(layer(x, initial_state=given))
    after = layer.get_state()
    layer(x)

    again = array(layer(x, initial_state=given))
    np.testing.assert_allclose(again, fresh, atol=1e-6)
    for name, value in layer.get_state().items():
        np.testing.assert_allclose(value, after[name], atol=1e-6, err_msg=name)


def test_a_state_that_was_got_can_be_given(rng):
    x = inputs(rng, time=1)
    layer = made(x, rng, stateful=True)
    layer(x)
    state = layer.get_state()
    expected = array(layer(x))

    y = layer(x, initial_state=state)
    np.testing.assert_allclose(array(y), expected, atol=1e-6)


@each_form
def test_a_part_of_the_state_from_another_layer(form, rng, tmp_path):
    x_in, z_in = keras.Input((1, FEATURES)), keras.Input((2,))
    dense = keras.layers.Dense(UNITS)
    layer = ARMIN(UNITS, SLOTS, unroll=True)
    given = form(layer.cell.state_names, "h", dense(z_in))
    model = keras.Model([x_in, z_in], layer(x_in, initial_state=given))
    randomise(model, rng)
    x = ops.convert_to_tensor(inputs(rng, time=1))
    z = ops.convert_to_tensor(rng.normal(size=(BATCH, 2)).astype("float32"))
    y = array(model([x, z]))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")

    expected = layer(x, initial_state={"h": dense(z)})
    np.testing.assert_allclose(y, array(expected), atol=1e-5)
    np.testing.assert_allclose(array(loaded([x, z])), y, atol=1e-6)
    assert np.abs(array(model([x, -z])) - y).max() > 1e-3


def test_another_layer_learns_to_give_a_part_of_the_state(rng):
    x_in, z_in = keras.Input((TIME, FEATURES)), keras.Input((2,))
    dense = keras.layers.Dense(UNITS)
    y = ARMIN(UNITS, SLOTS)(x_in, initial_state={"h": dense(z_in)})
    model = keras.Model([x_in, z_in], y)
    model.compile("sgd", "mse")
    before = array(dense.kernel)
    z = rng.normal(size=(BATCH, 2))
    model.train_on_batch([inputs(rng), z], np.ones((BATCH, y.shape[-1])))

    assert np.abs(array(dense.kernel) - before).max() > 1e-6


@each_form
def test_an_attached_mask_counts_beside_a_part_of_the_state(form, rng, no_loop):
    x = inputs(rng)
    x[:, 2:4] = 0
    layer = ARMIN(UNITS, SLOTS, return_state=True)
    given = form(layer.cell.state_names, "h", random_h(rng))
    masked = keras.layers.Masking()(x)
    *_, mask = layer(masked, initial_state=given)

    expected = np.ones((TIME, BATCH, 1))
    expected[2:4] = 0
    np.testing.assert_array_equal(array(mask), expected)


def test_bidirectional_takes_parts_of_both_states(rng):
    x, h = inputs(rng, time=1), random_h(rng)
    forward = made(x, rng)
    layer = keras.layers.Bidirectional(forward, merge_mode=None)
    given = as_list(forward.cell.state_names, "h", h)
    y = layer(x, initial_state=[*given, *given])

    expected = layer.forward_layer(x, initial_state={"h": h})
    np.testing.assert_allclose(array(y[0]), array(expected), atol=1e-6)


def test_wrong_parts_are_named(rng):
    x, h = inputs(rng), random_h(rng)
    layer = ARMIN(UNITS, SLOTS)
    bad = [
        ({"hidden": h}, r"`initial_state`.*output, h, .*\['hidden'\]"),
        ({"h": h[:, 1:]}, r"initial_state \(h\)`.*\(3, 6\).*\(3, 5\)"),
        ([None, None, h], "`initial_state`.*5 tensors.*3 of them"),
        (h, "`initial_state`.*a dict with some.*Received: "),
    ]
    for state, message in bad:
        with pytest.raises(ValueError, match=message):
            layer(x, initial_state=state)
    symbolic = {"hidden": keras.Input((UNITS,))}
    with pytest.raises(ValueError, match=r"keys \['hidden'\]"):
        layer(keras.Input((TIME, FEATURES)), initial_state=symbolic)


# --- inputs that are not floating point tensors -----------------------------


@pytest.mark.slow_after(1, "jax")
def test_integers_are_cast(built, rng, no_loop):
    x = rng.integers(-3, 4, size=(BATCH, 1, FEATURES)).astype("int32")
    _, sequences, *_ = built(x)

    assert "float32" in str(sequences.dtype)
    np.testing.assert_array_equal(array(sequences)[0], x[:, 0])


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
def test_all_whole_numbers_are_cast_as_by_an_lstm(make, dtype, rng):
    layer = make(units=UNITS, memory_slots=SLOTS, unroll=True)
    x = rng.integers(0, 2, size=(BATCH, 1, FEATURES)).astype(dtype)
    y = layer(x)

    assert y.dtype == keras.layers.LSTM(UNITS, unroll=True)(x).dtype
    expected = array(layer(x.astype("float32")))
    np.testing.assert_allclose(array(y), expected, atol=1e-6)


def test_a_model_with_integer_inputs(rng):
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES), dtype="int32"), ARMIN(UNITS, SLOTS)]
    )
    x = rng.integers(-3, 4, size=(BATCH, TIME, FEATURES))

    expected = model.predict(x.astype("float32"), verbose=0)
    y = model.predict(x.astype("int32"), verbose=0)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_tokens_without_an_embedding_are_explained(rng):
    tokens = rng.integers(0, 9, size=(BATCH, TIME))
    with pytest.raises(ValueError, match=r"\(3, 7\).*keras.layers.Embedding"):
        ARMIN(UNITS)(tokens)


@pytest.mark.parametrize(
    ("kind", "message"), [("complex64", "imaginary"), ("str", "Embedding")]
)
def test_what_is_no_real_number_is_refused(kind, message):
    x = np.ones((BATCH, TIME, FEATURES), kind)
    with pytest.raises(TypeError, match=f"`sequences`.*real numb.*{message}"):
        ARMIN(UNITS)(x)
    with pytest.raises(TypeError, match="`sequences`.*real numbers"):
        ARMIN(UNITS)(sequences=x)


def test_complex_inputs_of_the_cell_are_refused():
    cell = ARMINCell(UNITS, SLOTS)
    states = cell.get_initial_state(BATCH)
    x = np.ones((BATCH, FEATURES), "complex64")
    with pytest.raises(TypeError, match="`inputs`.*real numbers.*complex64"):
        cell(x, states)


@only_on_tensorflow
def test_ragged_tensors_are_explained(rng):
    import tensorflow as tf

    rows = [rng.normal(size=(n, FEATURES)).astype("float32") for n in (2, 4)]
    x = tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [2, 4])
    layer = ARMIN(UNITS, SLOTS)
    message = r"`sequences`.*RaggedTensor.*to_tensor\(\).*mask="
    with pytest.raises(TypeError, match=message):
        layer(x)
    with pytest.raises(TypeError, match=r"to_tensor\(\)"):
        keras.Sequential([keras.Input((None, FEATURES)), layer])(x)
    with pytest.raises(TypeError, match=r"to_tensor\(\)"):
        layer(keras.Input((None, FEATURES), ragged=True))

    y = layer(x.to_tensor(), mask=tf.sequence_mask(x.row_lengths()))
    for row, output in zip(rows, array(y)):
        np.testing.assert_allclose(output, array(layer(row[None]))[0], 1e-5)


@only_on_torch
def test_packed_sequences_are_explained(rng):
    import torch
    from torch.nn.utils.rnn import pack_sequence
    from torch.nn.utils.rnn import pad_packed_sequence

    rows = [torch.randn(n, FEATURES) for n in (4, 2)]
    packed = pack_sequence(rows)
    layer = ARMIN(UNITS, SLOTS)
    with pytest.raises(
        TypeError,
        match="`sequences`.*PackedSequence.*pad_packed_sequence.*mask",
    ):
        layer(packed)

    x, lengths = pad_packed_sequence(packed, batch_first=True)
    y = layer(x, mask=torch.arange(x.shape[1]) < lengths[:, None])
    for row, output in zip(rows, array(y)):
        np.testing.assert_allclose(output, array(layer(row[None]))[0], 1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_inputs_of_the_cell_are_refused(count, rng):
    rnn = keras.layers.RNN(ARMINCell(UNITS, SLOTS))
    message = "`inputs`.*one tensor.*keras.layers.RNN.*Concatenate"
    with pytest.raises(ValueError, match=message):
        rnn([inputs(rng)] * count)
    with pytest.raises(ValueError, match=message):
        rnn([keras.Input((TIME, FEATURES))] * count)
    with pytest.raises(ValueError, match=message):
        ARMINCell(UNITS)([inputs(rng)[:, 0]] * count, [])


def test_several_inputs_of_a_built_layer_are_refused(rng):
    x = inputs(rng)
    layer = ARMIN(UNITS, SLOTS)
    layer.build(x.shape)
    for several in ([x, x], {"a": x, "b": x}):
        with pytest.raises(ValueError, match="`sequences`.*one tensor.*2 of"):
            layer(several)
    with pytest.raises(ValueError, match="one tensor.*2 of"):
        ARMIN(UNITS).build([x.shape, x.shape])


# --- files ------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input((None, FEATURES)), ARMIN(UNITS)])


@pytest.mark.parametrize("format", export_lib.ENDINGS)
def test_the_ending_says_the_format(format, model, tmp_path, monkeypatch):
    """Up to where it is checked: the files are those of test_export.py."""

    class Found(Exception):
        pass

    def check(format):
        raise Found(format)

    monkeypatch.setattr(export_lib, "check_format", check)
    for folder in (tmp_path, "a.onnx"):
        file = f"{folder}/model{export_lib.ENDINGS[format]}"
        with pytest.raises(Found, match=f"^{format}$"):
            keras_armin.export(model, file)


@pytest.mark.parametrize("ending", [".h5", ".keras", ".pb"])
def test_an_unknown_ending_is_refused(ending, model, tmp_path):
    with pytest.raises(ValueError, match=r"`filepath`.*\.pt2.*\.tflite") as e:
        keras_armin.export(model, tmp_path / f"model{ending}")

    assert ("model.save" in str(e.value)) == (ending != ".pb")


def test_an_ending_of_another_format_is_refused(model, tmp_path):
    format, message = "tf_saved_model", "a folder.*'.onnx'"
    if BACKEND == "torch":
        format, message = "torch", "'.pt2'"
    with pytest.raises(ValueError, match=f"`filepath`.*{message}.*{format}"):
        keras_armin.export(model, tmp_path / "model.onnx", format)
    assert not list(tmp_path.iterdir())


def test_a_missing_import_is_explained(model, tmp_path, monkeypatch):
    model.save(tmp_path / "model.keras")
    registered = keras.saving.get_custom_objects()
    monkeypatch.delitem(registered, "keras_armin>ARMIN")
    words = "Could not locate class 'ARMIN'"
    with pytest.raises(TypeError, match=words):
        keras.models.load_model(tmp_path / "model.keras")

    assert words in ARMIN.__doc__


# --- the mode of a torch module ---------------------------------------------


def noisy(rng):
    x = inputs(rng, time=2)
    return made(x, rng, dropout=0.5), x


def trains(call, layer, x):
    """Whether `call()` is a call of the layer on `x` in training."""
    expected = array(layer(x, training=False))
    return np.abs(array(call()) - expected).max() > 1e-3


@only_on_torch
class TestMode:
    def test_from_the_start_a_call_is_inference(self, rng):
        layer, x = noisy(rng)

        assert layer.training, "torch's own flag says nothing"
        assert not trains(lambda: layer(x), layer, x)

    def test_train_and_eval_choose_the_mode(self, rng):
        layer, x = noisy(rng)

        assert layer.train() is layer
        assert trains(lambda: layer(x), layer, x)
        assert trains(lambda: layer(x, training=None), layer, x)
        assert not trains(lambda: layer(x, training=False), layer, x)
        assert trains(lambda: layer(x), layer, x), "that was for one call"
        layer.eval()
        assert not trains(lambda: layer(x), layer, x)
        assert trains(lambda: layer(x, training=True), layer, x)

    def test_a_module_around_the_layer_chooses(self, rng):
        import torch

        layer, x = noisy(rng)
        module = torch.nn.Sequential(torch.nn.ModuleDict({"a": layer}))
        module.train()
        assert trains(lambda: layer(x), layer, x)
        module.eval()
        assert not trains(lambda: layer(x), layer, x)

    def test_bidirectional_hands_it_on(self, rng):
        forward, x = noisy(rng)
        layer = keras.layers.Bidirectional(forward)
        layer.build(x.shape)
        assert not trains(lambda: layer(x), layer, x)
        layer.train()
        assert trains(lambda: layer(x), layer, x)

    def test_a_cell_by_itself_has_a_mode(self, rng):
        layer, x = noisy(rng)
        cell, states = layer.cell, layer.get_initial_state(BATCH)

        def step(**arguments):
            return array(cell(x[:, 0], states, **arguments)[0])

        expected = step()
        cell.train()
        assert np.abs(step() - expected).max() > 1e-3
        np.testing.assert_array_equal(step(training=False), expected)

    def test_keras_goes_by_training(self, rng):
        layer, x = noisy(rng)
        model = keras.Sequential([keras.Input(x.shape[1:]), layer])
        layer.train()
        for call in (
            lambda: model(x, training=False),
            lambda: model.predict(x, verbose=0),
        ):
            assert not trains(call, layer, x)
        layer.eval()
        assert trains(lambda: model(x, training=True), layer, x)

    def test_a_functional_model_does_not_reach_its_layers(self, rng):
        """If this fails, the docstring of `ARMIN` promises too little."""
        layer, x = noisy(rng)
        model = keras.Sequential([keras.Input(x.shape[1:]), layer])
        layer.eval()
        model.train()

        assert not layer.training
        assert not trains(lambda: model(x), layer, x)

    @pytest.mark.parametrize("broken_off", [False, True])
    def test_after_fit_a_call_is_inference(self, broken_off, rng):
        layer, x = noisy(rng)

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.inner = layer  # so `train()` of the model reaches it

            def call(self, x):
                return self.inner(x)

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                assert layer.training, "`fit` has called `train()`"
                if broken_off:
                    raise KeyboardInterrupt

        model = Model()
        model.compile("sgd", "mse")
        try:
            y = np.zeros((BATCH, layer.cell.output_size))
            model.fit(x, y, verbose=0, callbacks=[Break()])
        except KeyboardInterrupt:
            pass

        assert layer.training == broken_off
        assert not trains(lambda: model(x), layer, x)
        assert not trains(lambda: layer(x), layer, x)
        model.train()
        assert trains(lambda: model(x), layer, x), "this one counts"

    def test_a_functional_model_keeps_no_mode(self, rng):
        layer, x = noisy(rng)
        layer.train()
        x_in = keras.Input(x.shape[1:])
        model = keras.Model(x_in, layer(x_in))
        layer.eval()

        assert not trains(lambda: model(x), layer, x)

    def test_an_export_is_inference(self, rng, monkeypatch):
        import torch

        layer, x = noisy(rng)
        layer.train()
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)

        assert not trains(lambda: layer(x), layer, x)
