"""The mechanisms of the baselines, and their numerical stability."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import baselines
from keras_armin import trace_memory
from keras_armin.baselines import _heads
from keras_armin.baselines import dnc
from keras_armin.baselines import sab
from tests.helpers import reference_baselines as reference
from tests.helpers.common import BACKEND
from tests.helpers.common import array
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor

N = 6


def one_hot(*slots, slots_in_all=N):
    return np.eye(slots_in_all)[list(slots)].astype("float32")


def gradient_of(function, x):
    """Gradient of the sum of `function(x)`."""
    x = np.asarray(x, "float32")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x))
        return tape.gradient(y, x).numpy()
    if BACKEND == "torch":
        import torch

        x = torch.tensor(x, requires_grad=True)
        (grad,) = torch.autograd.grad(function(x).sum(), x)
        return grad.numpy()
    import jax

    return np.array(jax.grad(lambda x: function(x).sum())(x))


# --- heads ------------------------------------------------------------------


def test_equal_vectors_have_a_cosine_of_one_whatever_their_length(rng):
    rows = rng.normal(size=(2, N, 20)).astype("float32")
    similar = array(_heads.cosine(tensor(rows), tensor(3 * rows[:, :2])))

    np.testing.assert_allclose(similar[:, 0, 0], 1, atol=1e-4)
    np.testing.assert_allclose(similar[:, 1, 1], 1, atol=1e-4)
    assert (np.abs(similar) < 1 + 1e-5).all()


def test_a_row_of_zeros_is_like_nothing_and_has_a_finite_gradient():
    key = np.ones((1, 1, 4), "float32")

    def similarity(memory):
        return _heads.cosine(memory, tensor(key))

    assert not array(similarity(tensor(np.zeros((1, N, 4), "float32")))).any()
    assert np.isfinite(gradient_of(similarity, np.zeros((1, N, 4)))).all()


@pytest.mark.parametrize(("tap", "arrives"), [(0, 5), (1, 0), (2, 1)])
def test_a_shift_moves_by_one_round_the_end_each_sample_for_itself(
    tap, arrives
):
    weights = np.stack([one_hot(0), one_hot(3)])
    taps = np.stack([one_hot(tap, slots_in_all=3), one_hot(1, slots_in_all=3)])
    moved = array(_heads.shift(tensor(weights), tensor(taps)))

    np.testing.assert_array_equal(moved[0], one_hot(arrives))
    np.testing.assert_array_equal(moved[1], one_hot(3))


def test_sharpening_survives_weights_of_zero_and_the_largest_power():
    weights = np.array([[[1.0, 0, 0, 0]], [[0.25] * 4], [[0.4, 0.3, 0.3, 0]]])
    power = np.full((3, 1, 1), _heads.LARGEST_SHARPNESS, "float32")

    def sharpened(weights):
        return _heads.sharpen(weights, tensor(power))

    sharp = array(sharpened(tensor(weights.astype("float32"))))
    np.testing.assert_allclose(sharp[0, 0], [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(sharp[1, 0], 0.25, atol=1e-6)
    assert sharp[2, 0, 0] > 0.99
    assert np.isfinite(gradient_of(sharpened, weights)).all()


@pytest.mark.slow("jax")
def test_the_nearest_rows_share_all_weight_and_all_gradient(rng):
    memory = rng.normal(size=(2, N, 4)).astype("float32")
    queries = rng.normal(size=(2, 1, 4)).astype("float32")
    value = rng.normal(size=(N, 1)).astype("float32")

    def read(memory):
        similar = _heads.cosine(memory, tensor(queries))
        weights = _heads.nearest(similar, 2.0, 2)
        return ops.matmul(weights, tensor(value))

    weights = array(
        _heads.nearest(_heads.cosine(tensor(memory), tensor(queries)), 2.0, 2)
    )
    found = gradient_of(read, memory)
    touched = weights[:, 0] > 0
    assert (touched.sum(axis=1) == 2).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert (found[~touched] == 0).all() and found[touched].any()


def test_of_equal_rows_the_first_are_the_nearest():
    weights = _heads.nearest(tensor(np.zeros((1, 1, N), "float32")), 1.0, 2)

    np.testing.assert_allclose(array(weights)[0, 0], [0.5, 0.5, 0, 0, 0, 0])


# --- DNC --------------------------------------------------------------------


def test_allocation_picks_the_free_slots_in_order():
    used = np.array([[1.0, 0.0, 1.0, 0.5, 0.0, 1.0]], "float32")
    found = array(dnc.allocation(tensor(used)))[0]

    assert found[1] > 0.999 and found.sum() < 1 + 1e-5
    # With that one taken, the next.
    used[0, 1] = 1.0
    assert array(dnc.allocation(tensor(used)))[0, 4] > 0.999


def test_allocation_agrees_with_sorting(rng):
    used = rng.random((20, N)).astype("float32")
    used[:5, 2] = used[:5, 4]  # equal ones, too
    found = array(dnc.allocation(tensor(used)))

    for row, expected in zip(found, used):
        np.testing.assert_allclose(
            row, reference.allocation(expected.astype("float64")), atol=1e-5
        )


@pytest.mark.parametrize(
    "used", [[0.0] * N, [1.0] * N, [0, 1, 0.5, 0, 1, 0.2]], ids=str
)
def test_allocation_has_a_right_gradient_at_usages_of_0_and_1(used):
    used = np.array([used])
    weigh = np.linspace(1, 2, N).astype("float32")
    found = gradient_of(
        lambda u: ops.sum(dnc.allocation(u) * tensor(weigh)), used
    )[0]

    assert np.isfinite(found).all()
    # Where the order of slots is the same on both sides.
    for slot in np.flatnonzero((used[0] != 0) & (used[0] != 1)):
        step = np.eye(N)[slot] * 1e-5
        higher, lower = (
            reference.allocation(used[0] + sign * step) @ weigh
            for sign in (1, -1)
        )
        expected = (higher - lower) / 2e-5
        assert found[slot] == pytest.approx(expected, rel=0.02, abs=1e-3)


def test_a_planted_order_of_writes_is_read_back_through_the_links():
    order = [3, 0, 5, 2]
    link = np.zeros((1, N, N), "float32")
    precedence = np.zeros((1, N), "float32")
    for slot in order:
        write = tensor(one_hot(slot))
        link = dnc.linked(tensor(array(link)), write, tensor(array(precedence)))
        precedence = dnc.preceded(tensor(array(precedence)), write)
    link, where = array(link)[0], one_hot(order[0])[0]

    for slot in order[1:]:
        where = link @ where
        np.testing.assert_allclose(where, one_hot(slot)[0], atol=1e-6)
    for slot in order[-2::-1]:
        where = link.T @ where
        np.testing.assert_allclose(where, one_hot(slot)[0], atol=1e-6)
    assert not np.diag(link).any()


@pytest.mark.slow("jax")
@pytest.mark.slow("tensorflow")
def test_reading_weights_of_the_dnc_never_sum_to_more_than_one(rng):
    """With modes over heads, the fault of the released code, they do."""
    sums = {}
    for variant in ("published", "released"):
        layer = baselines.DNC(8, memory_slots=N, memory_dim=4, variant=variant)
        trace = trace_memory(layer, inputs(rng, time=60))
        sums[variant] = trace.read_weights.sum(-1).max()

    assert sums["published"] < 1 + 1e-4
    assert sums["released"] > 1.2


# --- SAM --------------------------------------------------------------------


def test_sam_reads_top_k_rows_and_fills_slots_in_order(rng):
    layer = baselines.SAM(8, memory_slots=12, memory_dim=4, top_k=3)
    layer.build((None, None, 4))
    randomise(layer, rng)
    # Write to the oldest slot, hardly elsewhere.
    bias = array(layer.cell.interface_bias)
    bias[-2:] = [-20, 20]  # interpolation, write gate
    layer.cell.interface_bias.assign(bias)
    kernel = array(layer.cell.interface_kernel)
    kernel[:, -2:] = 0
    layer.cell.interface_kernel.assign(kernel)
    trace = trace_memory(layer, inputs(rng, time=20))

    assert ((trace.read_weights > 0).sum(-1) <= 3).all()
    # Whatever is read, empty slots are filled first.
    assert trace.write_slots[:, :12].tolist() == [list(range(12))] * 3


def test_sam_erases_only_the_slot_accessed_least_recently(rng):
    layer = baselines.SAM(
        8, memory_slots=5, memory_dim=4, top_k=1, return_state=True
    )
    layer.build((None, None, 4))
    randomise(layer, rng)
    states = layer.get_initial_state(1)
    names = list(layer.cell.state_names)
    memory = rng.normal(size=(5, 4)).astype("float32")
    states[names.index("memory")] = tensor(memory.reshape(1, -1))
    accessed = reference.digits([700, 300, 900, 20_000, 301])
    states[names.index("accessed")] = tensor(
        accessed.reshape(1, -1).astype("float32")
    )
    pointer = reference.digits(30_000).astype("float32")
    states[names.index("pointer")] = tensor(pointer[None])
    x = inputs(rng, batch=1, time=1)

    found = layer(x, initial_state=states)[1:]
    after = array(found[names.index("memory")]).reshape(5, 4)
    times = reference.number(array(found[names.index("accessed")]))

    others = [0, 2, 3, 4]
    np.testing.assert_allclose(after[others], memory[others], atol=1e-6)
    assert np.abs(after[1] - memory[1]).max() > 1e-3
    assert times[1] == 30_001
    assert (times[others] != 30_001).sum() >= 3


# --- TARDIS and AwTA --------------------------------------------------------


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("name", ["TARDIS", "AwTA"])
@pytest.mark.parametrize("training", [False, True])
def test_the_slot_read_last_is_not_read_again(name, training, rng):
    layer = getattr(baselines, name)(8, memory_slots=4, seed=1)
    layer.build((None, None, 4))
    randomise(layer, rng, scale=2.0)
    slots = trace_memory(
        layer, inputs(rng, time=40), training=training
    ).read_slots

    assert (slots[:, 1:] != slots[:, :-1]).all()


@pytest.mark.slow("jax")
@pytest.mark.parametrize("name", ["TARDIS", "AwTA"])
def test_the_released_addressing_leaves_the_choice_to_chance(name, rng):
    """Which is why it is not the default: 100 is normalised with the rest."""
    spread = {}
    for variant in ("published", "released"):
        layer = getattr(baselines, name)(
            16, memory_slots=N, memory_dim=4, variant=variant
        )
        layer.build((None, None, 4))
        randomise(layer, rng, scale=1.0)
        cell = layer.cell
        memory = rng.normal(size=(1, N, 4)).astype("float32")
        width = cell.address_units
        logits = cell.address_logits(
            cell.weight_tensors(),
            tensor(rng.normal(size=(1, width)).astype("float32")),
            tensor(np.zeros((1, width), "float32")),
            tensor(memory),
            tensor(np.zeros((1, 4 * N), "float32")),
            tensor(reference.digits(3)[None].astype("float32")),
        )
        others = np.delete(array(logits)[0], 2)
        spread[variant] = others.max() - others.min()

    assert spread["published"] > 0.1
    assert spread["released"] < 0.1


@pytest.mark.slow("jax")
def test_tardis_reads_keys_with_what_was_written(rng):
    layer = baselines.TARDIS(
        8, memory_slots=4, memory_dim=5, key_dim=3, return_sequences=True
    )
    x = inputs(rng, time=10)
    reads = array(layer(x))[..., 8:]
    slots = trace_memory(layer, x).read_slots

    keys = array(layer.cell.address_keys)
    np.testing.assert_allclose(reads[..., :3], keys[slots], atol=1e-6)
    assert "address_keys" not in {w.name for w in layer.trainable_weights}


# --- SAB --------------------------------------------------------------------


def test_sab_recalls_the_best_states_alone():
    scores = np.array([[0.1, 3.0, 2.0, 1.0, 9.0], [5.0, 0, 0, 0, 0]], "float32")
    filled = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]], bool)
    weights = array(sab.sparse_weights(tensor(scores), tensor(filled), 2))

    np.testing.assert_allclose(weights[0], [0, 2 / 3, 1 / 3, 0, 0], atol=1e-6)
    assert not weights[1].any()  # a single row has nothing to compare with


def test_what_sab_recalls_depends_on_the_query(rng):
    """In its authors' code the query cancels out."""
    layer = baselines.SAB(8, memory_slots=10, top_k=2)
    layer.build((None, None, 4))
    randomise(layer, rng, scale=2.0)
    cell = layer.cell
    rows = tensor(rng.normal(size=(1, 10, cell.memory_dim)).astype("float32"))
    count = tensor(np.array([30]), "int32")
    found = set()
    for _ in range(5):
        h = tensor(rng.normal(size=(1, 8)).astype("float32"))
        weights = cell._recall_weights(cell.weight_tensors(), rows, h, count)
        found.add(tuple(array(weights)[0]))

    assert len(found) > 1


