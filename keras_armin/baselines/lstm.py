"""An LSTM with layer normalisation and zoneout."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import keras

from keras_armin import checks
from keras_armin import memory as memory_ops
from keras_armin import noise
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import times
from keras_armin.armin_equations import zone_out
from keras_armin.backends import ops
from keras_armin.backends import plus_product
from keras_armin.blocks import BlockInitializer
from keras_armin.cell import MemoryCell
from keras_armin.cell import Step
from keras_armin.cell import arguments_of
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.normalization import layer_norm
from keras_armin.recurrent import MemoryRNN


@keras.saving.register_keras_serializable(package="keras_armin")
class LayerNormLSTMCell(MemoryCell):
    """One step of an LSTM with layer normalisation and zoneout.

        [i, f, o, j] = LN(W [x, h] + b), each gate for itself
        c' = sigma(f) * c + sigma(i) * tanh(j)
        h' = sigma(o) * tanh(LN(c'))

    What is carried is `c'` itself, not its normalisation. Zoneout then leaves
    some units of `c` and of `h` as they were; the output is the `h` that is
    carried.

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
        zoneout_hidden: float in [0, 1). Likewise for the hidden state.
            Defaults to `0.0`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel`. The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For `recurrent_kernel`. The initializer defaults to
            `"orthogonal"`, each gate for itself.
        bias_initializer, bias_regularizer, bias_constraint: For `bias`. The
            initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). Likewise for the hidden state
            where it enters the matrix product. Defaults to `0.0`.
        seed: int. Seed of zoneout and dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, pointer]` of shapes `(batch, units)`,
            `(batch, units)` and `(batch, 4)`. `output` is `h`; `pointer`
            holds the number of steps so far as digits to the base 128, lowest
            first.
        training: bool. Whether dropout and zoneout are at work.

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
        zoneout_cell: float = 0.0,
        zoneout_hidden: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **kwargs,
    ):
        given = locals()
        super().__init__(
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            **kwargs,
        )
        self.units = checks.size("units", units)
        self.keep_keras_objects(given)
        self.use_bias = checks.flag("use_bias", use_bias)
        self.unit_forget_bias = checks.flag(
            "unit_forget_bias", unit_forget_bias
        )
        self.layer_norm = checks.flag("layer_norm", layer_norm)
        self.zoneout_cell = checks.rate("zoneout_cell", zoneout_cell)
        self.zoneout_hidden = checks.rate("zoneout_hidden", zoneout_hidden)
        self.output_size = self.units
        self.state_size = [self.units, self.units, memory_ops.POINTER_DIGITS]

    def build(self, input_shape):
        self.keep_input_shape(input_shape)
        sizes = self._gate_sizes
        self.kernel = self.add_kernel("kernel", "kernel", self.input_dim, sizes)
        self.recurrent_kernel = self.add_kernel(
            "recurrent_kernel", "recurrent", self.units, sizes
        )
        if self.use_bias:
            self.bias = self.add_bias(
                "bias",
                self._gate_starts(self.bias_initializer, not self.layer_norm),
            )
        if self.layer_norm:
            self._build_norms()
        self.built = True

    def _build_norms(self):
        zeros, ones = keras.initializers.Zeros(), keras.initializers.Ones()
        width = sum(self._gate_sizes)
        self.norm_gain = self.add_norm("norm_gain", width, ones)
        # A forget bias of 1 in `bias` would be normalised away.
        self.norm_bias = self.add_norm(
            "norm_bias", width, BlockInitializer(self._gate_starts(zeros, True))
        )
        self.state_norm_gain = self.add_norm(
            "state_norm_gain", self.units, ones
        )
        self.state_norm_bias = self.add_norm(
            "state_norm_bias", self.units, zeros
        )

    @property
    def _gate_sizes(self):
        """Widths of i, f, o and j: what has one activation lies together."""
        return [self.units] * 4

    def _gate_starts(self, initializer, holds_forget_bias):
        """The width and initializer of each gate of a bias."""
        starts = [(size, initializer) for size in self._gate_sizes]
        if self.unit_forget_bias and holds_forget_bias:
            starts[1] = (self.units, keras.initializers.Ones())
        return starts

    @property
    def step_draws(self):
        """How many times a step draws random numbers."""
        return int(self.zoneout_cell > 0) + int(self.zoneout_hidden > 0)

    def draw_step_noise(self, leading, seeds):
        seeds = iter(seeds)
        shape = (*leading, self.units)

        def draw(rate):
            return noise.keep_old(shape, rate, next(seeds)) if rate else None

        return StepNoise(
            zoneout_cell=draw(self.zoneout_cell),
            zoneout=draw(self.zoneout_hidden),
        )

    @property
    def recurrent_width(self):
        """`recurrent_dropout` acts on h."""
        return self.units

    def project(self, weights, inputs, sequence_noise=SequenceNoise()):
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = times(inputs, sequence_noise.inputs)
        return {"gates": affine(inputs, weights["kernel"], weights.get("bias"))}

    def step(
        self, weights, projected, states, step_noise, sequence_noise, training
    ) -> Step:
        h_tm1, c_tm1, pointer = states
        gates = plus_product(
            projected["gates"],
            times(h_tm1, sequence_noise.recurrent),
            weights["recurrent_kernel"],
        )
        i, f, o, j = self._activate(weights, gates)
        new_c = f * c_tm1 + i * j
        new_h = o * self.activation(self._norm_state(weights, new_c))
        c = zone_out(
            self.zoneout_cell, new_c, c_tm1, step_noise.zoneout_cell, training
        )
        h = zone_out(
            self.zoneout_hidden, new_h, h_tm1, step_noise.zoneout, training
        )
        return Step([h, c, self._count_step(pointer)])

    def _activate(self, weights, gates):
        """i, f, o and j, from all of them before normalisation."""
        u = self.units
        if self.layer_norm:
            gates = layer_norm(
                gates,
                self._gate_sizes,
                weights["norm_gain"],
                weights["norm_bias"],
            )
        gates, j = ops.split(gates, [3 * u], axis=-1)
        gates = self.recurrent_activation(gates)
        i, f, o = ops.split(gates, [u, 2 * u], axis=-1)
        return i, f, o, self.activation(j)

    def _norm_state(self, weights, c):
        if not self.layer_norm:
            return c
        return layer_norm(
            c,
            [self.units],
            weights["state_norm_gain"],
            weights["state_norm_bias"],
        )

    def _count_step(self, pointer):
        count = memory_ops.pointer_to_count(pointer)
        return memory_ops.count_to_pointer(
            memory_ops.advance(count), pointer.dtype
        )

    def get_config(self):
        return {
            **super().get_config(),
            **self.config_of(arguments_of(LayerNormLSTMCell)),
        }


