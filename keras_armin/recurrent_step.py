"""One step of a recurrent layer, for models of a single step."""

from typing import Any

import keras
from keras import ops

from keras_armin import backends
from keras_armin.inspection import wrap_cell
from keras_armin.memory_cell import MemoryCell
from keras_armin.reference_loop import LoopResult
from keras_armin.types import Tensor


class RecurrentStep(keras.layers.Layer):
    """One step of a recurrent layer, with the cell of that layer.

    Args:
        rnn: A `keras.layers.RNN` or a subclass.
        reads: bool. Also return the slot that was read, if there is a memory.

    Call arguments:
        sequences: Tensor of shape `(batch, 1, features)`.
        states: List of the layer's states.
        mask: Bool tensor of shape `(batch, 1)`.

    Returns:
        The output, with a time axis if the layer returns sequences; the list
        of new states; the list of slots that were read, which may be empty.
    """

    def __init__(
        self, rnn: keras.layers.RNN, reads: bool = False, **kwargs: Any
    ) -> None:
        kwargs = {"name": rnn.name, "dtype": rnn.dtype_policy, **kwargs}
        super().__init__(**kwargs)
        if rnn.go_backwards:
            raise ValueError(
                f"Layer '{rnn.name}' has `go_backwards=True`: it starts from "
                "the end, which a stream does not have."
            )
        self.supports_masking = True
        self.has_memory = isinstance(rnn.cell, MemoryCell)
        slots = rnn.cell.memory_slots if self.has_memory else 0
        self.has_reads = reads and slots > 0
        flags = {
            "return_sequences": rnn.return_sequences,
            "zero_output_for_mask": rnn.zero_output_for_mask,
            "unroll": True,  # no loop around a single step
        }
        # Not the layer itself, which may be stateful.
        if self.has_memory:
            self.rnn = wrap_cell(rnn.cell, **flags)
        else:
            self.rnn = keras.layers.RNN(
                rnn.cell, return_state=True, dtype=rnn.dtype_policy, **flags
            )
        # The cell is built. Keras on JAX would try to build them in every call
        # of `predict_on_batch`.
        self.rnn.built = self.built = True

    @property
    def state_names(self) -> list[str]:
        if self.has_memory:
            names = self.rnn.cell.state_names
        else:
            names = [f"state_{i}" for i in range(len(self.state_sizes))]
        return [f"{self.name}_{name}" for name in names]

    @property
    def state_sizes(self) -> list[int]:
        return keras.tree.flatten(self.rnn.state_size)

    def initial_states(self, batch_size: Any) -> list:
        states = self.rnn.get_initial_state(batch_size)
        return [
            ops.cast(state, self.compute_dtype)
            for state in keras.tree.flatten(states)
        ]

    def call(
        self, sequences: Tensor, states: list, mask: Tensor = None
    ) -> tuple:
        if not self.has_memory:
            states = keras.tree.pack_sequence_as(self.rnn.state_size, states)
            output, *states = self.rnn(
                sequences, initial_state=states, mask=mask
            )
            return output, keras.tree.flatten(states), []
        result = self.rnn._run_loop(
            sequences,
            states,
            mask,
            training=False,
            reset=None,
            trace=self.has_reads,
        )
        output = self.rnn._format_outputs(result)
        return output, result.states, [_slot(result)] if self.has_reads else []

    def compute_mask(self, sequences: Tensor, mask: Tensor) -> tuple:
        masks = self.rnn.compute_mask(sequences, mask)
        output = masks[0] if isinstance(masks, list) else masks
        states = [None] * len(self.state_sizes)
        return output, states, [None] if self.has_reads else []


def _slot(result: LoopResult) -> Tensor:
    weights = result.read_weights[0]  # of the single step
    return ops.where(
        ops.any(weights > 0, axis=-1), backends.argmax_slot(weights), -1
    )