def far_gradients(rng, recall):
    """Gradient of the last output with respect to each step's input."""
    layer = baselines.SAB(
        6,
        memory_slots=30,
        top_k=3,
        store_every=10,
        truncate_every=10,
        return_sequences=True,
    )
    x = inputs(rng, batch=1, time=300)
    layer.build(x.shape)
    if not recall:
        # Equal scores: nothing is recalled.
        layer.cell.address_vector.assign(
            np.zeros_like(layer.cell.address_vector)
        )
    weigh = np.zeros((1, 300, 12), "float32")
    weigh[:, -1] = 1
    found = gradients(layer, x, weigh=weigh, in_graph=True)[1]
    return np.abs(found).max(axis=(0, 2))


@pytest.mark.slow("tensorflow")
@pytest.mark.slow("jax")
def test_sab_sends_gradients_hundreds_of_steps_back_though_truncated(rng):
    with_recall = far_gradients(rng, True)
    without = far_gradients(rng, False)

    assert with_recall[:100].max() > 0
    assert not without[:290].any() and without[290:].all()


# --- no NaN -----------------------------------------------------------------

HAZARDS = {
    "NTM": {"memory_slots": N, "memory_dim": 4},
    "DNC": {"memory_slots": N, "memory_dim": 4},
    "SAM": {"memory_slots": N, "memory_dim": 4},
    "TARDIS": {"memory_slots": N},
    "AwTA": {"memory_slots": N},
    "SAB": {"memory_slots": N, "top_k": 2},
}
each_hazard = pytest.mark.parametrize("name", HAZARDS)


