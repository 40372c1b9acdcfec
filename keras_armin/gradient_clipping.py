"""Clips gradients that pass through many steps, so that they stay finite.

A step may amplify a gradient: a layer norm over zeros has a slope of
1 / sqrt(1e-3) = 32, and 32 ** 50 overflows float32. Where such factors would
accumulate from step to step, the gradient is clipped element by element, at a
size that it reaches only when it is about to overflow.
"""

from typing import Any

from keras_armin import backends
from keras_armin.backends import ops
from keras_armin.types import Tensor

# Far above any gradient that is of use. Far enough below the largest float32,
# 3e38, for products with weights and activations, and for sums of them over
# thousands of steps.
LARGEST_GRADIENT = 1e6
# Float16 ends at 65504. Keras scales the loss up until a gradient overflows,
# and leaves out an update in which one does: a lower bound would hide that
# from it, and bend gradients that are merely scaled.
LARGEST_GRADIENT_FLOAT16 = 2.0**15

# Of inputs, and of queries: what is multiplied with something that may have
# grown as large, such as kernels after an update, has to leave room for it.
LARGEST_FACTOR = 1e9


def largest_gradient(dtype: Any) -> float:
    if backends.is_float16(dtype):
        return LARGEST_GRADIENT_FLOAT16
    return LARGEST_GRADIENT


def clip_gradient(x: Tensor) -> Tensor:
    """Return `x` unchanged and clip its gradient."""
    return backends.clip_gradient(x, largest_gradient(x.dtype))


def clip_gradient_backward(d_x: Tensor) -> Tensor:
    """The backward pass of `clip_gradient`."""
    largest = largest_gradient(d_x.dtype)
    return ops.clip(d_x, -largest, largest)


def clip_factor(x: Tensor) -> Tensor:
    """Clip `x` so that products of two such tensors fit into float32."""
    if backends.is_float16(x.dtype):
        # No float16 is that large.
        return x
    return ops.clip(x, -LARGEST_FACTOR, LARGEST_FACTOR)


def clip_factor_backward(y: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of `x`, given that of `y = clip_factor(x)`."""
    free = (y > -LARGEST_FACTOR) & (y < LARGEST_FACTOR)
    return ops.where(free, d_y, ops.zeros_like(d_y))
