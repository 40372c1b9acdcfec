"""An LSTM with layer normalisation and zoneout."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin.baselines._lstm_driven_cell import LSTMDrivenCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensors


@keras.saving.register_keras_serializable(package="keras_armin")
class LayerNormLSTMCell(LSTMDrivenCell):
    """One step of an LSTM with layer normalisation and zoneout.

        [i, f, o, j] = LN(W [x, h] + b), each gate independently
        c' = sigma(f) * c + sigma(i) * tanh(j)
        h' = sigma(o) * tanh(LN(c'))

    The state is `c'` itself, not its normalisation. Zoneout then keeps the old
    values of some units of `c` and of `h`; the output is `h` after zoneout.

    Use it in `keras.layers.RNN`, or use the layer `LayerNormLSTM`, which has
    the same weights and computes the same numbers faster.

    Args:
        units: int. Size of the hidden state, which is the output, and of the
            cell state.
        activation: Activation of the candidate `j` and of the cell state for
            the output. Defaults to `"tanh"`.
        recurrent_activation: Activation of the gates `i`, `f` and `o`,
            element by element. Defaults to `"sigmoid"`.
        use_bias: bool. Defaults to `True`.
        unit_forget_bias: bool. Start the forget gate's bias at 1: in
            `norm_bias`, or without `layer_norm` in `bias`. Defaults to `True`.
        layer_norm: bool. Defaults to `True`.
        zoneout_cell: float in [0, 1). Rate at which a unit of the cell state
            keeps its old value. At inference the expectation is used.
            Defaults to `0.0`.
        zoneout_hidden: float in [0, 1). The same for the hidden state.
            Defaults to `0.0`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel`. The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For `recurrent_kernel`. The initializer defaults to
            `"orthogonal"`, each gate independently.
        bias_initializer, bias_regularizer, bias_constraint: For `bias`. The
            initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). Fraction of the hidden state to
            drop where it enters the matrix product. Defaults to `0.0`.
        seed: int. Seed of zoneout and dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, pointer]` of shapes `(batch, units)`,
            `(batch, units)` and `(batch, 4)`. `output` is `h`; `pointer`
            holds the number of steps so far as base-128 digits, least
            significant first.
        training: bool. Whether to apply dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import LayerNormLSTMCell
    >>> cell = LayerNormLSTMCell(8)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 8)

    Reference:
        - [Ba et al., 2016](https://arxiv.org/abs/1607.06450), layer
          normalisation
        - [Krueger et al., 2017](https://arxiv.org/abs/1606.01305), zoneout
    """

    state_names = ("output", "c", "pointer")

    def __init__(
        self,
        units: int,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            units,
            activation=activation,
            recurrent_activation=recurrent_activation,
            use_bias=use_bias,
            unit_forget_bias=unit_forget_bias,
            layer_norm=layer_norm,
            **kwargs,
        )
        self.output_size = self.units
        self.state_size = [self.units, self.units, memory_ops.POINTER_DIGITS]

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_lstm()
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
        h_tm1, c_tm1, pointer = states
        h, c = self.lstm(
            weights,
            projected,
            h_tm1,
            c_tm1,
            step_noise,
            sequence_noise,
            training,
        )
        return CellResult([h, c, count_step(pointer)])


@keras.saving.register_keras_serializable(package="keras_armin")
class LayerNormLSTM(MemoryLayer):
    """An LSTM layer with layer normalisation and zoneout.

    `LayerNormLSTM(...)` has the weights of
    `keras.layers.RNN(LayerNormLSTMCell(...))` and, without noise, computes the
    same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples. `LayerNormLSTM.cell` is the
    cell, which holds the weights.

    Args:
        units: int. Size of the hidden state, which is the output, and of the
            cell state.
        return_sequences: bool. Return the outputs of all steps instead of the
            last. Defaults to `False`.
        return_state: bool. Also return the last `output`, `c` and `pointer`.
            Defaults to `False`.
        go_backwards: bool. Process the sequence from its end, and return the
            outputs in that order. Defaults to `False`.
        stateful: bool. Start each batch from the last state of the previous
            batch. Defaults to `False`.
        unroll: bool. Unroll the loop into one copy of the code per step.
            Defaults to `False`.
        zero_output_for_mask: bool. Output zeros at masked steps instead of
            the previous output. Defaults to `False`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `LayerNormLSTMCell`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: List `[output, c, pointer]` to start from, as
            `return_state=True` returns them, or a dict of them by name. States
            that are `None` or missing start from the initial state of the
            cell.
        mask: Bool tensor of shape `(batch, time)`; `False` skips a step.
        training: bool. Whether to apply dropout and zoneout.
        reset: Bool tensor of shape `(batch,)` or `(batch, time)`: samples, or
            steps of samples, that restart from the initial state.

    Example:

    >>> from keras_armin.baselines import LayerNormLSTM
    >>> layer = LayerNormLSTM(8, zoneout_cell=0.5)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Ba et al., 2016](https://arxiv.org/abs/1607.06450), layer
          normalisation
        - [Krueger et al., 2017](https://arxiv.org/abs/1606.01305), zoneout
    """

    cell: LayerNormLSTMCell
    cell_class = LayerNormLSTMCell
    cell_name = "layer_norm_lstm_cell"
