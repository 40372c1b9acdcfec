"""Weights made of blocks: each gate starts from a draw of its own."""

import keras
from keras import ops

from keras_armin.memory import wide_dtype
from keras_armin.noise import spread_seed


class BlockInitializer(keras.initializers.Initializer):
    """Fills a weight block by block along its last axis.

    An initializer that is called once for a fused kernel takes its fan-out
    from the whole width; and a seeded one gives the same values each time it
    is called. Here every block has its own fan-out and its own seed.

    Args:
        blocks: list of `(width, initializer)` pairs.
        path: ints that tell this weight from others with the same
            initializer.
    """

    def __init__(self, blocks, path=()):
        self.blocks = blocks
        self.path = tuple(path)

    def __call__(self, shape, dtype=None):
        # Orthogonal matrices can be had in float32 and float64 only.
        wide = wide_dtype(dtype or keras.config.floatx())
        parts = [
            reseeded(initializer, *self.path, index)(
                (*shape[:-1], width), dtype=wide
            )
            for index, (width, initializer) in enumerate(self.blocks)
        ]
        return ops.cast(ops.concatenate(parts, axis=-1), dtype or wide)


def reseeded(initializer, *path: int):
    """The same initializer with a seed that belongs to `path`.

    Initializers without an integer seed come back as they are: constants, and
    those with a `SeedGenerator`, which advances by itself.
    """
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int):
        return initializer
    config = initializer.get_config()
    config["seed"] = spread_seed(seed, *path)
    return type(initializer).from_config(config)
