"""The Differentiable Neural Computer."""

from typing import Any

import keras

from keras_armin.backends import ops
from keras_armin.baselines import _heads
from keras_armin.baselines._controlled_cell import ControlledCell
from keras_armin.memory_layer import MemoryLayer
from keras_armin.memory_ops import softmax
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# A usage of zero has no logarithm; same margin as in the published code.
SMALLEST_USAGE = 1e-6
MODES = 3


@keras.saving.register_keras_serializable(package="keras_armin")
class DNCCell(ControlledCell):
    """One step of a Differentiable Neural Computer with an LSTM controller.

    From the inputs and the last reads, the LSTM computes `h`, and `h`
    determines the interface: keys, strengths of at least 1, an erase and a
    write vector, free gates `f`, an allocation and a write gate, and three
    modes for each read head. With `w_r` and `w_w` the weights of the last step:

        u' = (u + w_w - u w_w) prod(1 - f w_r)              usage
        a = (1 - u'_i) prod(u'_j over slots j less used than i)
        w_w' = g_w (g_a a + (1 - g_a) content(M, k_w))
        M' = M (1 - w_w' e) + w_w' v
        L'_ij = (1 - w_w'_i - w_w'_j) L_ij + w_w'_i p_j,    L'_ii = 0
        p' = (1 - sum(w_w')) p + w_w'
        w_r' = m_1 L'^T w_r + m_2 L' w_r + m_3 content(M', k_r)
        r = w_r' M',    output = [h, r]

    The usage has no gradient with respect to `w_w`, nor with respect to the
    order of the slots, as in the authors' code. The interface is clipped to
    [-20, 20]; they clip the LSTM.

    Args:
        units: int. Size of the hidden state of the LSTM.
        memory_slots: int. Number of vectors in memory. The size of the state
            is quadratic in it. Defaults to `20`.
        memory_dim: int. Size of a slot. Defaults to `None`: `units`.
        num_reads: int. Number of read heads. Defaults to `1`.
        variant: `"published"`, or `"released"` for the code behind the
            figures of the ARMIN paper: modes are a softmax over heads, so
            that the sum of the read weights grows; similarities are divided
            by `memory_dim`; strengths are at least 0; keys and the write
            vector pass a tanh; the usage has a gradient. Defaults to
            `"published"`.
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
        states: List `[output, c, memory, usage, precedence, link,
            read_weights, write_weights, pointer]`, each flat:
            `(batch, size)`.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import DNCCell
    >>> cell = DNCCell(8, memory_slots=10, memory_dim=6, num_reads=2)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 20)

    Reference:
        - [Graves et al., 2016](https://doi.org/10.1038/nature20101)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | None = None,
        num_reads: int = 1,
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

    @property
    def extra_states(self) -> dict[str, int]:
        n = self.memory_slots
        return {
            "usage": n,
            "precedence": n,
            "link": n * n,
            "read_weights": self.num_reads * n,
            "write_weights": n,
        }

    @property
    def interface_sizes(self) -> dict[str, int]:
        reads, width = self.num_reads, self.memory_dim
        return {
            "read_keys": reads * width,
            "read_strengths": reads,
            "write_key": width,
            "write_strength": 1,
            "erase": width,
            "write": width,
            "free": reads,
            "allocation": 1,
            "write_gate": 1,
            "modes": MODES * reads,
        }

    def use_memory(
        self, parts: Tensors, memory: Tensor, extra: Tensors, count: Tensor
    ) -> tuple:
        w_r = self.per_head(extra["read_weights"], self.num_reads)
        w_w, link = extra["write_weights"], self._square(extra["link"])
        if not self.released:
            w_w = ops.stop_gradient(w_w)
        used = usage(extra["usage"], w_w, w_r, ops.sigmoid(parts["free"]))
        w_w = self._write_weights(parts, memory, used)
        memory = _heads.erase_and_add(
            memory,
            w_w[:, None],
            ops.sigmoid(parts["erase"])[:, None],
            self._vector(parts["write"])[:, None],
        )
        link = linked(link, w_w, extra["precedence"])
        w_r = self._read_weights(parts, memory, link, w_r)
        extra = {
            "usage": used,
            "precedence": preceded(extra["precedence"], w_w),
            "link": link,
            "read_weights": w_r,
            "write_weights": w_w,
        }
        return _heads.read(memory, w_r), memory, extra, ops.mean(w_r, 1), w_w

    def _write_weights(
        self, parts: Tensors, memory: Tensor, used: Tensor
    ) -> Tensor:
        by_content = self._content(
            memory, parts["write_key"][:, None], parts["write_strength"]
        )[:, 0]
        gate = ops.sigmoid(parts["allocation"])
        where = gate * allocation(used) + (1 - gate) * by_content
        return ops.sigmoid(parts["write_gate"]) * where

    def _read_weights(
        self, parts: Tensors, memory: Tensor, link: Tensor, w_r: Tensor
    ) -> Tensor:
        keys = self.per_head(parts["read_keys"], self.num_reads)
        by_content = self._content(memory, keys, parts["read_strengths"])
        # Rows of w_r are heads: w L^T is forward, w L is backward.
        forward = ops.matmul(w_r, ops.swapaxes(link, 1, 2))
        backward = ops.matmul(w_r, link)
        modes = self.per_head(parts["modes"], self.num_reads)
        modes = softmax(modes) if not self.released else _over_heads(modes)
        return (
            modes[..., 0:1] * backward
            + modes[..., 1:2] * forward
            + modes[..., 2:3] * by_content
        )

    def _content(
        self, memory: Tensor, keys: Tensor, strengths: Tensor
    ) -> Tensor:
        strengths = ops.expand_dims(strengths, -1)
        similarities = _heads.cosine(memory, self._vector(keys))
        if self.released:
            strengths = ops.softplus(strengths)
            return _heads.content(similarities / self.memory_dim, strengths)
        return _heads.content(similarities, _heads.one_plus(strengths))

    def _vector(self, numbers: Tensor) -> Tensor:
        return ops.tanh(numbers) if self.released else numbers

    def _square(self, flat: Tensor) -> Tensor:
        return ops.reshape(flat, (-1, self.memory_slots, self.memory_slots))


def usage(before: Tensor, w_w: Tensor, w_r: Tensor, free: Tensor) -> Tensor:
    """How far each slot `(batch, n)` is in use, between 0 and 1."""
    used = before + w_w - before * w_w
    freed = 1 - ops.expand_dims(free, -1) * w_r
    for head in range(w_r.shape[1]):
        used = used * freed[:, head]
    return ops.clip(used, 0.0, 1.0)


def allocation(used: Tensor) -> Tensor:
    """Allocation weights `(batch, n)` of the least used slots.

    In the order of usage, a slot gets the fraction `1 - u` of what the slots
    before it left. The product over them is a sum of logarithms, computed with
    a matrix of which slots precede which: at these sizes faster than sorting,
    and with a correct gradient at a usage of zero on every backend.
    """
    used = SMALLEST_USAGE + (1 - SMALLEST_USAGE) * used
    of_slot = ops.expand_dims(used, 2)
    of_other = ops.expand_dims(used, 1)
    n = used.shape[-1]
    index = ops.arange(n, dtype="int32")
    lower = ops.expand_dims(index, 0) < ops.expand_dims(index, 1)
    first = (of_other < of_slot) | ((of_other == of_slot) & lower)
    first = ops.stop_gradient(ops.cast(first, used.dtype))
    left_over = ops.matmul(first, ops.expand_dims(ops.log(used), -1))[..., 0]
    return (1 - used) * ops.exp(left_over)


def linked(link: Tensor, w_w: Tensor, precedence: Tensor) -> Tensor:
    """`link[i, j]`: how far slot i was written right after slot j."""
    to, of = ops.expand_dims(w_w, 2), ops.expand_dims(w_w, 1)
    kept = ops.clip(1 - to - of, 0.0, 1.0) * link
    n = w_w.shape[-1]
    index = ops.arange(n, dtype="int32")
    elsewhere = ops.expand_dims(index, 0) != ops.expand_dims(index, 1)
    new = kept + to * ops.expand_dims(precedence, 1)
    return new * ops.cast(elsewhere, link.dtype)


def preceded(precedence: Tensor, w_w: Tensor) -> Tensor:
    """How far each slot was the last one written to."""
    left = 1 - ops.expand_dims(ops.sum(w_w, axis=-1), -1)
    return ops.clip(left, 0.0, 1.0) * precedence + w_w


def _over_heads(modes: Tensor) -> Tensor:
    """As in the released code: with one head all modes are 1."""
    if modes.shape[1] == 1:
        return ops.ones_like(modes)
    return ops.softmax(modes, 1)


@keras.saving.register_keras_serializable(package="keras_armin")
class DNC(MemoryLayer):
    """A Differentiable Neural Computer.

    `DNC(...)` has the weights of `keras.layers.RNN(DNCCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples. `DNC.cell` is the cell, which
    holds the weights.

    Args:
        units, memory_slots, memory_dim, num_reads, variant,
            learn_initial_state, activation, recurrent_activation, use_bias,
            unit_forget_bias, layer_norm, zoneout_cell, zoneout_hidden,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint,
            dropout, recurrent_dropout, seed: See `DNCCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import DNC
    >>> layer = DNC(8, memory_slots=10, memory_dim=6)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 14)

    Reference:
        - [Graves et al., 2016](https://doi.org/10.1038/nature20101)
    """

    cell: DNCCell
    cell_class = DNCCell
    cell_name = "dnc_cell"
