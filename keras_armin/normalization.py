"""Layer normalisation and its backward pass."""

import keras

from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.gradient_clipping import clip_gradient_backward
from keras_armin.memory_ops import wide_dtype

# As in the authors' code; it also bounds the slope at a zero state.
EPSILON = 1e-3


def layer_norm(x, sizes, gain, bias):
    """Normalise the blocks of `x` `(..., sum(sizes))` independently."""
    x, wide = clip_gradient(x), _wide(x)
    (normal,) = _map_blocks(_normalise, sizes, ops.cast(x, wide))
    normal = normal * ops.cast(gain, wide) + ops.cast(bias, wide)
    return ops.cast(normal, x.dtype)


def layer_norm_backward(x, sizes, gain, d_y):
    """Gradients of `x` `(batch, sum(sizes))`, of the gain and of the bias."""
    wide = _wide(x)
    d_y = ops.cast(d_y, wide)
    normal, d_x = _map_blocks(
        _normalise_backward,
        sizes,
        ops.cast(x, wide),
        d_y * ops.cast(gain, wide),
    )
    d_gain, d_bias = ops.sum(d_y * normal, axis=0), ops.sum(d_y, axis=0)
    # Sums over many steps stay in the wide dtype.
    return clip_gradient_backward(ops.cast(d_x, x.dtype)), d_gain, d_bias


def _wide(x):
    return wide_dtype(keras.backend.standardize_dtype(x.dtype))


def _map_blocks(function, sizes, *tensors):
    """Apply to each block of the last axis and concatenate the results."""
    if len(set(sizes)) == 1:
        shape = ops.shape(tensors[0])
        blocks = (*shape[:-1], len(sizes), sizes[0])
        results = function(*(ops.reshape(x, blocks) for x in tensors))
        return [ops.reshape(x, shape) for x in results]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    split = [ops.split(x, ends, axis=-1) for x in tensors]
    results = [function(*blocks) for blocks in zip(*split)]
    return [ops.concatenate(parts, axis=-1) for parts in zip(*results)]


def _mean(x):
    return ops.mean(x, axis=-1, keepdims=True)


def _normalise(x):
    centred = x - _mean(x)
    inverse = ops.rsqrt(_mean(ops.square(centred)) + EPSILON)
    return (centred * inverse,)


def _normalise_backward(x, d_normal):
    centred = x - _mean(x)
    inverse = ops.rsqrt(_mean(ops.square(centred)) + EPSILON)
    normal = centred * inverse
    inner = _mean(d_normal * normal)
    return normal, inverse * (d_normal - _mean(d_normal) - normal * inner)
