"""The LSTM with layer normalisation and zoneout, against NumPy and Keras."""

import keras
import numpy as np
import pytest

from keras_armin import trace_memory
from keras_armin.baselines import LayerNormLSTM
from keras_armin.baselines import LayerNormLSTMCell
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor

HALF = 4
RATES = {"zoneout_cell": 0.4, "zoneout_hidden": 0.3}

# --- a reference in NumPy: float64, one sample, one gate at a time ----------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normalise(x, gain, bias):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-3) * gain + bias


def reference_step(weights, x, h, c, keep=None, rates=(0.0, 0.0), drop=None):
    """`keep` holds the masks of cell and hidden state; None: inference."""
    dropped_x, dropped_h = (
        (x, h) if drop is None else (x * drop[0], h * drop[1])
    )
    gates = {}
    for k, name in enumerate("ifoj"):
        block = slice(k * UNITS, (k + 1) * UNITS)
        z = dropped_x @ weights["kernel"][:, block]
        z = z + dropped_h @ weights["recurrent_kernel"][:, block]
        z = z + weights["bias"][block]
        if "norm_gain" in weights:
            gain, bias = weights["norm_gain"], weights["norm_bias"]
            z = normalise(z, gain[block], bias[block])
        gates[name] = z
    new_c = sigmoid(gates["f"]) * c + sigmoid(gates["i"]) * np.tanh(gates["j"])
    shown = new_c
    if "norm_gain" in weights:
        gain, bias = weights["state_norm_gain"], weights["state_norm_bias"]
        shown = normalise(new_c, gain, bias)
    new_h = sigmoid(gates["o"]) * np.tanh(shown)
    if keep is None:
        keep = rates
    return (
        keep[1] * h + (1 - keep[1]) * new_h,
        keep[0] * c + (1 - keep[0]) * new_c,
    )


def reference_run(weights, x, keep=None, rates=(0.0, 0.0), drop=None):
    """Outputs `(batch, time, units)` and the last c `(batch, units)`."""
    outputs, finals = [], []
    for b, sequence in enumerate(x):
        h, c, row = np.zeros(UNITS), np.zeros(UNITS), []
        masks = None if drop is None else [mask[b] for mask in drop]
        for t, x_t in enumerate(sequence):
            kept = None if keep is None else [mask[b, t] for mask in keep]
            h, c = reference_step(weights, x_t, h, c, kept, rates, masks)
            row.append(h)
        outputs.append(row)
        finals.append(c)
    return np.array(outputs), np.array(finals)


def random_lstm(rng, x, **options):
    """A layer with weights that all differ, and those weights."""
    layer = LayerNormLSTM(UNITS, return_sequences=True, **options)
    layer.build(x.shape)
    randomise(layer, rng)
    weights = {w.name: array(w).astype("float64") for w in layer.weights}
    return layer, weights


def as_rnn(layer):
    """`keras.layers.RNN` around a cell with the weights of `layer`."""
    config = layer.cell.get_config()
    rnn = keras.layers.RNN(
        LayerNormLSTMCell.from_config(config),
        return_sequences=True,
        dtype=layer.dtype_policy,
    )
    rnn.build((None, None, layer.cell.input_dim))
    rnn.set_weights(layer.get_weights())
    return rnn


# --- equations --------------------------------------------------------------


