"""The base class of the comparison networks: their common arguments."""

from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.initializers import BlockInitializer
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_cell import argument_names
from keras_armin.memory_cell import package_class
from keras_armin.noise import StepNoise
from keras_armin.normalization import layer_norm
from keras_armin.types import Tensor
from keras_armin.types import Tensors


class RecurrentCell(MemoryCell):
    """A cell with kernels, biases and dropout, and no noise of a step.

    Its config has every argument of the subclass.
    """

    def __init__(
        self,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = locals()
        super().__init__(
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            **kwargs,
        )
        self.set_keras_objects(given)

    @property
    def step_draws(self) -> int:
        """Number of random tensors per step."""
        return 0

    def draw_step_noise(self, leading: tuple, seeds: list) -> StepNoise:
        return StepNoise()

    @property
    def recurrent_width(self) -> int:
        """`recurrent_dropout` is applied to the output that is fed back."""
        return self.output_size

    def build_norm(self, prefix: str, blocks: list) -> None:
        """Gains of 1, and biases of the given widths and initializers."""
        width = sum(size for size, _ in blocks)
        for kind, initializer in (
            ("gain", keras.initializers.Ones()),
            ("bias", BlockInitializer(blocks)),
        ):
            name = f"{prefix}norm_{kind}"
            setattr(self, name, self.add_norm(name, width, initializer))

    def normalise(
        self, weights: Tensors, prefix: str, x: Tensor, blocks: int
    ) -> Tensor:
        """`x`, with `layer_norm` each of its blocks independently."""
        if not self.layer_norm:
            return clip_gradient(x)
        return layer_norm(
            x,
            [x.shape[-1] // blocks] * blocks,
            weights[f"{prefix}norm_gain"],
            weights[f"{prefix}norm_bias"],
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self.serialize_arguments(
                argument_names(package_class(type(self)))
            ),
        }


def count_step(pointer: Tensor) -> Tensor:
    """The pointer after one more step."""
    count = memory_ops.pointer_to_count(pointer)
    return memory_ops.count_to_pointer(
        memory_ops.increment(count), pointer.dtype
    )


def equal_parts(x: Tensor, count: int) -> list:
    """`count` tensors of equal width, along the last axis."""
    if count == 1:  # TensorFlow does not take an empty list of places
        return [x]
    width = x.shape[-1] // count
    return ops.split(x, [width * k for k in range(1, count)], axis=-1)
