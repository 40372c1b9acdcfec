"""Pure functions on the memory matrix: pointer, address, read, write.

In shapes, `n` is the number of slots and `r` the width of a slot.
"""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np

from keras_armin import backends
from keras_armin.backends import ops
from keras_armin.keras_private import preserve_float64

# The pointer counts how many writes a sample has made since its last reset,
# as digits, because Keras casts every state to the compute dtype: bfloat16
# represents integers exactly only up to 256 and float16 up to 2048. Zeros are
# the initial state, which is also what `keras.layers.RNN.reset_state` writes.
POINTER_DIGITS = 4
POINTER_BASE = 128
POINTER_MAX = POINTER_BASE**POINTER_DIGITS - 1

_HALF_DTYPES = ("float16", "bfloat16")


def wide_dtype(dtype: str) -> str:
    """The dtype to compute softmax and layer norm in: at least float32."""
    return "float32" if dtype in _HALF_DTYPES else dtype


def pointer_to_count(pointer):
    """Number of writes so far, int32 of shape `(batch,)`."""
    digits = ops.cast(pointer, "int32")
    places = _place_values(digits, digits.shape[-1])
    return ops.cast(ops.sum(digits * places, axis=-1), "int32")


def count_to_pointer(count, dtype, digits: int = POINTER_DIGITS):
    """Digits of `count`, least significant first, shape `(..., digits)`."""
    places = _place_values(count, digits)
    above = backends.floor_divide(ops.expand_dims(count, -1), places)
    found = above - POINTER_BASE * backends.floor_divide(above, POINTER_BASE)
    return ops.cast(found, dtype)


def _place_values(like, digits):
    values = [POINTER_BASE**i for i in range(digits)]
    return backends.integers(values, like)


def check_pointer(pointer, name="pointer", meaning="the number of writes"):
    """Raise if a NumPy array does not hold digits."""
    if not np.isin(pointer, np.arange(POINTER_BASE)).all():
        raise ValueError(
            f"State `{name}` must hold whole numbers from 0 to "
            f"{POINTER_BASE - 1}, the base-{POINTER_BASE} digits of {meaning}, "
            f"least significant first. Received: {np.unique(pointer)}"
        )


# The order of writes: the rank of a slot is the number of other slots that were
# written since it was. Empty slots are older than all others, and the next one
# to be filled is the oldest: a sequence starts with the ranks n - 1, ..., 1, 0.
# The state holds the digits of the distance from these initial ranks (modulo
# n), so that zeros are the initial state here too.


def order_digits(memory_slots: int) -> int:
    """Number of digits that the rank of a slot needs."""
    digits = 1
    while POINTER_BASE**digits < memory_slots:
        digits += 1
    return digits


def order_to_ranks(order, memory_slots: int, dtype):
    """Ranks `(batch, n)` from the state `(batch, n * digits)`."""
    digits, distance = order_digits(memory_slots), order
    if digits > 1:
        distance = pointer_to_count(
            ops.reshape(order, (-1, memory_slots, digits))
        )
    first = memory_slots - 1 - ops.cast(backends.arange(memory_slots), dtype)
    return _wrap_around(ops.cast(distance, dtype) + first, memory_slots)


def ranks_to_order(ranks, dtype):
    """The state `(batch, n * digits)` from ranks `(batch, n)`."""
    slots = ranks.shape[-1]
    # In floats: as integers OpenVINO gets them wrong in batches of several.
    distance = ranks + 1 + ops.cast(backends.arange(slots), ranks.dtype)
    distance, digits = _wrap_around(distance, slots), order_digits(slots)
    if digits == 1:
        return ops.cast(distance, dtype)
    order = count_to_pointer(ops.cast(distance, "int32"), dtype, digits)
    return ops.reshape(order, (-1, slots * digits))


def _wrap_around(x, n):
    """`x` modulo `n`, for `x` from 0 to 2 n - 1."""
    return ops.where(x >= n, x - n, x)


def check_order(order, memory_slots: int):
    """Raise if a NumPy array does not hold an order of the slots."""
    check_pointer(order, "write_order", "where each slot stands in the order")
    digits = order_digits(memory_slots)
    places = POINTER_BASE ** np.arange(digits)
    distance = order.reshape(-1, memory_slots, digits).astype(int) @ places
    ranks = (distance + np.arange(memory_slots)[::-1]) % memory_slots
    if not (np.sort(ranks, axis=-1) == np.arange(memory_slots)).all():
        raise ValueError(
            "State `write_order` must be an order of the slots, with each rank "
            f"once. Received the ranks: {ranks.tolist()}"
        )


def update_ranks(ranks, slot):
    """The ranks after a write to `slot` `(batch,)`."""
    return backends.update_ranks(ranks, slot)


