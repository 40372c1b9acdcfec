"""Invariants of the memory functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_armin import backends
from keras_armin import memory_ops
from tests.helpers.common import array

BATCH, SLOTS, DIM = 3, 4, 2


def matrix(rng):
    return rng.normal(size=(BATCH, SLOTS, DIM)).astype("float32")


def rows(rng):
    return rng.normal(size=(BATCH, DIM)).astype("float32")


def scores(rng):
    return ops.convert_to_tensor(
        rng.normal(size=(BATCH, SLOTS)).astype("float32")
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@given(count=st.integers(0, memory_ops.POINTER_MAX - 1))
def test_the_pointer_counts_exactly_in_every_dtype(dtype, count):
    counts = ops.convert_to_tensor([count, 0], dtype="int32")
    pointer = memory_ops.count_to_pointer(memory_ops.increment(counts), dtype)

    assert tuple(pointer.shape) == (2, memory_ops.POINTER_DIGITS)
    assert array(memory_ops.pointer_to_count(pointer)).tolist() == [
        count + 1,
        1,
    ]


def test_the_pointer_does_not_wrap():
    full = ops.convert_to_tensor([memory_ops.POINTER_MAX], dtype="int32")

    assert array(memory_ops.increment(full)).tolist() == [
        memory_ops.POINTER_MAX
    ]


def test_a_pointer_of_zeros_is_an_empty_memory():
    zeros = ops.zeros((2, memory_ops.POINTER_DIGITS), dtype="bfloat16")

    assert array(memory_ops.pointer_to_count(zeros)).tolist() == [0, 0]


def ranks_after(writes, slots):
    """By hand: the slots from the one written last to the oldest."""
    order = list(range(slots))[::-1]
    for slot in writes:
        order.remove(slot)
        order.insert(0, slot)
    return [order.index(slot) for slot in range(slots)]


@pytest.mark.slow("jax")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("slots", [1, 2, 5, 128, 129, 3000])
def test_the_order_of_writes_is_exact_in_every_dtype(dtype, slots, rng):
    width = slots * memory_ops.order_digits(slots)
    order = ops.zeros((2, width), dtype=dtype)
    writes = rng.integers(slots, size=(12, 2))
    for slot in writes:
        ranks = memory_ops.order_to_ranks(order, slots, "float32")
        ranks = memory_ops.update_ranks(
            ranks, ops.convert_to_tensor(slot, dtype="int32")
        )
        order = memory_ops.ranks_to_order(ranks, dtype)

    assert tuple(order.shape) == (2, width)
    found = array(memory_ops.order_to_ranks(order, slots, "float32"))
    for sample in range(2):
        assert found[sample].tolist() == ranks_after(writes[:, sample], slots)
    memory_ops.check_order(array(ops.cast(order, "float32")), slots)


def test_zeros_are_the_order_of_an_empty_memory():
    zeros = ops.zeros((1, 4), dtype="bfloat16")
    ranks = array(memory_ops.order_to_ranks(zeros, 4, "float32"))

    assert ranks.tolist() == [[3, 2, 1, 0]]


def test_an_order_with_a_rank_twice_is_refused():
    with pytest.raises(ValueError, match="each rank once.*3, 2, 2, 0"):
        memory_ops.check_order(np.array([[0.0, 0.0, 1.0, 0.0]]), 4)
    with pytest.raises(ValueError, match="`write_order` must hold whole"):
        memory_ops.check_order(np.array([[0.0, 0.5, 0.0, 0.0]]), 4)


@pytest.mark.parametrize("addressing", ["relaxed", "soft"])
def test_read_weights_are_a_distribution(addressing, rng):
    where = memory_ops.address(scores(rng), addressing, training=True)
    weights = array(where.weights)

    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_without_noise_the_best_slot_is_read(rng):
    drawn = scores(rng)
    contents = matrix(rng)
    for addressing in ("hard", "relaxed"):
        where = memory_ops.address(drawn, addressing, training=False)
        best = array(drawn).argmax(-1)

        assert array(where.slot).tolist() == best.tolist()
        np.testing.assert_array_equal(
            array(memory_ops.read(ops.convert_to_tensor(contents), where)),
            contents[np.arange(BATCH), best],
        )


def test_a_hard_sample_is_one_row_where_the_gradient_is_taken_by_hand(rng):
    drawn = scores(rng)
    where = memory_ops.address(
        drawn, "hard", training=True, straight_through=False
    )

    assert where.weights is None and where.scores is None
    assert array(where.slot).tolist() == array(drawn).argmax(-1).tolist()


def test_gumbel_samples_follow_the_softmax(rng):
    logits = np.array([[0.0, 1.0, 2.0, -1.0]], "float32")
    draws = 20000
    gumbel = rng.gumbel(size=(draws, SLOTS)).astype("float32")
    where = memory_ops.address(
        ops.convert_to_tensor((logits + gumbel) / 0.3), "hard", training=True
    )
    share = np.bincount(array(where.slot), minlength=SLOTS) / draws
    expected = np.exp(logits[0]) / np.exp(logits[0]).sum()

    np.testing.assert_allclose(share, expected, atol=0.015)


def test_a_one_hot_read_returns_that_slot_exactly(rng):
    contents = matrix(rng)
    one_hot = np.eye(SLOTS, dtype="float32")[[1, 3, 0]]
    where = memory_ops.Address(ops.convert_to_tensor(one_hot), None)
    read = array(memory_ops.read(ops.convert_to_tensor(contents), where))

    np.testing.assert_array_equal(read, contents[[0, 1, 2], [1, 3, 0]])


def test_an_overwrite_changes_only_its_slot(rng):
    contents, value = matrix(rng), rows(rng)
    slot = ops.convert_to_tensor([3, 0, 2], dtype="int32")
    before = ops.convert_to_tensor(contents)
    after = array(
        memory_ops.overwrite(before, slot, ops.convert_to_tensor(value))
    )

    expected = contents.copy()
    expected[[0, 1, 2], [3, 0, 2]] = value
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(array(before), contents)


def test_single_rows_are_taken_and_put(rng):
    contents, value = matrix(rng), rows(rng)
    index = [0, 1, 2], [3, 0, 2]
    slot = ops.convert_to_tensor(index[1], dtype="int32")
    tensors = [ops.convert_to_tensor(x) for x in (contents, value)]

    np.testing.assert_array_equal(
        array(backends.gather_rows(tensors[0], slot)), contents[index]
    )
    changed = contents.copy()
    changed[index] = value
    for in_place in (False, True):
        own = ops.copy(tensors[0])
        found = backends.scatter_rows(own, slot, tensors[1], in_place=in_place)
        np.testing.assert_array_equal(array(found), changed)


def test_a_row_is_put_and_another_added_to_maybe_the_same(rng):
    contents, value, term = matrix(rng), rows(rng), rows(rng)
    put, add = [3, 0, 2], [3, 1, 2]
    expected = contents.copy()
    expected[[0, 1, 2], put] = value
    expected[[0, 1, 2], add] += term
    slots = [ops.convert_to_tensor(x, dtype="int32") for x in (put, add)]
    own, value, term = map(ops.convert_to_tensor, (contents, value, term))

    found = backends.scatter_then_add_rows(
        ops.copy(own), slots[0], value, slots[1], term
    )

    np.testing.assert_allclose(array(found), expected, rtol=1e-6)


def test_a_matrix_times_a_vector(rng):
    contents, value = matrix(rng), rows(rng)
    found = backends.matvec(
        ops.convert_to_tensor(contents), ops.convert_to_tensor(value)
    )

    np.testing.assert_allclose(
        array(found), np.einsum("bnr,br->bn", contents, value), rtol=1e-5
    )


def test_an_overwrite_removes_a_nan(rng):
    contents = matrix(rng)
    contents[0, 1] = np.nan
    after = memory_ops.overwrite(
        ops.convert_to_tensor(contents),
        ops.convert_to_tensor([1, 1, 1], dtype="int32"),
        ops.zeros((BATCH, DIM)),
    )

    assert np.isfinite(array(after)).all()


def test_slots_fill_in_order_before_the_read_slot_is_overwritten():
    count = ops.convert_to_tensor([0, 3, 4, 900], dtype="int32")
    read = ops.convert_to_tensor([2, 2, 2, 2], dtype="int32")

    slots = array(memory_ops.write_slot(count, read, SLOTS))

    assert slots.tolist() == [0, 3, 2, 2]


def test_a_soft_write_fills_first_and_then_follows_the_read():
    count = ops.convert_to_tensor([1, 4], dtype="int32")
    read = np.array([[0.1, 0.2, 0.3, 0.4]] * 2, "float32")
    weights = array(
        memory_ops.soft_write_weights(count, ops.convert_to_tensor(read))
    )

    np.testing.assert_array_equal(weights, [[0, 1, 0, 0], read[1]])


def test_a_blend_stays_between_old_and_new(rng):
    contents, value = matrix(rng), rows(rng)
    weights = rng.random((BATCH, SLOTS)).astype("float32")
    tensors = [ops.convert_to_tensor(x) for x in (contents, weights, value)]
    after = array(memory_ops.blend(*tensors))

    low = np.minimum(contents, value[:, None])
    high = np.maximum(contents, value[:, None])
    assert (after >= low - 1e-6).all() and (after <= high + 1e-6).all()