def hazardous(name, rng, scale=None, **options):
    layer = getattr(baselines, name)(
        8, return_sequences=True, seed=1, **HAZARDS[name], **options
    )
    layer.build((None, None, 4))
    if scale is not None:
        randomise(layer, rng, scale)
    return layer


def assert_finite(layer, x, **planted):
    """Values and gradients, from a state with some parts `planted`."""
    states = layer.get_initial_state(len(x))
    for name, value in planted.items():
        place = list(layer.cell.state_names).index(name)
        states[place] = ops.full_like(states[place], value)
    found, of_x = gradients(layer, x, training=True, initial_state=states)
    assert np.isfinite(array(layer(x, initial_state=states))).all()
    assert np.isfinite(of_x).all()
    for name, gradient in found.items():
        assert gradient is None or np.isfinite(gradient).all(), name


@pytest.mark.slow("jax", "tensorflow")
@each_hazard
def test_hazards_of_memory_gates_and_usage(name, rng):
    """One layer and one shape for all, which JAX compiles once."""
    layer = hazardous(name, rng)
    zeros, ones = np.zeros((2, 5, 4), "float32"), np.ones((2, 5, 4), "float32")
    # An untrained network on nothing, and with all kernels at zero.
    assert_finite(layer, zeros, memory=0.0)
    for weight in layer.trainable_weights:
        weight.assign(np.zeros(weight.shape))
    assert_finite(layer, zeros, memory=0.0)
    # A memory full of one vector, and the same input again and again.
    randomise(layer, rng, 1.0)
    assert_finite(layer, ones, memory=1.0)
    # Gates that are all shut or open.
    randomise(layer, rng, 30.0)
    assert_finite(layer, 10 * inputs(rng, batch=2, time=5), memory=1.0)
    if name == "DNC":
        randomise(layer, rng, 1.0)
        for value in (0.0, 1.0):
            assert_finite(layer, ones, usage=value, write_weights=value)


@pytest.mark.slow
@each_hazard
def test_a_long_sequence(name, rng):
    layer = hazardous(name, rng, scale=1.5)
    # In a graph: TensorFlow takes minutes without.
    model = keras.Sequential([keras.Input((None, 4)), layer])
    outputs = model.predict(inputs(rng, batch=1, time=1500), verbose=0)

    assert np.isfinite(outputs).all()
    # AwTA's state, like ARMIN's, has no bound of its own, but its output.
    assert np.abs(outputs).max() < 1e3


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("variant", ["published", "released"])
@each_hazard
def test_float16_with_saturated_gates(name, variant, rng):
    options = {} if name == "SAB" else {"variant": variant}
    layer = hazardous(name, rng, 5.0, dtype="mixed_float16", **options)
    outputs = layer(3 * inputs(rng, time=20), training=True)

    assert keras.backend.standardize_dtype(outputs.dtype) == "float16"
    assert np.isfinite(array(ops.cast(outputs, "float32"))).all()