@pytest.mark.slow_after(2, "jax")
@pytest.mark.parametrize("rates", [{}, RATES], ids=["", "zoneout"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_inference_agrees_with_the_reference(layer_norm, rates, rng, float64):
    x = inputs(rng, dtype="float64")
    layer, weights = random_lstm(
        rng,
        x,
        layer_norm=layer_norm,
        return_state=True,
        dtype="float64",
        **rates,
    )
    expected, c = reference_run(
        weights, x, rates=tuple(rates.values()) or (0.0, 0.0)
    )

    outputs, last, final_c, pointer = layer(tensor(x))

    np.testing.assert_allclose(array(outputs), expected, atol=1e-12)
    np.testing.assert_allclose(array(last), expected[:, -1], atol=1e-12)
    np.testing.assert_allclose(array(final_c), c, atol=1e-12)
    assert array(pointer).tolist() == [[TIME, 0, 0, 0]] * BATCH
    bare = as_rnn(layer)(tensor(x))
    np.testing.assert_allclose(array(bare), expected, atol=1e-12)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_training_agrees_with_the_reference(
    layer_norm, rng, float64, monkeypatch
):
    """Zoneout and dropout with masks that are given."""
    keep = [rng.random((BATCH, TIME, UNITS)) < 0.4 for _ in range(2)]
    drop = [rng.integers(0, 2, (BATCH, n)) * 2.0 for n in (FEATURES, UNITS)]
    x = inputs(rng, dtype="float64")
    layer, weights = random_lstm(
        rng,
        x,
        layer_norm=layer_norm,
        dropout=0.5,
        recurrent_dropout=0.5,
        dtype="float64",
        **RATES,
    )
    cell_mask, hidden_mask = (tensor(k.swapaxes(0, 1)) for k in keep)
    step_noise = StepNoise(zoneout_cell=cell_mask, zoneout=hidden_mask)
    sequence_noise = SequenceNoise(*(tensor(mask) for mask in drop))
    monkeypatch.setattr(
        LayerNormLSTMCell,
        "draw_noise",
        lambda cell, time, batch: (step_noise, sequence_noise),
    )
    expected, _ = reference_run(weights, x, keep=keep, drop=drop)

    outputs = array(layer(tensor(x), training=True))

    np.testing.assert_allclose(outputs, expected, atol=1e-12)


def test_without_norm_and_zoneout_it_is_the_lstm_of_keras(rng):
    x = inputs(rng)
    layer, _ = random_lstm(rng, x, layer_norm=False)
    keras_lstm = keras.layers.LSTM(UNITS, return_sequences=True)
    keras_lstm.build(x.shape)

    def in_keras_order(weight):
        i, f, o, j = np.split(weight, 4, axis=-1)
        return np.concatenate([i, f, j, o], axis=-1)

    keras_lstm.set_weights([in_keras_order(w) for w in layer.get_weights()])

    np.testing.assert_allclose(
        array(layer(x)), array(keras_lstm(x)), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("unit_forget_bias", [False, True])
def test_the_forget_bias_starts_where_it_has_an_effect(
    layer_norm, unit_forget_bias
):
    cell = LayerNormLSTMCell(
        UNITS, layer_norm=layer_norm, unit_forget_bias=unit_forget_bias
    )
    cell.build((None, FEATURES))
    start = np.zeros((4, UNITS))
    start[1] = unit_forget_bias

    holder = cell.norm_bias if layer_norm else cell.bias
    np.testing.assert_array_equal(array(holder), start.ravel())
    if layer_norm:
        assert not array(cell.bias).any()
        assert (array(cell.norm_gain) == 1).all()
        assert (array(cell.state_norm_gain) == 1).all()
        assert not array(cell.state_norm_bias).any()


# --- zoneout ----------------------------------------------------------------


def as_layer(cell):
    config = {k: v for k, v in cell.get_config().items() if k != "name"}
    return LayerNormLSTM(**config, return_sequences=True, return_state=True)


def as_bare(cell):
    return keras.layers.RNN(cell, return_sequences=True, return_state=True)


both = pytest.mark.parametrize("make", [as_layer, as_bare])


@pytest.mark.slow("jax")
@both
def test_zoneout_keeps_its_share_with_fresh_masks(make):
    batch, time, units = 8, 12, 50
    # The inputs grow, so that no unit keeps its value but by zoneout.
    x = np.linspace(0.1, 1.0, time, dtype="float32")
    x = np.broadcast_to(x[:, None], (batch, time, FEATURES))
    layer = make(LayerNormLSTMCell(units, layer_norm=False, zoneout_hidden=0.3))
    outputs = array(layer(x, training=True)[0])
    before = np.pad(outputs, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    kept = outputs == before

    # 4800 draws: a standard deviation of 0.007.
    assert abs(kept.mean() - 0.3) < 0.04
    masks = {mask.tobytes() for mask in kept.reshape(-1, units)}
    assert len(masks) == batch * time


@pytest.mark.slow_after(1, "jax")
@both
def test_cell_and_hidden_state_have_masks_of_their_own(make):
    layer = make(LayerNormLSTMCell(400, zoneout_cell=0.6, zoneout_hidden=0.2))
    x = np.ones((1, 1, FEATURES), "float32")
    _, h, c, _ = layer(x, training=True)
    kept_h, kept_c = array(h) == 0, array(c) == 0

    assert abs(kept_h.mean() - 0.2) < 0.1
    assert abs(kept_c.mean() - 0.6) < 0.1
    assert (kept_h & kept_c).any() and (kept_h & ~kept_c).any()


def test_zoneout_of_the_cell_state_leaves_the_output_of_the_step(rng):
    """The output shows the new cell state, also where the old one is kept."""
    x = inputs(rng, time=1)
    layer, weights = random_lstm(
        rng, x, zoneout_cell=0.5, return_state=True, seed=1
    )
    outputs, _, c, _ = layer(x, training=True)
    expected, new_c = reference_run(weights, x)
    kept = array(c) == 0

    np.testing.assert_allclose(array(outputs), expected, atol=1e-5)
    np.testing.assert_allclose(array(c), np.where(kept, 0, new_c), atol=1e-5)
    assert kept.any() and not kept.all()


def test_names_and_shapes_of_the_weights():
    layer = LayerNormLSTM(UNITS, name="net")
    layer.build((None, None, FEATURES))

    assert {w.path: tuple(w.shape) for w in layer.weights} == {
        f"net/layer_norm_lstm_cell/{name}": shape
        for name, shape in {
            "kernel": (FEATURES, 4 * UNITS),
            "recurrent_kernel": (UNITS, 4 * UNITS),
            "bias": (4 * UNITS,),
            "norm_gain": (4 * UNITS,),
            "norm_bias": (4 * UNITS,),
            "state_norm_gain": (UNITS,),
            "state_norm_bias": (UNITS,),
        }.items()
    }


def test_the_language_model_has_as_many_parameters_as_published():
    """4.79 million, with 1024 units and an embedding of 50 characters."""
    model = keras.Sequential(
        [
            keras.Input((None,)),
            keras.layers.Embedding(50, 128),
            # Zeros: an orthogonal start of this width takes seconds.
            LayerNormLSTM(1024, recurrent_initializer="zeros"),
            keras.layers.Dense(50),
        ]
    )

    shapes = [tuple(w.shape) for w in model.trainable_weights]
    assert sum(int(np.prod(shape)) for shape in shapes) == 4_790_578


# --- errors -----------------------------------------------------------------


@pytest.mark.parametrize("cls", [LayerNormLSTM, LayerNormLSTMCell])
@pytest.mark.parametrize(
    ("name", "value", "error", "takes"),
    [
        ("units", 0, ValueError, "a positive integer"),
        ("units", 2.5, TypeError, "a positive integer"),
        ("layer_norm", 1, TypeError, "True or False"),
        ("use_bias", "yes", TypeError, "True or False"),
        ("unit_forget_bias", None, TypeError, "True or False"),
        ("zoneout_cell", 1.0, ValueError, r"a number in \[0, 1\)"),
        ("zoneout_hidden", -0.1, ValueError, r"a number in \[0, 1\)"),
        ("zoneout_hidden", "much", TypeError, r"a number in \[0, 1\)"),
        ("dropout", 1.5, ValueError, r"a number in \[0, 1\)"),
        ("seed", 1.5, TypeError, "an integer or None"),
    ],
)
def test_bad_arguments(cls, name, value, error, takes):
    with pytest.raises(error, match=f"`{name}` must be .*{takes}") as caught:
        cls(**{"units": 4, name: value})

    assert repr(value) in str(caught.value)


def test_there_is_no_memory_to_trace(rng):
    with pytest.raises(TypeError, match="no memory"):
        trace_memory(LayerNormLSTM(UNITS), inputs(rng))
