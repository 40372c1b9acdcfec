"""Weights, saved files and dtypes of ARMIN, beyond the shared contract."""

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_armin
from keras_armin import ARMIN
from tests.helpers import reference
from tests.helpers.common import BATCH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import as_rnn
from tests.helpers.common import compiled
from tests.helpers.common import inputs
from tests.helpers.common import randomise

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(2.0, 10, 0.9)


@pytest.mark.slow_after(4, "jax", "tensorflow")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_dim": DIM},
        {"memory_dim": UNITS},
        {"write_inputs": True},
        {"memory_dim": DIM, "use_bias": False},
        {"layer_norm": True, "memory_dim": DIM},
        {"learn_initial_state": True, "memory_dim": DIM},
        {"content_addressing": True, "memory_dim": DIM},
        {"recency_addressing": True},
        {"output_read": False, "layer_norm": True},
    ],
    ids=str,
)
def test_names_and_shapes_of_the_weights(options):
    options = {"memory_slots": SLOTS, **options}
    layer = ARMIN(UNITS, name="net", **options)
    layer.build((None, None, FEATURES))
    shapes = {w.name: tuple(w.shape) for w in layer.cell.trainable_weights}

    assert shapes == reference.weight_shapes(FEATURES, UNITS, options)
    (temperature,) = layer.cell.non_trainable_weights
    assert temperature.name == "temperature" and temperature.shape == ()
    assert {w.path for w in layer.weights} == {
        f"net/armin_cell/{w.name}" for w in layer.cell.weights
    }
    bare = as_rnn(units=UNITS, **options)
    bare.build((None, None, FEATURES))
    assert [(w.name, w.shape) for w in bare.weights] == [
        (w.name, w.shape) for w in layer.weights
    ]


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"units": 500, "memory_slots": 20}, 4_028_530),
        ({"units": 800, "memory_slots": 20}, 9_800_230),
        ({"units": 500, "memory_slots": 5}, 4_019_095),
        ({"units": 550, "memory_slots": 10}, 4_808_690),
    ],
)
def test_parameter_counts_of_the_paper(arguments, expected):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(50, 128),
            ARMIN(
                **arguments,
                **keras_armin.PAPER,
                layer_norm=True,
                return_sequences=True,
            ),
            keras.layers.Dense(50),
        ]
    )
    sizes = [np.prod(w.shape, dtype=int) for w in model.trainable_weights]

    assert sum(sizes) == expected