@keras.saving.register_keras_serializable(package="keras_armin")
class LayerNormLSTM(MemoryRNN):
    """An LSTM layer with layer normalisation and zoneout.

    `LayerNormLSTM(...)` has the weights of
    `keras.layers.RNN(LayerNormLSTMCell(...))` and, without noise, gives the
    same numbers. Beyond that it carries its state on every backend when
    `stateful`, and can be reset sample by sample. `LayerNormLSTM.cell` is the
    cell that holds the weights.

    Args:
        units: int. Size of the hidden state, which is the output, and of the
            cell state.
        return_sequences: bool. Return the output of every step, or the last.
            Defaults to `False`.
        return_state: bool. Also return the last `output`, `c` and `pointer`.
            Defaults to `False`.
        go_backwards: bool. Process the sequence from its end, and return the
            outputs in that order. Defaults to `False`.
        stateful: bool. Start each batch from the state in which the last one
            ended. Defaults to `False`.
        unroll: bool. Compile one piece of code for each step, instead of a
            loop. Defaults to `False`.
        zero_output_for_mask: bool. Output zeros at masked steps, instead of
            the output before. Defaults to `False`.
        activation, recurrent_activation, use_bias, unit_forget_bias,
            layer_norm, zoneout_cell, zoneout_hidden, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `LayerNormLSTMCell`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: List `[output, c, pointer]` to start from, as
            `return_state=True` gives them.
        mask: Bool tensor of shape `(batch, time)`; `False` skips a step.
        training: bool. Whether dropout and zoneout are at work.
        reset: Bool tensor of shape `(batch,)` or `(batch, time)`: samples, or
            steps of samples, that start from the initial state.

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

    def __init__(
        self,
        units: int,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        layer_norm: bool = True,
        zoneout_cell: float = 0.0,
        zoneout_hidden: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        zero_output_for_mask: bool = False,
        **kwargs,
    ):
        given = locals()
        cell = LayerNormLSTMCell(
            **{name: given[name] for name in arguments_of(LayerNormLSTMCell)},
            dtype=kwargs.get("dtype"),
            trainable=kwargs.get("trainable", True),
            name="layer_norm_lstm_cell",
        )
        super().__init__(
            cell,
            return_sequences=return_sequences,
            return_state=return_state,
            go_backwards=go_backwards,
            stateful=stateful,
            unroll=unroll,
            zero_output_for_mask=zero_output_for_mask,
            **kwargs,
        )


for _name in arguments_of(LayerNormLSTMCell):
    setattr(LayerNormLSTM, _name, property(attrgetter(f"cell.{_name}")))
