"""The Neural Turing Machine."""

from typing import Any

import keras
import numpy as np

from keras_armin import validation
from keras_armin.backends import ops
from keras_armin.baselines import _heads
from keras_armin.baselines._controlled_cell import ControlledCell
from keras_armin.memory_layer import MemoryLayer
from keras_armin.memory_ops import softmax
from keras_armin.memory_ops import wide_dtype
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# Initial value of the memory: rows of zeros would have no direction.
EMPTY = 1e-6
# Initial logit of trainable head weights: nearly all weight on slot 0.
FIRST_SLOT_LOGIT = 5.0


@keras.saving.register_keras_serializable(package="keras_armin")
class NTMCell(ControlledCell):
    """One step of a Neural Turing Machine with an LSTM as controller.

    From the inputs and what was read last, the LSTM computes `h`; from `h`
    come for each head a key `k`, a strength `beta`, a gate `g`, a shift `s`
    and a sharpness `gamma`, for write heads also `e` and `a`:

        w_c = softmax(beta cos(k, M))
        w_g = g w_c + (1 - g) w
        w~(i) = sum_j w_g(j) s(i - j)
        w' = w~ ** gamma / sum(w~ ** gamma)
        r = w' M
        M' = M (1 - w' e) + w' a
        output = [h, r]

    Heads read before they write. Keys and `a` pass a tanh, and the outputs of
    the LSTM for the heads are clipped to [-20, 20]; the paper specifies
    neither. Sharpness is at most 20. The memory starts at 1e-6, and all heads
    at slot 0.

    Args:
        units: int. Size of the hidden state of the LSTM.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        memory_dim: int. Size of a slot. Defaults to `None`: `units`.
        num_reads: int. Number of read heads. Defaults to `1`.
        num_writes: int. Number of write heads. Defaults to `1`.
        shift_range: int. Largest shift of a head per step, in either
            direction. Defaults to `1`.
        variant: `"published"`, or `"released"` for the code behind the
            figures of the ARMIN paper: heads depend on the cell state divided
            by its norm instead of `h`, nothing is erased,
            `M' = (1 - w') M + w' a`, keys and `a` pass no tanh, weights start
            at zero and the memory at fixed random rows. Its single shift for
            a whole batch, its random first read and its unbounded interface
            are not reproduced. Defaults to `"published"`.
        learn_initial_state: bool. Train the initial state: the output, the
            cell state and the weights of the heads; in the `"released"`
            variant the memory instead of the weights. Defaults to `False`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: Of the LSTM, see `LayerNormLSTMCell`.
            `layer_norm` defaults to `False`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, memory, read_weights, write_weights,
            pointer]`, each flat: `(batch, size)`.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import NTMCell
    >>> cell = NTMCell(8, memory_slots=10, memory_dim=6)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 14)

    Reference:
        - [Graves et al., 2014](https://arxiv.org/abs/1410.5401)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | None = None,
        num_reads: int = 1,
        num_writes: int = 1,
        shift_range: int = 1,
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
        self.num_writes = validation.size("num_writes", num_writes)
        self.shift_range = validation.size("shift_range", shift_range)

    @property
    def num_heads(self) -> int:
        return self.num_reads + self.num_writes

    @property
    def extra_states(self) -> dict[str, int]:
        return {
            "read_weights": self.num_reads * self.memory_slots,
            "write_weights": self.num_writes * self.memory_slots,
        }

    @property
    def interface_sizes(self) -> dict[str, int]:
        sizes = {
            "keys": self.num_heads * self.memory_dim,
            "strengths": self.num_heads,
            "gates": self.num_heads,
            "shifts": self.num_heads * (2 * self.shift_range + 1),
            "sharpness": self.num_heads,
            "add": self.num_writes * self.memory_dim,
        }
        if not self.released:
            sizes["erase"] = self.num_writes * self.memory_dim
        return sizes

    @property
    def trainable_initial_states(self) -> dict[str, tuple]:
        learnt = super().trainable_initial_states
        if self.released:
            learnt["output"] = (np.zeros(self.units), ops.tanh)
            return {**learnt, "memory": (self._random_rows(), ops.sigmoid)}
        # Near slot 0: equal weights on equal rows would have no gradient.
        first = FIRST_SLOT_LOGIT * np.eye(self.memory_slots)[0]
        for name, width in self.extra_states.items():
            start = np.tile(first, width // self.memory_slots)
            learnt[name] = (start, self._softmax_of_heads)
        return learnt

    def _softmax_of_heads(self, numbers: Tensor) -> Tensor:
        rows = ops.reshape(numbers, (-1, self.memory_slots))
        return ops.reshape(softmax(rows), (-1,))

    def _random_rows(self) -> np.ndarray:
        """Different rows: heads cannot distinguish equal ones."""
        size = self.memory_slots * self.memory_dim
        return np.random.RandomState(0).uniform(-1.0, 1.0, size)

    def constant_initial_states(self) -> dict[str, np.ndarray]:
        if self.released:
            return {"memory": 1 / (1 + np.exp(-self._random_rows()))}
        start = {"memory": np.full(self.memory_slots * self.memory_dim, EMPTY)}
        first = np.eye(self.memory_slots)[0]
        for name, width in self.extra_states.items():
            start[name] = np.tile(first, width // self.memory_slots)
        return start

    def head_inputs(self, h: Tensor, c: Tensor) -> Tensor:
        if not self.released:
            return h
        # The sum of squares of a large state does not fit into float16.
        wide = ops.cast(c, wide_dtype(self.compute_dtype))
        return ops.cast(_heads.unit_rows(wide), c.dtype)

    def use_memory(
        self, parts: Tensors, memory: Tensor, extra: Tensors, count: Tensor
    ) -> tuple:
        weights = self._address(parts, memory, extra, count)
        read_weights = weights[:, : self.num_reads]
        write_weights = weights[:, self.num_reads :]
        reads = _heads.read(memory, read_weights)
        add = self._vectors(parts["add"], self.num_writes)
        if self.released:
            erase = ops.ones_like(add)
        else:
            erase = ops.sigmoid(self.per_head(parts["erase"], self.num_writes))
        memory = _heads.erase_and_add(memory, write_weights, erase, add)
        extra = {"read_weights": read_weights, "write_weights": write_weights}
        return (
            reads,
            memory,
            extra,
            ops.mean(read_weights, 1),
            ops.mean(write_weights, 1),
        )

    def _address(
        self, parts: Tensors, memory: Tensor, extra: Tensors, count: Tensor
    ) -> Tensor:
        """New weights of all heads, read heads first: `(batch, k, n)`."""
        parts = {
            name: self.per_head(parts[name], self.num_heads)
            for name in ("keys", "strengths", "gates", "shifts", "sharpness")
        }
        keys = self._vectors(parts["keys"], self.num_heads)
        before = ops.concatenate(
            [
                self.per_head(extra["read_weights"], self.num_reads),
                self.per_head(extra["write_weights"], self.num_writes),
            ],
            axis=1,
        )
        if not self.released:
            before = self._at_first_slot(before, count)
        strengths = ops.softplus(parts["strengths"])
        by_content = _heads.content(_heads.cosine(memory, keys), strengths)
        gate = ops.sigmoid(parts["gates"])
        weights = gate * by_content + (1 - gate) * before
        weights = _heads.shift(weights, ops.softmax(parts["shifts"], -1))
        sharpness = 1 + ops.softplus(parts["sharpness"])
        return _heads.sharpen(
            weights, ops.clip(sharpness, 1.0, _heads.LARGEST_SHARPNESS)
        )

    def _at_first_slot(self, before: Tensor, count: Tensor) -> Tensor:
        """The weights, or slot 0 if they are all zero at the first step.

        `keras.layers.RNN.reset_state` writes zeros, from which heads would
        never find a slot among equal rows.
        """
        nowhere = ops.sum(before, axis=-1)[..., None] == 0
        start = nowhere & (count == 0)[:, None, None]
        first = ops.one_hot(
            ops.zeros_like(count), self.memory_slots, dtype=before.dtype
        )
        return ops.where(start, first[:, None], before)

    def _vectors(self, numbers: Tensor, count: int) -> Tensor:
        if len(numbers.shape) == 2:
            numbers = self.per_head(numbers, count)
        return numbers if self.released else ops.tanh(numbers)


@keras.saving.register_keras_serializable(package="keras_armin")
class NTM(MemoryLayer):
    """A Neural Turing Machine.

    `NTM(...)` has the weights of `keras.layers.RNN(NTMCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples. `NTM.cell` is the cell, which
    holds the weights.

    Args:
        units, memory_slots, memory_dim, num_reads, num_writes, shift_range,
            variant, learn_initial_state, activation, recurrent_activation,
            use_bias, unit_forget_bias, layer_norm, zoneout_cell,
            zoneout_hidden, kernel_initializer, recurrent_initializer,
            bias_initializer, kernel_regularizer, recurrent_regularizer,
            bias_regularizer, kernel_constraint, recurrent_constraint,
            bias_constraint, dropout, recurrent_dropout, seed: See `NTMCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import NTM
    >>> layer = NTM(8, memory_slots=10, memory_dim=6)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 14)

    Reference:
        - [Graves et al., 2014](https://arxiv.org/abs/1410.5401)
    """

    cell: NTMCell
    cell_class = NTMCell
    cell_name = "ntm_cell"
