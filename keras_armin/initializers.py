"""Initializes fused weights gate by gate."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_armin.memory_ops import wide_dtype
from keras_armin.noise import derive_seed
from keras_armin.types import Tensor


class BlockInitializer(keras.initializers.Initializer):
    """Initializes a weight block by block along its last axis.

    Called once for a fused kernel, an initializer would compute its fan-out
    from the whole width; called for each block, a seeded one would return the
    same values. Here each block has its own fan-out and its own seed.

    Args:
        blocks: list of `(width, initializer)` pairs.
        path: ints that distinguish this weight from others with the same
            initializer.
    """

    def __init__(
        self, blocks: list[tuple[int, Any]], path: Sequence[int] = ()
    ) -> None:
        self.blocks = blocks
        self.path = tuple(path)

    def __call__(self, shape: tuple, dtype: str | None = None) -> Tensor:
        # Orthogonal matrices are supported in float32 and float64 only.
        wide = wide_dtype(dtype or keras.config.floatx())
        parts = [
            with_seed(initializer, *self.path, index)(
                (*shape[:-1], width), dtype=wide
            )
            for index, (width, initializer) in enumerate(self.blocks)
        ]
        return ops.cast(ops.concatenate(parts, axis=-1), dtype or wide)


def with_seed(initializer: Any, *path: int) -> Any:
    """A copy of the initializer with a seed derived from `path`.

    Initializers without an integer seed are returned as they are: constants,
    and those with a `SeedGenerator`, which advances by itself.
    """
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int):
        return initializer
    config = initializer.get_config()
    config["seed"] = derive_seed(seed, *path)
    return type(initializer).from_config(config)
