"""Pure functions on the memory matrix: pointer, address, read, write.

Shapes use `n` for the number of slots and `r` for the width of a slot. Nothing
here keeps state, so each function can be tested alone.
"""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np

from keras_armin import backends
from keras_armin.backends import ops

# The pointer counts how many writes a sample has made since its last reset,
# in digits, because Keras casts every state to the compute dtype: bfloat16
# holds integers exactly only up to 256 and float16 up to 2048. All zeros is
# the start, which is also what `keras.layers.RNN.reset_state` writes.
POINTER_DIGITS = 4
POINTER_BASE = 128
POINTER_MAX = POINTER_BASE**POINTER_DIGITS - 1

_HALF_DTYPES = ("float16", "bfloat16")


def wide_dtype(dtype: str) -> str:
    """The dtype to compute softmax and layer norm in: never a half one."""
    return "float32" if dtype in _HALF_DTYPES else dtype


def pointer_to_count(pointer):
    """Number of writes so far, int32 of shape `(batch,)`."""
    digits = ops.cast(pointer, "int32")
    return ops.cast(ops.sum(digits * _place_values(digits), axis=-1), "int32")


def count_to_pointer(count, dtype):
    """Digits of `count`, lowest first, shape `(batch, POINTER_DIGITS)`."""
    above = backends.quotient(ops.expand_dims(count, -1), _place_values(count))
    digits = above - POINTER_BASE * backends.quotient(above, POINTER_BASE)
    return ops.cast(digits, dtype)


def _place_values(like):
    values = [POINTER_BASE**i for i in range(POINTER_DIGITS)]
    return backends.integers(values, like)


def check_pointer(pointer):
    """Refuse a NumPy array that no count could have given."""
    if not np.isin(pointer, np.arange(POINTER_BASE)).all():
        raise ValueError(
            "State `pointer` must hold whole numbers from 0 to "
            f"{POINTER_BASE - 1}, the digits of the number of writes, lowest "
            f"first. Received: {np.unique(pointer)}"
        )


def advance(count):
    """One more write. It stops at the largest number instead of wrapping,
    since a pointer of zero would mean an empty memory."""
    return ops.minimum(count + 1, POINTER_MAX)


class Address(NamedTuple):
    """Where a step reads, and which slot it would overwrite."""

    weights: Any  # (batch, n), or None where a single row is read
    slot: Any  # int32 (batch,), or None where the write is spread out


def address(
    scores, addressing: str, sampled: bool, straight_through: bool = True
) -> Address:
    """Turn scores `(batch, n)` into an address.

    `scores` are logits, with Gumbel noise if `sampled`, divided by the
    temperature. Without noise `"hard"` and `"relaxed"` take the best slot.
    """
    if addressing == "soft":
        return Address(softmax(scores), None)
    slot = backends.best_slot(scores)
    if not sampled:
        return Address(None, slot)
    if addressing == "relaxed":
        return Address(softmax(scores), slot)
    weights = with_relaxed_gradient(scores, slot) if straight_through else None
    return Address(weights, slot)


def with_relaxed_gradient(scores, slot):
    """One-hot weights with the gradient of the softmax."""
    relaxed = softmax(scores)
    one_hot = ops.one_hot(slot, scores.shape[-1], dtype=relaxed.dtype)
    # Grouped so that the value is exactly one-hot: the bracket is exactly 0.
    return one_hot + (relaxed - ops.stop_gradient(relaxed))


def softmax(logits):
    if logits.shape[-1] == 1:
        # Keras warns of this case, which a memory of one slot means.
        return ops.ones_like(logits)
    return ops.softmax(logits, axis=-1)


def match(memory, query):
    """Inner products of a query `(batch, r)` with all rows: `(batch, n)`."""
    return backends.matvec(ops.cast(memory, query.dtype), query)


def row(memory, slot):
    """Row `slot` `(batch,)` of each sample."""
    return backends.take_rows(memory, slot)


def read(memory, where: Address):
    """Read from memory `(batch, n, r)`: one row, or a weighted sum of rows."""
    if where.weights is None:
        return row(memory, where.slot)
    # A sum over thousands of slots does not survive in float16.
    wide = _wide(memory)
    weights = ops.expand_dims(ops.cast(where.weights, wide), -1)
    read = ops.sum(weights * ops.cast(memory, wide), axis=1)
    return ops.cast(read, memory.dtype)


def write_slot(count, slot, memory_slots: int):
    """The slot to overwrite: the next empty one, later the one just read."""
    return ops.where(count < memory_slots, count, slot)


def overwrite(memory, slot, value, in_place=False, after=None):
    """Replace row `slot` of each sample by `value` `(batch, r)`."""
    return backends.put_rows(memory, slot, value, in_place, after)


def soft_write_weights(count, read_weights):
    """One-hot at the next empty slot, later the read weights. No gradient."""
    slots = read_weights.shape[-1]
    filling = ops.expand_dims(count < slots, -1)
    one_hot = ops.cast(_is_slot(count, slots), read_weights.dtype)
    return ops.where(filling, one_hot, ops.stop_gradient(read_weights))


def blend(memory, weights, value):
    """Move each row towards `value` by its weight."""
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
    slots = backends.count_up(memory_slots)
    return ops.expand_dims(slot, -1) == slots