def increment(count):
    """Count a write, up to `POINTER_MAX`.

    It does not wrap around, since a pointer of zero means an empty memory.
    """
    return ops.minimum(count + 1, POINTER_MAX)


class Address(NamedTuple):
    """Where a step reads, and which slot it overwrites."""

    weights: Any  # (batch, n), or None if a single row is read
    slot: Any  # int32 (batch,), or None if the write is distributed
    scores: Any = None  # (batch, n): receive the gradient of a single row


def address(
    scores, addressing: str, training: bool, straight_through: bool = True
) -> Address:
    """Compute an address from scores `(batch, n)`.

    `scores` are logits, with noise while training, divided by the temperature.
    `"hard"`, and at inference `"relaxed"`, read the slot with the largest
    score; with `straight_through` such a read has the gradient of a relaxed
    one.
    """
    if addressing == "soft":
        return Address(softmax(scores), None)
    slot = backends.argmax_slot(scores)
    if addressing == "relaxed" and training:
        return Address(softmax(scores), slot)
    return Address(None, slot, scores if straight_through else None)


def straight_through_one_hot(scores, slot):
    """One-hot weights with the gradient of the softmax."""
    relaxed = softmax(scores)
    one_hot = ops.one_hot(slot, scores.shape[-1], dtype=relaxed.dtype)
    # In this order the value is exactly one-hot: the bracket is exactly 0.
    return one_hot + (relaxed - ops.stop_gradient(relaxed))


def softmax(logits):
    if logits.shape[-1] == 1:
        # A memory of a single slot, for which Keras would warn.
        return ops.ones_like(logits)
    return ops.softmax(logits, axis=-1)


def match(memory, query):
    """Inner products of a query `(batch, r)` and all rows: `(batch, n)`."""
    return backends.matvec(ops.cast(memory, query.dtype), query)


def row(memory, slot):
    """Row `slot` `(batch,)` of each sample."""
    return backends.gather_rows(memory, slot)


def read_backward(memory, relaxed, d_r):
    """The gradient of the scores, given that of a read of a single row.

    It is the gradient of a read with `relaxed`, the softmax of the scores.
    """
    d_weights = match(memory, ops.cast(d_r, relaxed.dtype))
    return backends.softmax_gradient(relaxed, d_weights)


@preserve_float64
def _row_backward(memory, slot, scores, d_r):
    d_memory = backends.scatter_rows(ops.zeros_like(memory), slot, d_r)
    return d_memory, None, read_backward(memory, softmax(scores), d_r)


# A row with the straight-through gradient: only its backward pass computes over
# all slots.
_straight_through_row = backends.with_vjp(
    lambda memory, slot, scores: row(memory, slot), _row_backward
)


def read(memory, where: Address):
    """Read from memory `(batch, n, r)`: one row, or a weighted sum of rows."""
    if where.weights is None:
        if where.scores is None:
            return row(memory, where.slot)
        return _straight_through_row(memory, where.slot, where.scores)
    # Float16 is too narrow for a sum over thousands of slots.
    wide = _wide(memory)
    weights = ops.expand_dims(ops.cast(where.weights, wide), -1)
    read = ops.sum(weights * ops.cast(memory, wide), axis=1)
    return ops.cast(read, memory.dtype)


def write_slot(count, slot, memory_slots: int):
    """The slot to overwrite: the next empty one, later the one just read."""
    return ops.where(count < memory_slots, count, slot)


def overwrite(memory, slot, value, in_place=False, after=None):
    """Replace row `slot` of each sample by `value` `(batch, r)`."""
    return backends.scatter_rows(memory, slot, value, in_place, after)


def soft_write_weights(count, read_weights):
    """One-hot at the next empty slot, later the read weights. No gradient."""
    slots = read_weights.shape[-1]
    filling = ops.expand_dims(count < slots, -1)
    one_hot = ops.cast(_is_slot(count, slots), read_weights.dtype)
    return ops.where(filling, one_hot, ops.stop_gradient(read_weights))


def blend(memory, weights, value):
    """Interpolate each row towards `value` by its weight."""
    wide = _wide(memory)
    weights = ops.expand_dims(ops.cast(weights, wide), -1)
    value = ops.expand_dims(ops.cast(value, wide), 1)
    mixed = (1 - weights) * ops.cast(memory, wide) + weights * value
    return ops.cast(mixed, memory.dtype)


def _wide(x):
    return wide_dtype(keras.backend.standardize_dtype(x.dtype))


def as_weights(where, memory_slots: int):
    """Weights `(batch, n)` from weights, or from slots `(batch,)`."""
    if len(where.shape) == 2:
        return where
    return ops.one_hot(where, memory_slots, dtype="float32")


def _is_slot(slot, memory_slots: int):
    slots = backends.arange(memory_slots)
    return ops.expand_dims(slot, -1) == slots
