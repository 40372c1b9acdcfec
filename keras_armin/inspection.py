"""Looking inside: slots read and written, and boundaries, at each step."""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin.baselines import HMLSTMCell
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_rnn import MemoryRNN
from keras_armin.reference_loop import LoopResult
from keras_armin.types import Tensor


class MemoryTrace(NamedTuple):
    """Reads and writes of a layer, in the order in which steps are processed.

    With `go_backwards` that is from the end of the sequence. Masked steps have
    weights of zero and the slot -1.
    """

    read_weights: np.ndarray  # (batch, time, slots)
    write_weights: np.ndarray  # (batch, time, slots)

    @property
    def read_slots(self) -> np.ndarray:
        """The slot read at each step, `(batch, time)`."""
        return _top_slot(self.read_weights)

    @property
    def write_slots(self) -> np.ndarray:
        """The slot written at each step, `(batch, time)`."""
        return _top_slot(self.write_weights)


def _top_slot(weights: np.ndarray) -> np.ndarray:
    return np.where(weights.any(axis=-1), weights.argmax(axis=-1), -1)


def trace_memory(
    layer: keras.layers.RNN,
    sequences: Any,
    initial_state: list | dict | None = None,
    mask: Tensor = None,
    training: bool = False,
    reset: Tensor = None,
) -> MemoryTrace:
    """Run a memory layer and record which slots it reads and writes.

    Args:
        layer: `ARMIN`, or `keras.layers.RNN` around an `ARMINCell`.
        sequences: Inputs of the layer, `(batch, time, features)`. For a layer
            inside a model, use `keras.Model(model.inputs,
            layer.input)(inputs)`. With a mask that returns a list of inputs
            and mask, which is accepted too.
        initial_state, mask, training, reset: As in a call of `ARMIN`. The
            state of a stateful layer is used but not changed.

    Returns:
        A `MemoryTrace`.

    Notes:
        In a `Sequential` model the inputs of a layer may also be computed by
        calling the layers before it, as in `embedding(tokens)`; the mask comes
        along. While the memory fills, a step may read a slot that is still
        empty.

    Example:

    >>> layer = keras_armin.ARMIN(8, memory_slots=4)
    >>> trace = keras_armin.trace_memory(layer, np.zeros((2, 6, 3), "float32"))
    >>> trace.write_slots[0, :4].tolist()
    [0, 1, 2, 3]
    """
    found = _trace(layer, sequences, initial_state, mask, training, reset)
    if not layer.cell.memory_slots:
        raise TypeError(f"Cell '{layer.cell.name}' has no memory to trace.")
    return MemoryTrace(
        _batch_first(found.read_weights), _batch_first(found.write_weights)
    )


def trace_boundaries(
    layer: keras.layers.RNN,
    sequences: Any,
    initial_state: list | dict | None = None,
    mask: Tensor = None,
    training: bool = False,
    reset: Tensor = None,
) -> np.ndarray:
    """Run an `HMLSTM` and record where its segments end.

    Args:
        layer: `HMLSTM`, or `keras.layers.RNN` around an `HMLSTMCell`.
        sequences, initial_state, mask, training, reset: As for
            `trace_memory`.

    Returns:
        A bool array of shape `(batch, time, levels - 1)`, the first level
        first; True where a segment ends. Masked steps are False.

    Example:

    >>> layer = keras_armin.baselines.HMLSTM(8, levels=3)
    >>> x = np.zeros((2, 6, 3), "float32")
    >>> keras_armin.trace_boundaries(layer, x).shape
    (2, 6, 2)
    """
    if not isinstance(getattr(layer, "cell", None), HMLSTMCell):
        raise TypeError(
            "Argument `layer` must be an `HMLSTM` layer or a "
            f"`keras.layers.RNN` around an `HMLSTMCell`. Received: {layer}"
        )
    found = _trace(layer, sequences, initial_state, mask, training, reset)
    return _batch_first(found.read_weights > 0.5)


def _trace(
    layer: keras.layers.RNN,
    sequences: Any,
    initial_state: list | dict | None,
    mask: Tensor,
    training: bool,
    reset: Tensor,
) -> LoopResult:
    memory_layer = _as_memory_layer(layer)
    if isinstance(sequences, (list, tuple)) and len(sequences) == 2:
        sequences, attached = sequences
        mask = attached if mask is None else mask
    sequences = _as_tensor(sequences)
    if not layer.built:
        layer.build(tuple(sequences.shape))
    return memory_layer._run_loop(
        sequences, initial_state, mask, training, reset, trace=True
    )


def _batch_first(weights: Tensor) -> np.ndarray:
    return np.swapaxes(np.array(ops.convert_to_numpy(weights)), 0, 1)


def _as_tensor(sequences: Any) -> Tensor:
    """Tensors are not converted, so that they keep an attached mask."""
    if keras.ops.is_tensor(sequences):
        return sequences
    return ops.convert_to_tensor(sequences)


def _as_memory_layer(layer: Any) -> MemoryRNN:
    if isinstance(layer, MemoryRNN):
        return layer
    if isinstance(layer, keras.layers.RNN) and isinstance(
        layer.cell, MemoryCell
    ):
        return _wrap(layer)
    advice = ""
    if isinstance(layer, keras.Model):
        advice = (
            ". For a layer of this model, use `trace_memory(layer, "
            "keras.Model(model.inputs, layer.input)(inputs))`."
        )
    raise TypeError(
        "Argument `layer` must be an `ARMIN` layer or a `keras.layers.RNN` "
        f"around an `ARMINCell`. Received: {layer}{advice}"
    )


def _wrap(rnn: keras.layers.RNN) -> MemoryRNN:
    """A `MemoryRNN` around the cell of a `keras.layers.RNN`."""
    wrapped = wrap_cell(rnn.cell, go_backwards=rnn.go_backwards)
    if rnn.stateful and rnn.states is not None:
        wrapped.stateful = True
        wrapped._expected_batch_size = rnn._expected_batch_size
        wrapped.states = rnn.states
    return wrapped


def wrap_cell(cell: MemoryCell, **flags: bool) -> MemoryRNN:
    """A second layer around a cell, which does not affect the first."""
    return MemoryRNN(cell, dtype=cell.dtype_policy, **flags)
