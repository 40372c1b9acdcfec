"""The LSTM whose kernels a smaller LSTM scales."""

from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import prepare_inputs
from keras_armin.armin_equations import times
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.baselines._lstm_driven_cell import LSTMDrivenCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors

GATES = 4
# What the hyper network gives each gate: scales of the rows of the recurrent
# and of the input kernel, and a bias.
PARTS = ("recurrent", "input", "bias")
FIRST_SCALE = 0.1


@keras.saving.register_keras_serializable(package="keras_armin")
class HyperLSTMCell(LSTMDrivenCell):
    """One step of an LSTM whose kernels a smaller LSTM scales.

        h^, c^ = LSTM([x, h], h^, c^), the hyper network
        z_h, z_x = W h^ + w, z_b = W h^, of each gate
        d_h, d_x = V z_h, V z_x, b = V z_b + b_0, of each gate
        [i, f, o, j] = LN(d_h * (W_h h) + d_x * (W_x x) + b)
        c' = sigma(f) * c + sigma(i) * tanh(j)
        h' = sigma(o) * tanh(LN(c'))

    With `d_h = d_x = 1` and `b = b_0` this is `LayerNormLSTMCell`. The state is
    `c'` itself, not its normalisation. As published, V starts at 0.1 divided
    by the size of z, and w at 1. W and the V of b, which start at 0 in part,
    are drawn from a normal distribution of width 0.01 instead: the hyper
    network would have no gradient in the first update.
    Zoneout is applied to the main network. Recurrent dropout is applied to h,
    which enters both networks with the same mask, and not to h^.

    Args:
        units: int. Size of the hidden state, which is the output, and of the
            cell state.
        hyper_units: int. The same of the hyper network. Defaults to `128`.
        embedding_units: int. Size of a z. Defaults to `4`.
        layer_norm: bool. For both networks. Defaults to `True`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `LayerNormLSTMCell`. W and V have the
            regularizer and constraint of kernels.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, hyper, hyper_c, pointer]`; `pointer` counts
            steps.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import HyperLSTMCell
    >>> rnn = keras.layers.RNN(HyperLSTMCell(8, hyper_units=4))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Ha et al., 2016](https://arxiv.org/abs/1609.09106)
    """

    state_names = ("output", "c", "hyper", "hyper_c", "pointer")

    def __init__(
        self,
        units: int,
        hyper_units: int = 128,
        embedding_units: int = 4,
        layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, layer_norm=layer_norm, **kwargs)
        self.hyper_units = validation.size("hyper_units", hyper_units)
        self.embedding_units = validation.size(
            "embedding_units", embedding_units
        )
        self.output_size = self.units
        self.state_size = [
            self.units,
            self.units,
            self.hyper_units,
            self.hyper_units,
            memory_ops.POINTER_DIGITS,
        ]

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        n = self.hyper_units
        self.build_lstm()
        # The rows of h come after those of the hyper network itself.
        self.build_lstm("hyper_", recurrent=n + self.units, units=n)
        self._build_scales()
        self.built = True

    def _build_scales(self) -> None:
        z, width = self.embedding_units, GATES * self.units
        normal = keras.initializers.RandomNormal(stddev=0.01)
        first = keras.initializers.Constant(FIRST_SCALE / z)
        for part in PARTS:
            is_bias = part == "bias"
            added = {
                "embedding_kernel": self._add_blocks(
                    f"{part}_embedding_kernel",
                    "kernel",
                    (self.hyper_units, GATES * z),
                    [(GATES * z, normal)],
                ),
                "scale_kernel": self._add_blocks(
                    f"{part}_scale_kernel",
                    "kernel",
                    (z, width),
                    [(width, normal if is_bias else first)],
                ),
            }
            if not is_bias:
                ones = [(GATES * z, keras.initializers.Ones())]
                name = f"{part}_embedding_bias"
                added["embedding_bias"] = self.add_bias(name, ones)
            for name, weight in added.items():
                setattr(self, f"{part}_{name}", weight)

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        hyper, bias = weights["hyper_kernel"], weights.get("hyper_bias")
        return {
            "gates": ops.matmul(inputs, weights["kernel"]),
            "hyper": affine(inputs, hyper, bias),
        }

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        h, c, hyper, hyper_c, pointer = states
        dropped = times(h, sequence_noise.recurrent)
        gates = addmm(
            projected["hyper"],
            ops.concatenate([hyper, dropped], axis=-1),
            weights["hyper_recurrent_kernel"],
        )
        hyper, hyper_c = self._update_hyper(weights, gates, hyper_c)
        of_h, of_x, gates = self.scales(weights, hyper)
        gates = gates + of_x * projected["gates"]
        from_h = ops.matmul(dropped, weights["recurrent_kernel"])
        h, c = self.update_lstm(
            weights, gates + of_h * from_h, h, c, step_noise, training
        )
        return CellResult([h, c, hyper, hyper_c, count_step(pointer)])

    def _update_hyper(
        self, weights: Tensors, gates: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The new h^ and c^, without zoneout."""
        i, f, o, j = self._activate(weights, gates, "hyper_")
        c = f * c + i * j
        return o * self.activation(self._norm_state(weights, c, "hyper_")), c

    def scales(self, weights: Tensors, hyper: Tensor) -> list:
        """d_h, d_x and b, `(batch, 4 * units)` each."""
        found = []
        for part in PARTS:
            kernel = weights[f"{part}_embedding_kernel"]
            z = affine(hyper, kernel, weights.get(f"{part}_embedding_bias"))
            z = ops.reshape(z, (-1, GATES, 1, self.embedding_units))
            maps = ops.reshape(
                weights[f"{part}_scale_kernel"],
                (self.embedding_units, GATES, self.units),
            )
            scaled = ops.matmul(z, ops.swapaxes(maps, 0, 1))
            found.append(ops.reshape(scaled, (-1, GATES * self.units)))
        if self.use_bias:
            found[-1] = found[-1] + weights["bias"]
        return found


@keras.saving.register_keras_serializable(package="keras_armin")
class HyperLSTM(MemoryLayer):
    """An LSTM whose kernels a smaller LSTM scales at each step.

    `HyperLSTM(...)` has the weights of `keras.layers.RNN(HyperLSTMCell(...))`
    and, without noise, computes the same numbers. In addition it carries its
    state on every backend if `stateful`, and can reset individual samples.

    Args:
        units, hyper_units, embedding_units, layer_norm, activation,
            recurrent_activation, use_bias, unit_forget_bias, zoneout_cell,
            zoneout_hidden, kernel_initializer, recurrent_initializer,
            bias_initializer, kernel_regularizer, recurrent_regularizer,
            bias_regularizer, kernel_constraint, recurrent_constraint,
            bias_constraint, dropout, recurrent_dropout, seed: See
            `HyperLSTMCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Ha et al., 2016](https://arxiv.org/abs/1609.09106)
    """

    cell: HyperLSTMCell
    cell_class = HyperLSTMCell
    cell_name = "hyper_lstm_cell"
