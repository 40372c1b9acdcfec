"""The fast-slow LSTM."""

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


@keras.saving.register_keras_serializable(package="keras_armin")
class FSLSTMCell(LSTMDrivenCell):
    """One step of a fast-slow LSTM.

    A step runs k fast cells one after the other, and between the first and
    the second a slow one. All are LSTMs with layer normalisation and zoneout:

        h_F1 = f_F1(h_Fk of the last step, x)                   (1)
        h_S = f_S(h_S of the last step, h_F1)                   (2)
        h_F2 = f_F2(h_F1, h_S)                                  (3)
        h_Fi = f_Fi(h_F(i-1)) for i = 3 to k                    (4)

    The output is `h_Fk`, and f is the LSTM of `LayerNormLSTMCell`. The fast
    cells share one cell state, which each hands to the next together with h,
    the last one to the first one of the next step. The slow cell has its own.
    Zoneout keeps units of the h and c that enter a cell: of a fast one after
    the first, those of the fast cell before.

    In the authors' code dropout acts on x, on what goes from the first fast
    cell to the slow one and from there to the second, and on the output, with
    another mask at each step. Here `dropout` acts on x, and `recurrent_dropout`
    on the h that enters the first fast cell, with one mask for a sequence.

    Args:
        units: int. Size of a fast cell.
        slow_units: int. Size of the slow cell. Defaults to `None`: `units`.
        fast_cells: int of at least 2. Number of fast cells, k: 2 for
            FS-LSTM-2, 4 for FS-LSTM-4. Defaults to `2`.
        layer_norm: bool. Defaults to `True`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: Of every LSTM, see `LayerNormLSTMCell`.
            `dropout` and `recurrent_dropout` act on the first fast cell alone.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, slow, fast_c, slow_c, pointer]`: `h_Fk`, `h_S`,
            and the cell states of the fast cells and of the slow one.
            `pointer` counts steps.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import FSLSTMCell
    >>> rnn = keras.layers.RNN(FSLSTMCell(8, slow_units=4, fast_cells=4))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Mujika et al., 2017](https://arxiv.org/abs/1705.08639)
    """

    state_names = ("output", "slow", "fast_c", "slow_c", "pointer")

    def __init__(
        self,
        units: int,
        slow_units: int | None = None,
        fast_cells: int = 2,
        layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, layer_norm=layer_norm, **kwargs)
        self.slow_units = validation.size_or_default(
            "slow_units", slow_units, self.units
        )
        self.fast_cells = validation.size_of_at_least(
            "fast_cells", fast_cells, 2
        )
        self.output_size = self.units
        self.state_size = [
            self.units,
            self.slow_units,
            self.units,
            self.slow_units,
            memory_ops.POINTER_DIGITS,
        ]

    @property
    def zoneout_width(self) -> int:
        """Units of the fast cells in order, then of the slow one."""
        return self.fast_cells * self.units + self.slow_units

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        u, slow = self.units, self.slow_units
        self.build_lstm("fast_1_")
        self.build_lstm("slow_", inputs=u, recurrent=slow, units=slow)
        self.build_lstm("fast_2_", inputs=slow)
        for cell in range(3, self.fast_cells + 1):
            self.build_lstm(f"fast_{cell}_", inputs=0)
        self.built = True

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        kernel, bias = weights["fast_1_kernel"], weights.get("fast_1_bias")
        return {"gates": affine(inputs, kernel, bias)}

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        h, slow, fast_c, slow_c, pointer = states
        *noises, slow_noise = self._split_noise(step_noise)
        entering = projected["gates"]
        for cell in range(self.fast_cells):
            prefix = f"fast_{cell + 1}_"
            mask = sequence_noise.recurrent if cell == 0 else None
            gates = self._gates(weights, prefix, times(h, mask), entering)
            h, fast_c = self.update_lstm(
                weights, gates, h, fast_c, noises[cell], training, prefix
            )
            entering = None
            if cell == 0:
                gates = self._inputs(weights, "slow_", h)
                gates = self._gates(weights, "slow_", slow, gates)
                slow, slow_c = self.update_lstm(
                    weights, gates, slow, slow_c, slow_noise, training, "slow_"
                )
                entering = self._inputs(weights, "fast_2_", slow)
        return CellResult([h, slow, fast_c, slow_c, count_step(pointer)])

    def _inputs(self, weights: Tensors, prefix: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{prefix}bias")
        return affine(x, weights[f"{prefix}kernel"], bias)

    def _gates(
        self, weights: Tensors, prefix: str, h: Tensor, entering: Tensor
    ) -> Tensor:
        """Gates from h and what enters, or the bias alone."""
        kernel = weights[f"{prefix}recurrent_kernel"]
        if entering is None:
            return affine(h, kernel, weights.get(f"{prefix}bias"))
        return addmm(entering, h, kernel)

    def _split_noise(self, noise: StepNoise) -> list[StepNoise]:
        """The noise of the fast cells, then of the slow one."""
        ends = [self.units * (i + 1) for i in range(self.fast_cells)]

        def parts(mask: Tensor) -> list:
            if mask is None:
                return [None] * (self.fast_cells + 1)
            return ops.split(mask, ends, axis=-1)

        pairs = zip(parts(noise.zoneout), parts(noise.zoneout_cell))
        return [StepNoise(zoneout=h, zoneout_cell=c) for h, c in pairs]


@keras.saving.register_keras_serializable(package="keras_armin")
class FSLSTM(MemoryLayer):
    """A fast-slow LSTM.

    `FSLSTM(...)` has the weights of `keras.layers.RNN(FSLSTMCell(...))` and,
    without noise, computes the same numbers. In addition it carries its state
    on every backend if `stateful`, and can reset individual samples.

    Args:
        units, slow_units, fast_cells, layer_norm, activation,
            recurrent_activation, use_bias, unit_forget_bias, zoneout_cell,
            zoneout_hidden, kernel_initializer, recurrent_initializer,
            bias_initializer, kernel_regularizer, recurrent_regularizer,
            bias_regularizer, kernel_constraint, recurrent_constraint,
            bias_constraint, dropout, recurrent_dropout, seed: See
            `FSLSTMCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Mujika et al., 2017](https://arxiv.org/abs/1705.08639)
    """

    cell: FSLSTMCell
    cell_class = FSLSTMCell
    cell_name = "fs_lstm_cell"
