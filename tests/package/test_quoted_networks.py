"""Mechanisms and hazards of the networks that the paper's table quotes."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_armin
from keras_armin import baselines
from keras_armin import trace_boundaries
from keras_armin import trace_memory
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor

QUOTED = {
    "IndRNN": {},
    "RHN": {"depth": 2},
    "HyperRHN": {"depth": 2, "hyper_units": 3},
    "NAS": {},
    "FSLSTM": {"slow_units": 4},
    "HyperLSTM": {"hyper_units": 3, "embedding_units": 2},
    "HMLSTM": {},
}
each_quoted = pytest.mark.parametrize("name", QUOTED)


def make(name, rng=None, scale=0.6, units=UNITS, **options):
    layer = getattr(baselines, name)(
        units, **{**QUOTED[name], "return_sequences": True, **options}
    )
    layer.build((None, None, FEATURES))
    if rng is not None:
        randomise(layer, rng, scale)
        constrain(layer)
    return layer


def constrain(layer):
    """What an optimizer does after an update."""
    for weight in layer.trainable_weights:
        if weight.constraint is not None:
            weight.assign(weight.constraint(weight.value))


def weights_of(layer):
    return {w.name: array(w) for w in layer.weights}


# --- IndRNN -----------------------------------------------------------------


@pytest.mark.slow("tensorflow", "torch")  # seconds, unlike a compiled loop
def test_the_gradient_of_indrnn_over_5000_steps_is_within_its_bound():
    steps = 5000
    layer = make("IndRNN", units=2, max_length=steps)
    layer.cell.kernel.assign(np.ones((FEATURES, 2)))
    # As large as the bound allows, and half of that over the sequence.
    u = np.array([9.0, 0.5 ** (1 / steps)])
    layer.cell.recurrent_weights.assign(u)
    constrain(layer)
    bound = 2 ** (1 / steps)
    assert array(layer.cell.recurrent_weights)[0] == pytest.approx(bound)
    x = np.full((1, steps, FEATURES), 0.01, "float32")
    weigh = np.zeros((1, steps, 2), "float32")
    weigh[:, -1] = [1, 0]
    found = gradients(layer, x, weigh=weigh, in_graph=True)[1][0, :, 0]

    assert (found > 0.99).all() and (found < 2.01).all()
    assert found[0] == pytest.approx(2, rel=0.01)
    weigh[:, -1] = [0, 1]
    found = gradients(layer, x, weigh=weigh, in_graph=True)[1][0, :, 0]
    assert found[0] == pytest.approx(0.5, rel=0.01)


@pytest.mark.slow("jax")
def test_units_of_indrnn_do_not_see_each_other(rng):
    layer = make("IndRNN", rng, return_state=True)
    layer.cell.recurrent_weights.assign(np.full(UNITS, 0.9))
    x = inputs(rng)
    start = rng.random((BATCH, UNITS)).astype("float32") + 5
    other = start.copy()
    other[:, 2] += 3
    a, b = (
        array(layer(x, initial_state={"output": tensor(h)})[0])
        for h in (start, other)
    )

    rest = [k for k in range(UNITS) if k != 2]
    np.testing.assert_array_equal(a[..., rest], b[..., rest])
    assert np.abs(a[..., 2] - b[..., 2]).max() > 1e-3


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    ("max_length", "bound"), [(None, 1.0), (1, 2.0), (50, 2 ** (1 / 50))]
)
def test_training_keeps_the_weights_of_indrnn_in_bounds(max_length, bound, rng):
    layer = make("IndRNN", max_length=max_length)
    model = keras.Sequential([keras.Input((TIME, FEATURES)), layer])
    model.compile(keras.optimizers.SGD(100.0), "mse", jit_compile=False)
    assert np.abs(array(layer.cell.recurrent_weights)).max() <= bound
    model.train_on_batch(inputs(rng), 1 + np.zeros((BATCH, TIME, UNITS)))

    found = np.abs(array(layer.cell.recurrent_weights)).max()
    assert found == pytest.approx(bound, rel=1e-6)


@pytest.mark.slow("jax")
def test_weights_of_indrnn_start_between_0_and_the_bound():
    layer = make("IndRNN", units=1000, max_length=2)
    u = array(layer.cell.recurrent_weights)
    bound = 2**0.5

    assert 0 <= u.min() < 0.02 and bound - 0.02 < u.max() <= bound
    assert u.mean() == pytest.approx(bound / 2, abs=0.05)


@pytest.mark.slow("tensorflow")  # seconds, unlike a compiled loop
@pytest.mark.parametrize("training", [False, True])
def test_the_state_of_indrnn_with_dropout_is_within_its_bound(training):
    steps, units = 500, 40
    layer = make(
        "IndRNN", units=units, max_length=steps, recurrent_dropout=0.1, seed=2
    )
    layer.cell.recurrent_weights.assign(np.full(units, layer.cell.bound))
    x = np.zeros((BATCH, steps, FEATURES), "float32")
    start = {"output": tensor(np.ones((BATCH, units), "float32"))}
    y = array(layer(x, initial_state=start, training=training))

    kept = y[:, 0] > 0
    assert 0.8 < kept.mean() < 1 if training else kept.all()
    np.testing.assert_allclose(y[:, -1], 2.0 * kept, rtol=1e-3)


# --- highways ---------------------------------------------------------------


@pytest.mark.slow("jax")
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("name", ["RHN", "HyperRHN"])
def test_transform_gates_of_highways_start_nearly_closed(name, layer_norm):
    layer = make(name, coupled=False, layer_norm=layer_norm)
    weights = weights_of(layer)
    networks = {"": UNITS, "hyper_": 3} if name == "HyperRHN" else {"": UNITS}
    for prefix, units in networks.items():
        gates = np.repeat([0.0, -2.0, 2.0], units)
        for level in (1, 2):
            bias = weights[f"{prefix}bias_{level}"]
            np.testing.assert_array_equal(bias, 0 if layer_norm else gates)
            if layer_norm:
                bias = weights[f"{prefix}layer_{level}_norm_bias"]
                np.testing.assert_array_equal(bias, gates)


@pytest.mark.slow("jax")
def test_hyper_rhn_starts_with_scales_near_1():
    weights = weights_of(make("HyperRHN"))
    for level in (1, 2):
        np.testing.assert_array_equal(weights[f"scale_bias_{level}"], 1)
        assert 0 < np.abs(weights[f"scale_kernel_{level}"]).max() < 0.1


@pytest.mark.slow("jax")
@pytest.mark.parametrize("name", ["RHN", "HyperRHN"])
def test_coupled_gates_sum_to_one(name, rng):
    """With h at 1, a state of ones stays, whatever the gates."""
    layer = make(name, rng, activation=lambda x: x * 0 + 1)
    ones = tensor(np.ones((BATCH, UNITS), "float32"))
    y = array(layer(inputs(rng), initial_state={"output": ones}))
    np.testing.assert_allclose(y, 1, atol=1e-6)

    free = make(name, rng, coupled=False, activation=lambda x: x * 0 + 1)
    y = array(free(inputs(rng), initial_state={"output": ones}))
    assert np.abs(y - 1).max() > 0.1


@pytest.mark.slow("jax")
def test_closed_gates_of_rhn_carry_the_state(rng):
    layer = make("RHN", transform_bias=-40.0)
    h = rng.normal(size=(BATCH, UNITS)).astype("float32")
    y = array(layer(inputs(rng), initial_state={"output": tensor(h)}))

    np.testing.assert_allclose(y, np.repeat(h[:, None], TIME, 1), atol=1e-6)


@pytest.mark.slow("jax")
def test_hyper_rhn_of_fixed_scales_is_rhn(rng):
    hyper, plain = make("HyperRHN", rng), make("RHN")
    for layer in (1, 2):
        getattr(hyper.cell, f"scale_kernel_{layer}").assign(np.zeros((3, 6)))
        getattr(hyper.cell, f"scale_bias_{layer}").assign(np.ones(6))
    known = weights_of(hyper)
    for weight in plain.weights:
        weight.assign(known[weight.name])
    x = inputs(rng)

    np.testing.assert_allclose(array(hyper(x)), array(plain(x)), atol=1e-6)


# --- LSTMs ------------------------------------------------------------------


@pytest.mark.slow("jax")
def test_scales_of_hyper_lstm_start_as_published():
    weights = weights_of(make("HyperLSTM", embedding_units=5))
    for part in ("recurrent", "input"):
        scales = weights[f"{part}_scale_kernel"]
        np.testing.assert_allclose(scales, 0.1 / 5, rtol=1e-6)
        np.testing.assert_array_equal(weights[f"{part}_embedding_bias"], 1)
    small = ["bias_scale_kernel"]
    small += [f"{x}_embedding_kernel" for x in ("recurrent", "input", "bias")]
    for name in small:
        assert 0 < np.ptp(weights[name]) < 0.1, name


@pytest.mark.slow("jax")
@pytest.mark.parametrize("layer_norm", [True, False])
def test_hyper_lstm_of_fixed_scales_is_layer_norm_lstm(layer_norm, rng):
    hyper = make("HyperLSTM", rng, layer_norm=layer_norm)
    plain = baselines.LayerNormLSTM(
        UNITS, layer_norm=layer_norm, return_sequences=True
    )
    plain.build((None, None, FEATURES))
    known = weights_of(hyper)
    for weight in plain.weights:
        weight.assign(known[weight.name])
    x = inputs(rng)
    assert np.abs(array(hyper(x)) - array(plain(x))).max() > 1e-2
    for weight in hyper.weights:
        if weight.name.endswith("embedding_kernel"):
            weight.assign(np.zeros(weight.shape))
        elif weight.name.endswith("embedding_bias"):
            weight.assign(np.ones(weight.shape))
        elif weight.name.endswith("scale_kernel"):
            weight.assign(np.full(weight.shape, 0.5))  # two of them sum to 1

    np.testing.assert_allclose(array(hyper(x)), array(plain(x)), atol=1e-5)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("fast_cells", [2, 4])
def test_the_slow_cell_of_fs_lstm_moves_once_a_step(fast_cells, rng):
    """The same slow state as an LSTM that sees what the first cell gives."""
    layer = make(
        "FSLSTM",
        rng,
        fast_cells=fast_cells,
        layer_norm=False,
        return_state=True,
    )
    x = inputs(rng)
    slow = baselines.LayerNormLSTM(4, layer_norm=False, return_state=True)
    first = baselines.LayerNormLSTM(UNITS, layer_norm=False, return_state=True)
    for part, prefix, width in (
        (slow, "slow_", UNITS),
        (first, "fast_1_", FEATURES),
    ):
        part.build((None, None, width))
        for weight in part.weights:
            weight.assign(weights_of(layer)[prefix + weight.name])
    states = layer.get_initial_state(BATCH)
    for t in range(3):
        now = x[:, t : t + 1]
        entering = [states[0], states[2], states[-1]]
        shown = first(now, initial_state=entering)[0]
        _, *expected = slow(
            array(shown)[:, None],
            initial_state=[states[1], states[3], states[-1]],
        )
        _, *states = layer(now, initial_state=states)
        np.testing.assert_allclose(
            array(states[1]), array(expected[0]), atol=1e-6
        )
        np.testing.assert_allclose(
            array(states[3]), array(expected[1]), atol=1e-6
        )


@pytest.mark.slow("jax")
def test_every_lstm_of_fs_lstm_has_a_zoneout_of_its_own(rng):
    rates = {"zoneout_cell": 0.5, "zoneout_hidden": 0.5}
    layer = make(
        "FSLSTM",
        rng,
        units=100,
        slow_units=100,
        return_state=True,
        seed=3,
        **rates,
    )
    x = inputs(rng, time=1)
    start = layer.get_initial_state(BATCH)
    planted = [ops.full_like(state, 0.125) for state in start[:4]]
    _, *states = layer(x, initial_state=[*planted, start[4]], training=True)
    h, slow, c, slow_c = (array(state) == 0.125 for state in states[:4])

    # What passes through two fast cells is kept by both.
    assert (h != c).any() and (slow != slow_c).any()
    for kept, share in ((h, 0.25), (c, 0.25), (slow, 0.5), (slow_c, 0.5)):
        assert kept.mean() == pytest.approx(share, abs=0.1)


# --- HM-LSTM ----------------------------------------------------------------


def planted(layer, level, bias):
    """Let a level end a segment always, or never."""
    weights = weights_of(layer)
    for name in ("kernel", "recurrent_kernel", "top_down_kernel"):
        value = weights[f"{name}_{level}"]
        value[:, -1] = 0
        getattr(layer.cell, f"{name}_{level}").assign(value)
    value = weights[f"bias_{level}"]
    value[-1] = bias
    getattr(layer.cell, f"bias_{level}").assign(value)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_boundary_of_0_copies_the_state_bit_for_bit(dtype, rng):
    layer = make("HMLSTM", rng, return_state=True, dtype=dtype)
    for level in (1, 2):
        planted(layer, level, -1.0)
    h, c = (rng.normal(size=(BATCH, 3 * UNITS)) for _ in range(2))
    start = {
        "output": ops.cast(tensor(h.astype("float32")), dtype),
        "c": ops.cast(tensor(c.astype("float32")), dtype),
    }
    _, *states = layer(inputs(rng), initial_state=start)

    for before, after in zip(start.values(), states):
        before, after = (array(ops.cast(x, "float32")) for x in (before, after))
        above = slice(UNITS, None)  # the levels above the first
        np.testing.assert_array_equal(after[:, above], before[:, above])
        assert (after[:, :UNITS] != before[:, :UNITS]).any()


@pytest.mark.slow("jax")
def test_a_boundary_of_1_forgets_the_cell_and_moves_the_level_above(rng):
    layer = make("HMLSTM", rng, return_state=True)
    planted(layer, 1, 1.0)
    boundaries = tensor(np.array([[1.0, 0.0]] * BATCH, "float32"))
    x, start = inputs(rng, time=1), layer.get_initial_state(BATCH)
    found = []
    for value in (0.0, 5.0):
        start[1], start[2] = ops.full_like(start[1], value), boundaries
        found.append([array(y) for y in layer(x, initial_state=start)[1:]])

    first = slice(0, UNITS)
    np.testing.assert_array_equal(found[0][1][:, first], found[1][1][:, first])
    assert (found[0][1][:, UNITS:] != found[1][1][:, UNITS:]).all()
    assert (found[1][1][:, UNITS : 2 * UNITS] != 5.0).all()


@pytest.mark.slow("jax")
def test_boundaries_have_the_gradient_of_the_hard_sigmoid():
    cell = baselines.HMLSTMCell(UNITS, slope=3.0)
    cell.build((None, FEATURES))
    s = np.array([[-0.5], [-0.2], [0.1], [0.4]], "float32")
    layer = BoundaryOf(cell)
    np.testing.assert_array_equal(array(layer(s))[:, 0], [0, 0, 1, 1])
    _, of_s = gradients(layer, s)

    np.testing.assert_allclose(of_s[:, 0], [0, 1.5, 1.5, 0])


@pytest.mark.slow_after(1, "jax")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_sums_end_a_segment_in_half_precision(dtype):
    cell = baselines.HMLSTMCell(UNITS, dtype=dtype)
    cell.build((None, FEATURES))
    s = tensor(np.array([[3e-3], [1e-4], [0], [-1e-4]], "float32"))
    z = cell._boundary(cell.weight_tensors(), ops.cast(s, dtype))

    assert array(ops.cast(z, "float32"))[:, 0].tolist() == [1, 1, 0, 0]


@pytest.mark.slow("jax", "tensorflow")
def test_boundaries_have_gradients_through_whole_steps(
    rng, float64, monkeypatch
):
    """Against differences of a network with z = z_0 + soft(s) - soft(s_0)."""
    layer = make("HMLSTM", rng, slope=1.5, dtype="float64")
    x = inputs(rng, time=3, dtype="float64")
    weigh = rng.normal(size=(BATCH, 3, 3 * UNITS))
    found, _ = gradients(layer, x, weigh=weigh)
    cell, known, left = layer.cell, [], None

    def soft(s):
        return np.clip((1.5 * s + 1) / 2, 0, 1)

    def boundary(cell, weights, s):
        s = array(s)
        if left is None:
            known.append(s)
        s_0 = s if left is None else next(left)
        return tensor((s_0 > 0) + soft(s) - soft(s_0))

    def loss():
        states, total = cell.get_initial_state(BATCH), 0.0
        for now, weight in zip(x.swapaxes(0, 1), weigh.swapaxes(0, 1)):
            y, states = cell(tensor(now), states)
            total += (array(y) * weight).sum()
        return total

    monkeypatch.setattr(type(cell), "_boundary", boundary)
    loss()
    for level in (1, 2):
        bias, losses = getattr(cell, f"bias_{level}"), []
        start = array(bias)
        for step in (1e-5, -1e-5):
            left = iter(known)
            bias.assign(start + step * (np.arange(len(start)) == 4 * UNITS))
            losses.append(loss())
        bias.assign(start)
        expected = (losses[0] - losses[1]) / 2e-5
        assert abs(expected) > 1e-2
        assert found[bias.name][-1] == pytest.approx(expected, rel=1e-5)


class BoundaryOf(keras.layers.Layer):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def call(self, s, training=False):
        return self.cell._boundary(self.cell.weight_tensors(), s)


@pytest.mark.slow("jax")
def test_boundaries_can_be_traced_and_drawn(rng, tmp_path):
    layer = make("HMLSTM", rng, scale=1.5, return_state=True)
    x = inputs(rng)
    found = trace_boundaries(layer, x)
    bare = keras.layers.RNN(layer.cell)

    assert found.shape == (BATCH, TIME, 2) and found.dtype == bool
    assert found.any() and not found.all()
    last = array(layer(x)[3])
    np.testing.assert_array_equal(found[:, -1], last == 1)
    np.testing.assert_array_equal(trace_boundaries(bare, x), found)
    ax = keras_armin.plot_boundaries(found, "of text")
    assert [label.get_text() for label in ax.get_xticklabels()][2] == "_"
    np.testing.assert_array_equal(ax.images[0].get_array(), found[0].T)
    ax.figure.savefig(tmp_path / "boundaries.png")
    assert (tmp_path / "boundaries.png").stat().st_size > 1000


@pytest.mark.slow("jax")
def test_errors_of_traces_and_pictures(rng):
    x = inputs(rng)
    with pytest.raises(TypeError, match="`layer` must be an `HMLSTM`"):
        trace_boundaries(make("RHN"), x)
    with pytest.raises(TypeError, match="no memory"):
        trace_memory(make("HMLSTM"), x)
    found = np.zeros((BATCH, TIME, 2), bool)
    with pytest.raises(ValueError, match="`boundaries` must have"):
        keras_armin.plot_boundaries(found, "short")
    with pytest.raises(ValueError, match="`sample` must be"):
        keras_armin.plot_boundaries(found, "of text", sample=3)


@pytest.mark.slow("jax", "tensorflow")
def test_the_slope_follows_a_schedule_and_a_callback(rng):
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 5.0)
    x, y = inputs(rng), np.zeros((BATCH, TIME, 3 * UNITS))
    for options, callbacks in (
        ({"slope": schedule}, []),
        ({}, [keras_armin.callbacks.SlopeAnnealing(schedule)]),
    ):
        layer = make("HMLSTM", **options)
        model = keras.Sequential([keras.Input((TIME, FEATURES)), layer])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=1, verbose=0, callbacks=callbacks)
        assert array(layer.cell.slope) == pytest.approx(3.0)  # third update


# --- dropout ----------------------------------------------------------------

SEES_THE_LAST_OUTPUT = {
    "IndRNN": ["recurrent_weights"],
    "RHN": ["recurrent_kernel_1", "recurrent_kernel_2"],
    "HyperRHN": ["recurrent_kernel_1", "recurrent_kernel_2"],
    "NAS": ["recurrent_kernel"],
    "FSLSTM": ["fast_1_recurrent_kernel"],
}


def dropped_rows(name, mask):
    """What recurrent dropout multiplies the rows of weights with."""
    if name == "HyperLSTM":
        both = np.concatenate([np.ones(3), mask])  # h^ and then h
        return {"recurrent_kernel": mask, "hyper_recurrent_kernel": both}
    if name == "HMLSTM":
        one, two, three = np.split(mask, 3)
        return {
            "recurrent_kernel_1": one,
            "recurrent_kernel_2": two,
            "recurrent_kernel_3": three,
            "top_down_kernel_1": two,
            "top_down_kernel_2": three,
        }
    return dict.fromkeys(SEES_THE_LAST_OUTPUT[name], mask)


@pytest.mark.slow("jax")
@pytest.mark.slow_after(2, "tensorflow")
@each_quoted
def test_dropout_is_that_of_rows_of_kernels(name, rng, monkeypatch):
    """The same at each step, and of no other product."""
    layer = make(name, rng, dropout=0.5, recurrent_dropout=0.5, seed=3)
    if name == "HMLSTM":
        # Otherwise the second level ends a segment at each step, never copies.
        bias = array(layer.cell.bias_2)
        bias[-1] -= 1
        layer.cell.bias_2.assign(bias)
    cell_class, drawn = type(layer.cell), []
    draw_noise = cell_class.draw_noise

    def recorded(cell, time, batch):
        drawn.append(draw_noise(cell, time, batch))
        return drawn[-1]

    monkeypatch.setattr(cell_class, "draw_noise", recorded)
    x = inputs(rng, batch=1, time=20)
    found = array(layer(x, training=True))
    of_x, of_h = (array(mask)[0] for mask in drawn[0][1])
    scale = 1 if name == "IndRNN" else 2
    assert set(of_x) == {0, 2} and set(of_h) == {0, scale}
    assert np.abs(found - array(layer(x))).max() > 1e-2
    known = weights_of(layer)
    for key, rows in dropped_rows(name, of_h).items():
        getattr(layer.cell, key).assign((known[key].T * rows).T)

    np.testing.assert_allclose(found, array(layer(x * of_x)), atol=1e-5)


# --- export -----------------------------------------------------------------


@pytest.mark.slow
@each_quoted
def test_an_exported_network_gives_the_same_numbers(name, rng, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    layer = make(name, rng, scale=1.0)
    model = keras.Sequential([keras.Input((None, FEATURES)), layer])
    keras_armin.export(model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    x = inputs(rng, time=12)
    (found,) = session.run(None, {session.get_inputs()[0].name: x})

    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# --- no NaN -----------------------------------------------------------------


def assert_finite(layer, x):
    found, of_x = gradients(layer, x, training=True)
    assert np.isfinite(array(ops.cast(layer(x), "float32"))).all()
    assert np.isfinite(of_x).all()
    for name, gradient in found.items():
        assert gradient is None or np.isfinite(gradient).all(), name


@pytest.mark.slow("jax", "tensorflow")
@each_quoted
def test_zeros_and_saturated_gates(name, rng):
    layer = make(name, layer_norm=True)
    zeros = np.zeros((2, 5, FEATURES), "float32")
    assert_finite(layer, zeros)
    for weight in layer.trainable_weights:
        weight.assign(np.zeros(weight.shape))
    assert_finite(layer, zeros)
    layer = make(name, rng, scale=30.0, layer_norm=False)
    assert_finite(layer, 10 * inputs(rng, batch=2, time=5))


@pytest.mark.slow("jax", "tensorflow")
@each_quoted
def test_float16_with_saturated_gates(name, rng):
    layer = make(name, rng, scale=5.0, dtype="mixed_float16")
    x = 3 * inputs(rng, batch=2, time=20)

    y = layer(x)
    assert keras.backend.standardize_dtype(y.dtype) == "float16"
    assert_finite(layer, x)


@pytest.mark.slow
@each_quoted
def test_a_long_sequence(name, rng):
    layer = make(name, rng, scale=1.5)
    model = keras.Sequential([keras.Input((None, FEATURES)), layer])
    outputs = model.predict(inputs(rng, batch=1, time=1500), verbose=0)

    assert np.isfinite(outputs).all()
    # The state of IndRNN is a sum over all steps, the others are gated.
    assert name == "IndRNN" or np.abs(outputs).max() < 1 + 1e-6
    assert (outputs[:, -1] != outputs[:, -2]).any()


@pytest.mark.slow
@each_quoted
def test_gradients_over_a_long_sequence(name, rng):
    layer = make(name, rng, scale=1.5)
    x = inputs(rng, batch=1, time=300)
    weigh = np.zeros((1, 300, layer.cell.output_size), "float32")
    weigh[:, -1] = 1
    found, of_x = gradients(layer, x, weigh=weigh, in_graph=True)

    assert np.isfinite(of_x).all() and (of_x[:, -1] != 0).any()
    for key, gradient in found.items():
        assert np.isfinite(gradient).all(), key
