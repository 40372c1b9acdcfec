"""Sparse access memory."""

from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.backends import ops
from keras_armin.baselines import _heads
from keras_armin.baselines._controlled_cell import ControlledCell
from keras_armin.memory_layer import MemoryLayer
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# A slot with more weight than this counts as accessed.
ACCESSED = 0.005


@keras.saving.register_keras_serializable(package="keras_armin")
class SAMCell(ControlledCell):
    """One step of a sparse access memory with an LSTM as controller.

    From the inputs and what was read last, the LSTM computes `h`, from which
    come for each read head a query `q` and a strength `beta >= 1`, and a
    write vector `v`, a write gate `alpha` and an interpolation gate `gamma`.
    The slot accessed least recently is erased, and the writing goes to it and
    to what was read last, `w_r`, the mean over heads:

        w_w = alpha (gamma w_r + (1 - gamma) oldest)
        M' = (1 - oldest) M + w_w v
        w_r' = softmax(beta cos(q, M')) over the top_k most similar rows
        r = w_r' M',    output = [h, r]

    Only these rows are accessed, in the forward and the backward pass. The
    search is exact. The step of the last access with a weight above 0.005 is
    an integer per slot; empty slots are filled in order, whether they were
    read or not. The choice of rows has no gradient. The inputs of the heads
    are clipped to [-20, 20].

    Args:
        units: int. Size of the hidden state of the LSTM.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        memory_dim: int. Size of a slot. Defaults to `None`: `units`.
        num_reads: int. Number of read heads. Defaults to `1`.
        top_k: int. Rows that a head reads. Defaults to `4`.
        variant: `"published"`, or `"released"` for the code behind the
            figures of the ARMIN paper, as far as it is known: the oldest row
            is read too, and each row that was read, by decreasing weight, has
            its own write gate; similarities are divided by `memory_dim`;
            there is no strength, so that reads are nearly uniform. It has one
            read head. Two faults of that code are not reproduced: its wrong
            record of accesses, and that several rows could be erased at once.
            Defaults to `"published"`.
        learn_initial_state: bool. Train the initial output and cell state.
            Defaults to `False`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: Of the LSTM, see `LayerNormLSTMCell`.
            `layer_norm` defaults to `False`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, memory, read_weights, accessed, pointer]`,
            each flat: `(batch, size)`. `accessed` holds the step after which
            each slot was last accessed, as digits like `pointer`.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import SAMCell
    >>> cell = SAMCell(8, memory_slots=10, memory_dim=6)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 14)

    Reference:
        - [Rae et al., 2016](https://arxiv.org/abs/1610.09027)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | None = None,
        num_reads: int = 1,
        top_k: int = 4,
        variant: str = "published",
        learn_initial_state: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            units,
            memory_slots=memory_slots,
            memory_dim=memory_dim,
            num_reads=num_reads,
            variant=variant,
            learn_initial_state=learn_initial_state,
            **kwargs,
        )
        self.top_k = validation.size("top_k", top_k)
        if self.released and self.num_reads > 1:
            raise ValueError(
                "Argument `num_reads` must be 1 with variant='released'. "
                f"Received: num_reads={num_reads}"
            )

    @property
    def neighbours(self) -> int:
        return min(self.top_k, self.memory_slots)

    @property
    def rows_seen(self) -> int:
        """Rows read in the released variant: the nearest and the oldest."""
        return min(self.top_k + 1, self.memory_slots)

    @property
    def extra_states(self) -> dict[str, int]:
        n = self.memory_slots
        return {
            "read_weights": self.num_reads * n,
            "accessed": n * memory_ops.POINTER_DIGITS,
        }

    @property
    def interface_sizes(self) -> dict[str, int]:
        width, sizes = self.memory_dim, {}
        sizes["queries"] = self.num_reads * width
        if not self.released:
            sizes["strengths"] = self.num_reads
        sizes["write"] = width
        sizes["interpolation"] = self.rows_seen if self.released else 1
        sizes["write_gate"] = 1
        return sizes

    def use_memory(
        self, parts: Tensors, memory: Tensor, extra: Tensors, count: Tensor
    ) -> tuple:
        w_r = self.per_head(extra["read_weights"], self.num_reads)
        accessed = memory_ops.pointer_to_count(
            self.per_head(extra["accessed"], self.memory_slots)
        )
        oldest = ops.one_hot(
            ops.argmin(accessed, -1), self.memory_slots, dtype=memory.dtype
        )
        w_w = self._write_weights(parts, w_r, oldest)
        memory = memory * ops.expand_dims(1 - oldest, -1) + (
            ops.expand_dims(w_w, -1) * ops.expand_dims(parts["write"], 1)
        )
        w_r = self._read_weights(parts, memory, oldest)
        now = ops.expand_dims(memory_ops.increment(count), -1)
        touched = ops.sum(w_r, axis=1) + w_w > ACCESSED
        # Reading an empty row does not count: it would never be filled.
        touched = touched & ((accessed > 0) | (w_w > ACCESSED))
        accessed = ops.where(touched, now, accessed)
        extra = {
            "read_weights": w_r,
            "accessed": memory_ops.count_to_pointer(accessed, memory.dtype),
        }
        return _heads.read(memory, w_r), memory, extra, ops.mean(w_r, 1), w_w

    def _write_weights(
        self, parts: Tensors, w_r: Tensor, oldest: Tensor
    ) -> Tensor:
        gate = ops.sigmoid(parts["interpolation"])
        w_r = ops.mean(w_r, axis=1)
        if self.released:
            gate = self._gate_of_rows(gate, w_r)
        where = gate * w_r + (1 - gate) * oldest
        return ops.sigmoid(parts["write_gate"]) * where

    def _gate_of_rows(self, gates: Tensor, w_r: Tensor) -> Tensor:
        """The gates `(batch, rows_seen)` at the rows read: `(batch, n)`."""
        rows = _heads.largest(w_r, self.rows_seen)
        rows = ops.one_hot(rows, self.memory_slots, dtype=gates.dtype)
        return ops.matmul(ops.expand_dims(gates, 1), rows)[:, 0]

    def _read_weights(
        self, parts: Tensors, memory: Tensor, oldest: Tensor
    ) -> Tensor:
        queries = self.per_head(parts["queries"], self.num_reads)
        similarities = _heads.cosine(memory, queries)
        if not self.released:
            strengths = self.per_head(parts["strengths"], self.num_reads)
            return _heads.nearest(
                similarities, _heads.one_plus(strengths), self.neighbours
            )
        # The oldest row is read in addition to the nearest others.
        seen = _heads.nearest(
            ops.where(oldest[:, None] > 0, _heads.NEVER, similarities),
            1.0,
            self.neighbours,
        )
        seen = (seen > 0) | (oldest[:, None] > 0)
        scores = ops.where(seen, similarities / self.memory_dim, _heads.NEVER)
        return memory_ops.softmax(scores)


@keras.saving.register_keras_serializable(package="keras_armin")
class SAM(MemoryLayer):
    """A recurrent network with a sparse access memory.

    `SAM(...)` has the weights of `keras.layers.RNN(SAMCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples. `SAM.cell` is the cell, which
    holds the weights.

    Args:
        units, memory_slots, memory_dim, num_reads, top_k, variant,
            learn_initial_state, activation, recurrent_activation, use_bias,
            unit_forget_bias, layer_norm, zoneout_cell, zoneout_hidden,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint,
            dropout, recurrent_dropout, seed: See `SAMCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import SAM
    >>> layer = SAM(8, memory_slots=10, memory_dim=6)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 14)

    Reference:
        - [Rae et al., 2016](https://arxiv.org/abs/1610.09027)
    """

    cell: SAMCell
    cell_class = SAMCell
    cell_name = "sam_cell"
