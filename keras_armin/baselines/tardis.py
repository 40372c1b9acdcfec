"""TARDIS: temporal automatic relation discovery in sequences."""

from typing import Any

import keras
import numpy as np

from keras_armin import memory_ops
from keras_armin import noise
from keras_armin import validation
from keras_armin.armin_cell import ADDRESSING
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import prepare_inputs
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.baselines._controlled_cell import VARIANTS
from keras_armin.baselines._lstm_driven_cell import LSTMDrivenCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.baselines._tardis_addressing import TARDISAddressing
from keras_armin.initial_states import InitialStates
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# Fixed by the publication.
SWITCH_TEMPERATURE = 0.3


@keras.saving.register_keras_serializable(package="keras_armin")
class TARDISCell(InitialStates, TARDISAddressing, LSTMDrivenCell):
    """One step of TARDIS.

    A slot holds a fixed random key and a value. One slot is read, enters an
    LSTM through two switches, and is then overwritten; the first
    `memory_slots` steps fill the slots in order.

        logit_i = a tanh(W [x, h, key_i, M_i, u] + b)
        s = gumbel_softmax(logits, less 100 where the last read was)
        r = s [key, M]
        alpha, beta = gumbel_sigmoid(W [x, h, r] + b)
        i, f, o = sigma(W [x, h, r] + b)
        j = tanh(W [x, beta h, alpha r] + b)
        c' = f c + i j,    h' = o tanh(c')
        M'[slot] = W h' + b
        output = [h', r]

    `u` is how often each slot has been read, with mean 0 and variance 1. It
    and the last read have no gradient. At inference there is no noise: the
    slot with the largest score is read, and a switch is the sigmoid of its
    logit divided by 0.3.

    Args:
        units: int. Size of the hidden state.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        memory_dim: int. Size of what is written. Defaults to `None`: `units`.
        key_dim: int. Size of the key of a slot. Defaults to `16`.
        address_units: int. Width of the network that computes the logits.
            Defaults to `None`: a quarter of `units`.
        addressing: `"hard"`, `"relaxed"` or `"soft"`, see `ARMINCell`.
            Defaults to `"hard"`.
        temperature: float. Divides the logits and their noise, see
            `ARMINCell`. Defaults to `1.0`.
        variant: `"published"`, or `"released"` for the code behind the
            algorithmic results of the ARMIN paper: the logits depend on the
            cell state instead of `h`, keys are trained and not read, `u` is
            divided by its norm, and so are the logits after 100 is
            subtracted, which leaves all others near zero and the choice
            nearly random; `x` is written too. Two faults of that code are not
            reproduced: a hundredfold gradient through the last read, and
            one-sided noise of the switches. Defaults to `"published"`.
        learn_initial_state: bool. Train the hidden state, the cell state and
            the memory that a sequence starts with. Defaults to `False`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: Of the LSTM, see `LayerNormLSTMCell`.
            `layer_norm` defaults to `False`, and also normalises the logits,
            before 100 is subtracted.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, memory, usage, last_read, pointer]`, each
            flat: `(batch, size)`. `usage` and `last_read` hold how often each
            slot was read, and one plus the slot read last, as digits like
            `pointer`.
        training: bool. Whether to apply noise, dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import TARDISCell
    >>> cell = TARDISCell(8, memory_slots=4, key_dim=3)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 19)

    Reference:
        - [Gulcehre et al., 2017](https://arxiv.org/abs/1701.08718)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | None = None,
        key_dim: int = 16,
        address_units: int | None = None,
        addressing: str = "hard",
        temperature: float = 1.0,
        variant: str = "published",
        learn_initial_state: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        self.memory_slots = validation.size("memory_slots", memory_slots)
        self.memory_dim = validation.size_or_default(
            "memory_dim", memory_dim, self.units
        )
        self.set_addressing(key_dim, address_units)
        self.addressing = validation.choice(
            "addressing", addressing, ADDRESSING
        )
        self.initial_temperature = validation.cell_scalar(
            "temperature", temperature, validation.positive
        )
        self.variant = validation.choice("variant", variant, VARIANTS)
        self.learn_initial_state = validation.flag(
            "learn_initial_state", learn_initial_state
        )
        read = self.memory_dim + self.key_dim * (not self.released)
        self.feedback_size = read
        self.output_size = self.units + read
        self.temperature = None

    @property
    def released(self) -> bool:
        return self.variant == "released"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("output", "c", "memory", *self.address_states, "pointer")

    @property
    def state_size(self) -> list[int]:
        return [
            self.output_size,
            self.units,
            self.memory_slots * self.memory_dim,
            *self.address_states.values(),
            memory_ops.POINTER_DIGITS,
        ]

    # --- weights ------------------------------------------------------------

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_lstm()
        self._build_pair("address", self.units, [self.address_units])
        self._build_pair("switch", self.recurrent_width, [1, 1])
        self.build_addressing(learn_keys=self.released)
        self.write_kernel = self.add_kernel(
            "write_kernel",
            "kernel",
            self.units + self.input_dim * self.released,
            [self.memory_dim],
        )
        if self.use_bias:
            self.write_bias = self.add_bias(
                "write_bias", [(self.memory_dim, self.bias_initializer)]
            )
        self.build_initial_state()
        self.temperature = self.add_scalar(
            "temperature", self.initial_temperature
        )
        self.built = True

    def _build_pair(self, name: str, carried: int, sizes: list[int]) -> None:
        """Kernels of the inputs and of the recurrence, and their bias."""
        weights = {
            f"{name}_kernel": ("kernel", self.input_dim),
            f"{name}_recurrent_kernel": ("recurrent", carried),
        }
        for weight, (kind, rows) in weights.items():
            setattr(self, weight, self.add_kernel(weight, kind, rows, sizes))
        if self.use_bias:
            bias = [(size, self.bias_initializer) for size in sizes]
            setattr(self, f"{name}_bias", self.add_bias(f"{name}_bias", bias))

    @property
    def trainable_initial_states(self) -> dict[str, tuple]:
        return {
            "output": (np.zeros(self.units), ops.tanh),
            "c": (np.zeros(self.units), ops.tanh),
            "memory": (
                np.zeros(self.memory_slots * self.memory_dim),
                lambda x: x,
            ),
        }

    # --- randomness ---------------------------------------------------------

    @property
    def needs_gumbel(self) -> bool:
        return self.addressing != "soft"

    @property
    def step_draws(self) -> int:
        return super().step_draws + int(self.needs_gumbel) + 1

    def draw_step_noise(self, leading: tuple, seeds: list) -> StepNoise:
        *seeds, switches = seeds
        gumbel = None
        if self.needs_gumbel:
            *seeds, seed = seeds
            gumbel = noise.gumbel((*leading, self.memory_slots), seed)
        return (
            super()
            .draw_step_noise(leading, seeds)
            ._replace(
                gumbel=gumbel, switches=noise.logistic((*leading, 2), switches)
            )
        )

    # --- equations ----------------------------------------------------------

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        projected = super().project(weights, inputs, sequence_noise)
        inputs = prepare_inputs(inputs, sequence_noise)
        for name in ("address", "switch"):
            projected[name] = affine(
                inputs, weights[f"{name}_kernel"], weights.get(f"{name}_bias")
            )
        if self.released:
            projected["write"] = ops.matmul(
                inputs, weights["write_kernel"][: self.input_dim]
            )
        return projected

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        output, c, flat, usage, last_read, pointer = states
        h = output[:, : self.units]
        shape = (-1, self.memory_slots, self.memory_dim)
        memory = ops.reshape(flat, shape)
        state = c if self.released else h
        logits = self.address_logits(
            weights,
            projected["address"],
            ops.matmul(state, weights["address_recurrent_kernel"]),
            memory,
            usage,
            last_read,
        )
        scores = self.apply_temperature(logits, step_noise.gumbel, weights)
        address = memory_ops.address(scores, self.addressing, training)
        r = self._read(weights, memory, address)
        h, c = self.lstm(
            weights,
            projected,
            ops.concatenate([h, r], axis=-1),
            c,
            step_noise,
            sequence_noise,
            training,
        )
        memory, written = self._write(
            memory, address, pointer, self._value(weights, projected, h)
        )
        read = address.slot if address.weights is None else address.weights
        new = [
            ops.concatenate([h, r], axis=-1),
            c,
            ops.reshape(memory, (-1, self.memory_slots * self.memory_dim)),
            *self.record_read(read, usage),
            count_step(pointer),
        ]
        return CellResult(new, read, written)

    def _read(
        self, weights: Tensors, memory: Tensor, address: memory_ops.Address
    ) -> Tensor:
        read = memory_ops.read(memory, address)
        if self.released:
            return read
        keys = weights["address_keys"]
        chosen = address.weights
        if chosen is None:
            chosen = memory_ops.straight_through_one_hot(
                address.scores, address.slot
            )
        key = ops.matmul(ops.cast(chosen, keys.dtype), keys)
        return ops.concatenate([key, read], axis=-1)

    def gates(
        self,
        weights: Tensors,
        projected: Tensors,
        entering: Tensor,
        step_noise: StepNoise,
    ) -> Tensor:
        logits = addmm(
            projected["switch"], entering, weights["switch_recurrent_kernel"]
        )
        wide = memory_ops.wide_dtype(self.compute_dtype)
        logits = ops.cast(logits, wide)
        if step_noise.switches is not None:
            logits = logits + ops.cast(step_noise.switches, wide)
        switches = ops.sigmoid(logits / SWITCH_TEMPERATURE)
        switches = ops.cast(switches, entering.dtype)
        u = self.units
        switched = ops.concatenate(
            [
                entering[:, :u] * switches[:, :1],
                entering[:, u:] * switches[:, 1:],
            ],
            axis=-1,
        )
        x, kernel = projected["gates"], weights["recurrent_kernel"]
        return ops.concatenate(
            [
                addmm(x[:, : 3 * u], entering, kernel[:, : 3 * u]),
                addmm(x[:, 3 * u :], switched, kernel[:, 3 * u :]),
            ],
            axis=-1,
        )

    def _value(self, weights: Tensors, projected: Tensors, h: Tensor) -> Tensor:
        rows = weights["write_kernel"][-self.units :]
        value = affine(h, rows, weights.get("write_bias"))
        return value + projected["write"] if self.released else value

    def _write(
        self,
        memory: Tensor,
        address: memory_ops.Address,
        pointer: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = memory_ops.pointer_to_count(pointer)
        if address.slot is None:
            weights = memory_ops.soft_write_weights(count, address.weights)
            return memory_ops.blend(memory, weights, value), weights
        slot = memory_ops.write_slot(count, address.slot, self.memory_slots)
        return memory_ops.overwrite(memory, slot, value), slot

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["temperature"] = self.initial_temperature
        return config


@keras.saving.register_keras_serializable(package="keras_armin")
class TARDIS(MemoryLayer):
    """A recurrent network with the memory of TARDIS.

    `TARDIS(...)` has the weights of `keras.layers.RNN(TARDISCell(...))` and,
    without noise, computes the same numbers. In addition it carries its state
    on every backend if `stateful`, and can reset individual samples.
    `TARDIS.cell` is the cell, which holds the weights.

    Args:
        units, memory_slots, memory_dim, key_dim, address_units, addressing,
            temperature, variant, learn_initial_state, activation,
            recurrent_activation, use_bias, unit_forget_bias, layer_norm,
            zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `TARDISCell`. `temperature` may be a
            schedule, as for `ARMIN`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import TARDIS
    >>> layer = TARDIS(8, memory_slots=4, key_dim=3)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 19)

    Reference:
        - [Gulcehre et al., 2017](https://arxiv.org/abs/1701.08718)
    """

    cell: TARDISCell
    cell_class = TARDISCell
    cell_name = "tardis_cell"