def block_slices(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


@pytest.mark.parametrize("seed", [None, 5])
def test_no_two_blocks_start_equal(seed):
    layer = ARMIN(
        UNITS,
        memory_slots=UNITS,
        memory_dim=UNITS,
        write_inputs=True,
        content_addressing=True,
        kernel_initializer=keras.initializers.GlorotUniform(seed=seed),
        recurrent_initializer=keras.initializers.GlorotUniform(seed=seed),
    )
    layer.build((None, None, UNITS))
    blocks = [
        array(weight)[:, block]
        for weight in layer.cell.trainable_weights
        if len(weight.shape) == 2
        for block in block_slices([UNITS] * (weight.shape[1] // UNITS))
    ]

    assert len(blocks) > 15
    heads = [tuple(np.ravel(block[:UNITS])) for block in blocks]
    assert len(set(heads)) == len(heads)


def test_a_seeded_initializer_reproduces_the_weights():
    first, second = (
        ARMIN(
            UNITS,
            kernel_initializer=keras.initializers.GlorotUniform(seed=5),
            recurrent_initializer=keras.initializers.Orthogonal(seed=6),
        )
        for _ in range(2)
    )
    for layer in (first, second):
        layer.build((None, None, FEATURES))

    for a, b in zip(first.get_weights(), second.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_fan_out_is_that_of_a_block():
    layer = ARMIN(64, memory_slots=3)
    layer.build((None, None, 64))
    kernel = array(layer.cell.kernel)
    one_gate = kernel[:, 3:67]
    limit = np.sqrt(6 / (64 + 64))

    assert 0.97 * limit < np.abs(one_gate).max() <= limit


def test_recurrent_blocks_are_orthogonal():
    layer = ARMIN(UNITS, memory_dim=UNITS)
    layer.build((None, None, FEATURES))
    for block in block_slices([UNITS] * 5):
        columns = array(layer.cell.recurrent_kernel)[:, block]
        np.testing.assert_allclose(
            columns.T @ columns, np.eye(UNITS), atol=1e-5
        )


def test_biases_start_at_one_where_it_counts():
    forget = slice(SLOTS + UNITS + DIM + UNITS, SLOTS + UNITS + DIM + 2 * UNITS)
    sizes = {
        "memory_slots": SLOTS,
        "memory_dim": DIM,
        "unit_gate_bias": False,
    }

    plain = ARMIN(UNITS, **sizes)
    plain.build((None, None, FEATURES))
    bias = array(plain.cell.bias)
    assert (bias[forget] == 1).all() and bias.sum() == UNITS

    gates = slice(SLOTS, SLOTS + UNITS + DIM)
    opened = ARMIN(UNITS, **{**sizes, "unit_gate_bias": True})
    opened.build((None, None, FEATURES))
    bias = array(opened.cell.bias)
    assert (bias[gates] == 1).all() and bias.sum() == 2 * UNITS + DIM

    normed = ARMIN(UNITS, layer_norm=True, **sizes)
    normed.build((None, None, FEATURES))
    norm_bias = array(normed.cell.norm_bias)
    assert (norm_bias[UNITS : 2 * UNITS] == 1).all()
    assert norm_bias.sum() == UNITS
    assert (array(normed.cell.bias) == 0).all()
    assert (array(normed.cell.gate_norm_bias) == 0).all()

    opened = ARMIN(UNITS, layer_norm=True, **{**sizes, "unit_gate_bias": True})
    opened.build((None, None, FEATURES))
    assert (array(opened.cell.gate_norm_bias) == 1).all()
    assert (array(opened.cell.bias) == 0).all()

    without = ARMIN(UNITS, layer_norm=True, unit_forget_bias=False, **sizes)
    without.build((None, None, FEATURES))
    assert (array(without.cell.norm_bias) == 0).all()


def model_of(layer, batch=None):
    return keras.Sequential(
        [
            keras.Input(batch_shape=(batch, TIME, FEATURES)),
            layer,
            keras.layers.Dense(2),
        ]
    )


LAYERS = {
    "ARMIN": lambda **kw: ARMIN(UNITS, SLOTS, memory_dim=DIM, **kw),
    "ARMIN with a schedule": lambda **kw: ARMIN(
        UNITS, SLOTS, temperature=SCHEDULE, **kw
    ),
    "stateful ARMIN": lambda **kw: ARMIN(UNITS, SLOTS, stateful=True, **kw),
    "RNN(ARMINCell)": lambda **kw: as_rnn(
        units=UNITS, memory_slots=SLOTS, **kw
    ),
    "Bidirectional": lambda **kw: keras.layers.Bidirectional(
        ARMIN(UNITS, SLOTS, **kw)
    ),
}


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.slow("jax", "tensorflow")
def test_a_saved_model_loads_without_custom_objects(case, rng, tmp_path):
    batch = BATCH if "stateful" in case else None
    model = model_of(LAYERS[case](), batch)
    randomise(model, rng)
    x = inputs(rng)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), expected, atol=1e-6
    )


@pytest.mark.slow_after(2, "tensorflow")
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.slow("jax", "tensorflow")
def test_weights_load_into_a_fresh_model(case, rng, tmp_path):
    batch = BATCH if "stateful" in case else None
    model = model_of(LAYERS[case](), batch)
    randomise(model, rng)
    x = inputs(rng)
    expected = model.predict(x, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = model_of(LAYERS[case](), batch)
    assert np.abs(fresh.predict(x, verbose=0) - expected).max() > 1e-3

    fresh.load_weights(tmp_path / "model.weights.h5")

    np.testing.assert_allclose(fresh.predict(x, verbose=0), expected, atol=1e-6)


def test_a_checkpoint_holds_the_weights_under_their_names(rng, tmp_path):
    layer = ARMIN(UNITS, SLOTS, stateful=True, name="net")
    model_of(layer, BATCH).save_weights(tmp_path / "model.weights.h5")
    found = {}

    def visit(path, node):
        if isinstance(node, h5py.Dataset):
            found[path] = node.shape

    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(visit)

    cell = {
        path.rsplit("/", 1)[1]: shape
        for path, shape in found.items()
        if "/cell/" in path
    }
    options = {"memory_slots": SLOTS}
    assert cell == {
        **reference.weight_shapes(FEATURES, UNITS, options),
        "temperature": (),
    }


def test_a_weights_file_of_other_arguments_is_refused(tmp_path):
    model_of(ARMIN(UNITS, SLOTS)).save_weights(tmp_path / "a.weights.h5")
    other = model_of(ARMIN(UNITS, SLOTS, layer_norm=True))

    with pytest.raises(ValueError, match="norm_gain"):
        other.load_weights(tmp_path / "a.weights.h5")


@pytest.mark.slow("jax")
def test_clone_model(rng):
    inputs_ = keras.Input((TIME, FEATURES))
    outputs = keras.layers.Dense(2)(
        ARMIN(UNITS, SLOTS, memory_dim=DIM, layer_norm=True)(inputs_)
    )
    model = keras.Model(inputs_, outputs)
    clone = keras.models.clone_model(model)
    x = inputs(rng)
    assert np.abs(array(clone(x)) - array(model(x))).max() > 1e-4

    clone.set_weights(model.get_weights())

    np.testing.assert_allclose(array(clone(x)), array(model(x)), atol=1e-6)


POLICIES = ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"]


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [ARMIN, as_rnn], ids=["ARMIN", "RNN"])
def test_low_precision_follows_float32(make, policy, rng):
    # More slots than float16 can count: 2048.
    options = {
        "units": UNITS,
        "memory_slots": 2100,
        "memory_dim": 1,
        "layer_norm": True,
        "return_sequences": True,
        "return_state": True,
    }
    exact, low = make(**options), make(**options, dtype=policy)
    x = inputs(rng, batch=2, time=4)
    exact.build(x.shape)
    low.build(x.shape)
    low.set_weights(exact.get_weights())
    # Just before the memory is full.
    state = exact.get_initial_state(2)
    pointer = ops.convert_to_tensor([[51.0, 16.0, 0.0, 0.0]] * 2)  # 2099
    state[3] = ops.cast(pointer, state[3].dtype)
    low_state = [ops.cast(s, low.compute_dtype) for s in state]

    outputs = low(x, initial_state=low_state)

    assert all(
        keras.backend.standardize_dtype(y.dtype) == low.compute_dtype
        for y in outputs
    )
    np.testing.assert_allclose(
        array(ops.cast(outputs[0], "float32")),
        array(exact(x, initial_state=state)[0]),
        atol=0.05,
    )
    assert array(ops.cast(outputs[4], "float32"))[0].tolist() == [55, 16, 0, 0]
    memory = array(ops.cast(outputs[3], "float32"))
    assert (memory[:, 2099] != 0).all()


@pytest.mark.slow("jax")
@pytest.mark.parametrize("addressing", ["relaxed", "soft"])
def test_a_read_over_thousands_of_slots_survives_float16(addressing):
    """All slots hold 1 and the output gate is half open: 0.5, however read."""
    layer = ARMIN(
        2,
        4096,
        2,
        addressing=addressing,
        temperature=5.0,
        learn_initial_state=True,
        output_activation=None,
        kernel_initializer="zeros",
        recurrent_initializer="zeros",
        dtype="mixed_float16",
    )
    layer.build((None, None, 1))
    layer.cell.initial_memory.assign(np.ones((4096, 2)))
    outputs = layer(np.zeros((1, 1, 1), "float32"), training=True)

    np.testing.assert_allclose(
        array(ops.cast(outputs, "float32"))[:, 2:], 0.5, atol=2e-3
    )


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_training_in_mixed_precision(policy, rng):
    layer = ARMIN(
        UNITS,
        SLOTS,
        memory_dim=DIM,
        addressing="relaxed",
        layer_norm=True,
        zoneout=0.1,
        dropout=0.1,
        recurrent_dropout=0.1,
        content_addressing=True,
        learn_initial_state=True,
        dtype=policy,
    )
    model = compiled(layer, (None, TIME, FEATURES))
    history = model.fit(
        inputs(rng, 12), rng.normal(size=(12, 2)), epochs=2, verbose=0
    )

    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.slow("jax")
def test_float64_is_float64_and_the_dtype_reaches_the_cell(float64, rng):
    layer = ARMIN(UNITS, dtype="float64")
    outputs = layer(ops.convert_to_tensor(inputs(rng), "float64"))

    assert keras.backend.standardize_dtype(outputs.dtype) == "float64"
    assert layer.cell.dtype_policy.name == "float64"
    assert {
        keras.backend.standardize_dtype(w.dtype) for w in layer.weights
    } == {"float64"}


@pytest.mark.slow("jax", "tensorflow")
def test_regularizers_and_constraints_act(rng):
    layer = ARMIN(
        UNITS,
        SLOTS,
        memory_dim=DIM,
        content_addressing=True,
        kernel_regularizer=keras.regularizers.L1(1.0),
        recurrent_regularizer=keras.regularizers.L1(1.0),
        bias_regularizer=keras.regularizers.L1(1.0),
        kernel_constraint=keras.constraints.NonNeg(),
        recurrent_constraint=keras.constraints.NonNeg(),
        bias_constraint=keras.constraints.NonNeg(),
    )
    model = compiled(layer, (None, TIME, FEATURES))
    randomise(layer, rng)
    cell = layer.cell
    governed = [
        cell.kernel,
        cell.write_kernel,
        cell.query_kernel,
        cell.address_recurrent_kernel,
        cell.gate_recurrent_kernel,
        cell.recurrent_kernel,
        cell.bias,
        cell.write_bias,
    ]
    expected = sum(np.abs(array(w)).sum() for w in governed)

    assert array(sum(layer.losses)) == pytest.approx(expected, rel=1e-5)
    model.fit(inputs(rng, 4), np.zeros((4, 2)), verbose=0)
    assert all((array(w) >= 0).all() for w in governed)


@pytest.mark.slow("jax")
def test_activity_regularizer_sees_the_output(rng):
    layer = ARMIN(UNITS, activity_regularizer=keras.regularizers.L1(1.0))
    outputs = layer(inputs(rng))

    assert array(layer.losses[0]) == pytest.approx(
        np.abs(array(outputs)).sum() / BATCH, rel=1e-5
    )
