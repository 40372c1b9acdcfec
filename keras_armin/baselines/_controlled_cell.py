"""The base class of NTM, DNC and SAM: an LSTM that controls heads."""

from typing import Any

import numpy as np

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.backends import ops
from keras_armin.baselines._lstm_driven_cell import LSTMDrivenCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.initial_states import InitialStates
from keras_armin.memory_cell import CellResult
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors

VARIANTS = ("published", "released")
# Head pre-activations beyond this would only overflow.
LARGEST_INTERFACE = 20.0


class ControlledCell(InitialStates, LSTMDrivenCell):
    """An LSTM controller of the inputs and the last reads, and its heads.

    The output is `[h, reads]`, which is also fed back. A subclass defines:

    - `extra_states`: sizes of the states between `memory` and `pointer`, by
      name;
    - `interface_sizes`: sizes of what the heads get from the LSTM, by name;
    - `use_memory(parts, memory, extra, count)`, in float32 or wider: `parts`
      of the interface, states by name, and the number of steps so far. It
      returns reads `(batch, num_reads, memory_dim)`, the new memory and extra
      states, and the read and write weights for `trace_memory`.
    """

    def __init__(
        self,
        units: int,
        memory_slots: int,
        memory_dim: int | None,
        num_reads: int,
        variant: str,
        learn_initial_state: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        self.memory_slots = validation.size("memory_slots", memory_slots)
        self.memory_dim = validation.size_or_default(
            "memory_dim", memory_dim, self.units
        )
        self.num_reads = validation.size("num_reads", num_reads)
        self.variant = validation.choice("variant", variant, VARIANTS)
        self.learn_initial_state = validation.flag(
            "learn_initial_state", learn_initial_state
        )
        self.feedback_size = self.num_reads * self.memory_dim
        self.output_size = self.units + self.feedback_size

    @property
    def released(self) -> bool:
        return self.variant == "released"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("output", "c", "memory", *self.extra_states, "pointer")

    @property
    def state_size(self) -> list[int]:
        return [
            self.output_size,
            self.units,
            self.memory_slots * self.memory_dim,
            *self.extra_states.values(),
            memory_ops.POINTER_DIGITS,
        ]

    # --- weights ------------------------------------------------------------

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_lstm()
        sizes = list(self.interface_sizes.values())
        self.interface_kernel = self.add_kernel(
            "interface_kernel", "kernel", self.units, sizes
        )
        if self.use_bias:
            self.interface_bias = self.add_bias(
                "interface_bias",
                [(size, self.bias_initializer) for size in sizes],
            )
        self.build_initial_state()
        self.built = True

    @property
    def trainable_initial_states(self) -> dict[str, tuple]:
        return {
            "output": (np.zeros(self.output_size), ops.tanh),
            "c": (np.zeros(self.units), ops.tanh),
        }

    # --- equations ----------------------------------------------------------

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        state = dict(zip(self.state_names, states))
        h, c = self.lstm(
            weights,
            projected,
            state["output"],
            state["c"],
            step_noise,
            sequence_noise,
            training,
        )
        wide = memory_ops.wide_dtype(self.compute_dtype)
        parts = self._interface(weights, self.head_inputs(h, c), wide)
        reads, memory, extra, read, written = self.use_memory(
            parts,
            ops.reshape(
                ops.cast(clip_gradient(state["memory"]), wide),
                (-1, self.memory_slots, self.memory_dim),
            ),
            {
                name: ops.cast(clip_gradient(state[name]), wide)
                for name in self.extra_states
            },
            memory_ops.pointer_to_count(state["pointer"]),
        )
        reads = ops.reshape(reads, (-1, self.feedback_size))
        new = {
            "output": ops.concatenate([h, ops.cast(reads, h.dtype)], axis=-1),
            "c": c,
            "memory": memory,
            **extra,
            "pointer": count_step(state["pointer"]),
        }
        return CellResult(
            [self._flat(name, new[name], h.dtype) for name in new],
            read,
            written,
        )

    def head_inputs(self, h: Tensor, c: Tensor) -> Tensor:
        return h

    def _interface(self, weights: Tensors, h: Tensor, wide: str) -> Tensors:
        """The parts of the interface by name, `(batch, size)` each."""
        numbers = affine(
            h, weights["interface_kernel"], weights.get("interface_bias")
        )
        numbers = ops.clip(
            ops.cast(numbers, wide), -LARGEST_INTERFACE, LARGEST_INTERFACE
        )
        sizes = list(self.interface_sizes.values())
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        return dict(
            zip(self.interface_sizes, ops.split(numbers, ends, axis=-1))
        )

    def _flat(self, name: str, x: Tensor, dtype: str) -> Tensor:
        width = dict(zip(self.state_names, self.state_size))[name]
        return ops.reshape(ops.cast(x, dtype), (-1, width))

    def per_head(self, x: Tensor, heads: int) -> Tensor:
        """`(batch, heads * width)` as `(batch, heads, width)`."""
        return ops.reshape(x, (-1, heads, x.shape[-1] // heads))
