"""Addressing of NTM, DNC and SAM: pure functions on weightings.

In shapes, `n` is the number of slots, `w` the width of a slot and `k` the
number of heads. Everything is in float32 or wider.
"""

from keras_armin.backends import ops
from keras_armin.memory_ops import softmax
from keras_armin.types import Tensor

# Under the square root of a norm, whose gradient at a row of zeros would
# otherwise be NaN.
NORM_EPSILON = 1e-6
# Sharper weightings would only affect the gradient.
LARGEST_STRENGTH = 50.0
LARGEST_SHARPNESS = 20.0
# Below this a weight counts as zero where its logarithm is taken.
SMALLEST_WEIGHT = 1e-12
# Distance between equal rows, so that all backends choose the same one.
TIE = 1e-6
# Score of rows that must not be chosen.
NEVER = -1e30


def unit_rows(x: Tensor) -> Tensor:
    """Each row of the last axis divided by its length."""
    squared = ops.sum(ops.square(x), axis=-1)
    return x * ops.expand_dims(ops.rsqrt(squared + NORM_EPSILON), -1)


def cosine(memory: Tensor, keys: Tensor) -> Tensor:
    """Similarity of keys `(batch, k, w)` and rows: `(batch, k, n)`."""
    rows = ops.swapaxes(unit_rows(memory), 1, 2)
    return ops.matmul(unit_rows(keys), rows)


def one_plus(x: Tensor) -> Tensor:
    """A strength of at least 1."""
    return ops.clip(1 + ops.softplus(x), 0.0, LARGEST_STRENGTH)


def content(similarities: Tensor, strengths: Tensor) -> Tensor:
    """Weights `(batch, k, n)` by content; strengths are `(batch, k, 1)`."""
    return softmax(strengths * similarities)


def nearest(similarities: Tensor, strengths: Tensor, top_k: int) -> Tensor:
    """As `content`, over the `top_k` most similar rows only."""
    slots = similarities.shape[-1]
    if top_k >= slots:
        return content(similarities, strengths)
    rows = largest(similarities, top_k)
    chosen = ops.sum(ops.one_hot(rows, slots, dtype="int32"), axis=-2)
    scores = strengths * similarities
    return softmax(ops.where(chosen > 0, scores, NEVER))


def largest(x: Tensor, top_k: int) -> Tensor:
    """Indices of the `top_k` largest along the last axis, no gradient.

    Of equal ones, such as empty rows, the first; backends differ in that.
    """
    slots = x.shape[-1]
    later = ops.cast(ops.arange(slots, dtype="int32"), x.dtype)
    return ops.top_k(ops.stop_gradient(x) - TIE / slots * later, top_k)[1]


def shift(weights: Tensor, taps: Tensor) -> Tensor:
    """Circular convolution of `(batch, k, n)` with `(batch, k, 2 s + 1)`.

    The middle tap keeps the weights; the next one moves them by one slot.
    """
    reach = taps.shape[-1] // 2
    moved = [
        ops.roll(weights, places, axis=-1) * taps[..., index : index + 1]
        for index, places in enumerate(range(-reach, reach + 1))
    ]
    return sum(moved[1:], moved[0])


def sharpen(weights: Tensor, sharpness: Tensor) -> Tensor:
    """`weights ** sharpness`, normalised to a sum of 1."""
    weights = ops.clip(weights, SMALLEST_WEIGHT, 1.0)
    return softmax(sharpness * ops.log(weights))


def read(memory: Tensor, weights: Tensor) -> Tensor:
    """Rows `(batch, n, w)` summed by `(batch, k, n)`: `(batch, k, w)`."""
    return ops.matmul(weights, memory)


def erase_and_add(
    memory: Tensor, weights: Tensor, erase: Tensor, add: Tensor
) -> Tensor:
    """Each head erases, `(batch, k, w)` between 0 and 1, then each adds."""
    columns = ops.expand_dims(weights, -1)
    kept = 1 - columns * ops.expand_dims(erase, 2)
    for head in range(weights.shape[1]):
        memory = memory * kept[:, head]
    return memory + ops.matmul(ops.swapaxes(weights, 1, 2), add)
