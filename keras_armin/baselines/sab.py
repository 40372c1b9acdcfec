"""Sparse attentive backtracking."""

from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.backends import ops
from keras_armin.baselines import _heads
from keras_armin.baselines._lstm_driven_cell import LSTMDrivenCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors


@keras.saving.register_keras_serializable(package="keras_armin")
class SABCell(LSTMDrivenCell):
    """One step of an LSTM with sparse attentive backtracking.

    Every `store_every` steps the state is stored in one of `memory_slots`
    slots, replacing the oldest when all are full. Every `truncate_every` steps
    the gradient through the state of the LSTM is truncated. Stored states
    always have a gradient: it reaches far back through the few that are
    recalled.

        h~, c' = LSTM(x, h, c)
        score_i = a tanh(W [h~, m_i] + b)
        w_i = max(score_i - the (top_k + 1)-th largest score, 0), to sum 1
        s = sum w_i m_i
        h' = h~ + s
        output = [h', s]

    A row of zeros, which is never replaced, competes with the stored states;
    with fewer rows than `top_k + 1` the smallest score is subtracted.

    Args:
        units: int. Size of the hidden state.
        memory_slots: int. Number of states that are kept. Defaults to `20`.
        top_k: int. States that are recalled at a step. Defaults to `5`.
        store_every: int. Interval between stored states, in steps. Defaults to
            `1`.
        truncate_every: int. Interval of truncation, in steps. Defaults to
            `10`.
        address_units: int. Width of the network that computes the scores.
            Defaults to `None`: a quarter of `units`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: Of the LSTM, see `LayerNormLSTMCell`.
            `layer_norm` defaults to `False`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, memory, pointer]`, each flat:
            `(batch, size)`. `pointer` counts steps; a row of `memory` is a
            state and what the scores need of it.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import SABCell
    >>> cell = SABCell(8)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 16)

    Reference:
        - [Ke et al., 2018](https://arxiv.org/abs/1809.03702)
    """

    state_names = ("output", "c", "memory", "pointer")

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        top_k: int = 5,
        store_every: int = 1,
        truncate_every: int = 10,
        address_units: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        self.memory_slots = validation.size("memory_slots", memory_slots)
        self.top_k = validation.size("top_k", top_k)
        self.store_every = validation.size("store_every", store_every)
        self.truncate_every = validation.size("truncate_every", truncate_every)
        self.address_units = validation.size_or_default(
            "address_units", address_units, max(1, self.units // 4)
        )
        self.memory_dim = self.units + self.address_units
        self.output_size = 2 * self.units
        self.state_size = [
            self.output_size,
            self.units,
            self.memory_slots * self.memory_dim,
            memory_ops.POINTER_DIGITS,
        ]

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_lstm()
        for name in ("query_kernel", "key_kernel"):
            kernel = self.add_kernel(
                name, "kernel", self.units, [self.address_units]
            )
            setattr(self, name, kernel)
        if self.use_bias:
            self.query_bias = self.add_bias(
                "query_bias", [(self.address_units, self.bias_initializer)]
            )
        self.address_vector = self.add_kernel(
            "address_vector", "kernel", self.address_units, [1]
        )
        self.built = True

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        output, c, flat, pointer = states
        count = memory_ops.pointer_to_count(pointer)
        cut = ops.expand_dims(ops.mod(count, self.truncate_every) == 0, -1)
        h = output[:, : self.units]
        h, c = (ops.where(cut, ops.stop_gradient(x), x) for x in (h, c))
        h, c = self.lstm(
            weights, projected, h, c, step_noise, sequence_noise, training
        )
        rows = ops.reshape(flat, (-1, self.memory_slots, self.memory_dim))
        recall = self._recall_weights(weights, rows, h, count)
        recalled = ops.matmul(
            ops.expand_dims(ops.cast(recall, h.dtype), 1),
            rows[..., : self.units],
        )[:, 0]
        h = clip_gradient(h + recalled)
        rows, written = self._store(weights, rows, h, count)
        new = [
            ops.concatenate([h, recalled], axis=-1),
            c,
            ops.reshape(rows, (-1, self.memory_slots * self.memory_dim)),
            count_step(pointer),
        ]
        return CellResult(new, recall, written)

    def stored(self, count: Tensor) -> Tensor:
        """How many states were stored in the first `count` steps."""
        return ops.floor_divide(count + self.store_every - 1, self.store_every)

    def _recall_weights(
        self, weights: Tensors, rows: Tensor, h: Tensor, count: Tensor
    ) -> Tensor:
        wide = memory_ops.wide_dtype(self.compute_dtype)
        query = affine(h, weights["query_kernel"], weights.get("query_bias"))
        keys = rows[..., self.units :]
        # The row of zeros has a key of zeros.
        keys = ops.concatenate([ops.zeros_like(keys[:, :1]), keys], axis=1)
        hidden = ops.tanh(
            ops.cast(ops.expand_dims(query, 1), wide) + ops.cast(keys, wide)
        )
        vector = ops.cast(weights["address_vector"], wide)
        scores = ops.matmul(hidden, vector)[..., 0]
        place = ops.arange(self.memory_slots + 1, dtype="int32")
        filled = place <= ops.expand_dims(self.stored(count), -1)
        return sparse_weights(scores, filled, self.top_k)[:, 1:]

    def _store(
        self, weights: Tensors, rows: Tensor, h: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store `h` if it is due; the new rows, and the write weights."""
        row = ops.concatenate([h, ops.matmul(h, weights["key_kernel"])], -1)
        slot = ops.mod(self.stored(count), self.memory_slots)
        turn = ops.expand_dims(ops.mod(count, self.store_every) == 0, -1)
        row = ops.where(turn, row, memory_ops.row(rows, slot))
        written = ops.one_hot(slot, self.memory_slots, dtype="float32")
        written = written * ops.cast(turn, "float32")
        return memory_ops.overwrite(rows, slot, row), written


def sparse_weights(scores: Tensor, filled: Tensor, top_k: int) -> Tensor:
    """Weights of the `top_k` best of `filled` `(batch, n)`, with a sum of 1.

    If all scores are equal, the weights are 0.
    """
    scores = ops.where(filled, scores, _heads.NEVER)
    count = min(top_k + 1, scores.shape[-1])
    best, _ = ops.top_k(scores, count)
    # The smallest score among them that is filled.
    floor = ops.where(best > _heads.NEVER / 2, best, -_heads.NEVER)
    floor = -ops.top_k(-floor, 1)[0]
    above = ops.where(filled, ops.relu(scores - floor), 0.0)
    total = ops.expand_dims(ops.sum(above, axis=-1), -1)
    return above / (total + 1e-8)


@keras.saving.register_keras_serializable(package="keras_armin")
class SAB(MemoryLayer):
    """An LSTM with sparse attentive backtracking.

    `SAB(...)` has the weights of `keras.layers.RNN(SABCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples. `SAB.cell` is the cell, which
    holds the weights.

    Args:
        units, memory_slots, top_k, store_every, truncate_every,
            address_units, activation, recurrent_activation, use_bias,
            unit_forget_bias, layer_norm, zoneout_cell, zoneout_hidden,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint,
            dropout, recurrent_dropout, seed: See `SABCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import SAB
    >>> layer = SAB(8)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 16)

    Reference:
        - [Ke et al., 2018](https://arxiv.org/abs/1809.03702)
    """

    cell: SABCell
    cell_class = SABCell
    cell_name = "sab_cell"
