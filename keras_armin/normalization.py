import keras

from keras_armin.backends import ops
from keras_armin.memory import wide_dtype

# What the authors' code uses; it also keeps gains small over a zero state.
EPSILON = 1e-3


def layer_norm(x, sizes, gain, bias):
    """Normalise each block of `x` `(..., sum(sizes))` for itself."""
    dtype = x.dtype
    wide = wide_dtype(keras.backend.standardize_dtype(dtype))
    x = ops.cast(x, wide)
    if len(set(sizes)) == 1:
        shape = ops.shape(x)
        blocks = ops.reshape(x, (*shape[:-1], len(sizes), sizes[0]))
        normal = ops.reshape(_standardise(blocks), shape)
    else:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        normal = ops.concatenate(
            [_standardise(block) for block in ops.split(x, ends, axis=-1)],
            axis=-1,
        )
    normal = normal * ops.cast(gain, wide) + ops.cast(bias, wide)
    return ops.cast(normal, dtype)


def _standardise(x):
    centred = x - ops.mean(x, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(centred), axis=-1, keepdims=True)
    return centred * ops.rsqrt(variance + EPSILON)
