"""The hierarchical multiscale LSTM."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import prepare_inputs
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.baselines._recurrent_cell import RecurrentCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.baselines._recurrent_cell import equal_parts
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors


@keras.saving.register_keras_serializable(package="keras_armin")
class HMLSTMCell(RecurrentCell):
    """One step of a hierarchical multiscale LSTM.

    Each level but the last decides where a segment ends, z = 1. The level
    above moves only then. With z_l of the last step, and z of the level below,
    which is 1 below the first, level l

        copies:  c_l' = c_l, h_l' = h_l            if z_l = 0, z_below = 0
        updates: c_l' = f * c_l + i * j            if z_l = 0, z_below = 1
        flushes: c_l' = i * j                      if z_l = 1   (2)
        h_l' = o * tanh(c_l'), except where it copies           (3)
        [i, f, o, j, s] = U h_l + z_l T h_above + z_below W h_below' + b
                                                                (4-7)
        z_l' = 1 if hard sigma(s) > 0.5, which is s > 0, else 0
        hard sigma(s) = max(0, min(1, (slope s + 1) / 2))

    with sigma of i, f and o, tanh of j, and h_above of the last step. The
    gradient of z is that of the hard sigmoid (straight-through); `slope` grows
    during training. The last level never flushes.

    The output is all h, the first level first. The publication's output
    network, which gates and embeds them, is left to the layers that follow.
    With `layer_norm` each gate and c for the output are normalised, s is not.
    The publication also samples z; here it is the step function. It leaves
    open whether a level that copies may end a segment: here it may.

    Args:
        units: int. Size of a level. The output has `levels * units` columns.
        levels: int of at least 2. Defaults to `3`.
        slope: float above 0, kept in the non-trainable weight `slope`.
            Defaults to `1.0`; the publication goes from 1 to 5.
        activation: Activation of j and c. Defaults to `"tanh"`.
        recurrent_activation: Activation of i, f and o. Defaults to
            `"sigmoid"`.
        use_bias: bool. Defaults to `True`.
        unit_forget_bias: bool. Start the bias of f at 1. Defaults to `True`.
        layer_norm: bool. Defaults to `False`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            the kernels W. The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For U and T. The initializer defaults to `"orthogonal"`, each gate
            independently.
        bias_initializer, bias_regularizer, bias_constraint: For the biases.
            The initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). The same for h of the last step.
            Defaults to `0.0`.
        seed: int. Seed of dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, boundaries, pointer]`; `boundaries` is z,
            `(batch, levels - 1)`, and `pointer` counts steps.
        training: bool. Whether to apply dropout.

    Example:

    >>> from keras_armin.baselines import HMLSTMCell
    >>> rnn = keras.layers.RNN(HMLSTMCell(8))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 24)

    Reference:
        - [Chung et al., 2016](https://arxiv.org/abs/1609.01704)
    """

    state_names = ("output", "c", "boundaries", "pointer")
    wide_weights = ("slope",)

    def __init__(
        self,
        units: int,
        levels: int = 3,
        slope: float = 1.0,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        layer_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units = validation.size("units", units)
        self.levels = validation.size_of_at_least("levels", levels, 2)
        self.initial_slope = validation.cell_scalar(
            "slope", slope, validation.positive
        )
        self.activation = keras.activations.get(activation)
        self.recurrent_activation = keras.activations.get(recurrent_activation)
        self.use_bias = validation.flag("use_bias", use_bias)
        self.unit_forget_bias = validation.flag(
            "unit_forget_bias", unit_forget_bias
        )
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.slope = None
        self.output_size = self.levels * self.units
        self.state_size = [
            self.output_size,
            self.output_size,
            self.levels - 1,
            memory_ops.POINTER_DIGITS,
        ]

    @property
    def trace_width(self) -> int:
        """Boundaries can be traced."""
        return self.levels - 1

    # --- weights ------------------------------------------------------------

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        for level in range(1, self.levels + 1):
            self._build_level(level)
        self.slope = self.add_scalar("slope", self.initial_slope)
        self.built = True

    def _build_level(self, level: int) -> None:
        u, last = self.units, level == self.levels
        sizes = [u] * 4 + ([] if last else [1])
        kinds = {"kernel": self.input_dim if level == 1 else u}
        kinds["recurrent_kernel"] = u
        if not last:
            kinds["top_down_kernel"] = u
        for name, rows in kinds.items():
            kind = "kernel" if name == "kernel" else "recurrent"
            weight = self.add_kernel(f"{name}_{level}", kind, rows, sizes)
            setattr(self, weight.name, weight)
        if self.use_bias:
            starts = self._starts(sizes, self.bias_initializer)
            weight = self.add_bias(f"bias_{level}", starts)
            setattr(self, weight.name, weight)
        if self.layer_norm:
            zeros = keras.initializers.Zeros()
            gates = self._starts([u] * 4, zeros)
            self.build_norm(f"level_{level}_", gates)
            self.build_norm(f"state_{level}_", [(u, zeros)])

    def _starts(self, sizes: list[int], initializer: Any) -> list:
        """Widths and initializers of i, f, o, j and s in a bias."""
        starts = [(size, initializer) for size in sizes]
        if self.unit_forget_bias:
            starts[1] = (self.units, keras.initializers.Ones())
        return starts

    # --- equations ----------------------------------------------------------

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        kernel, bias = weights["kernel_1"], weights.get("bias_1")
        return {"inputs": affine(inputs, kernel, bias)}

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        output, c, boundaries, pointer = states
        dropped = times(output, sequence_noise.recurrent)
        entering = equal_parts(dropped, self.levels)
        hs = list(equal_parts(output, self.levels))
        cs = list(equal_parts(c, self.levels))
        ends = equal_parts(boundaries, self.levels - 1)
        below, found = ops.ones_like(ends[0]), []
        sums = projected["inputs"]
        for k in range(self.levels):
            level, last = k + 1, k == self.levels - 1
            if k:
                bias = weights.get(f"bias_{level}")
                sums = below * ops.matmul(hs[k - 1], weights[f"kernel_{level}"])
                sums = sums if bias is None else sums + bias
            sums = sums + ops.matmul(
                entering[k], weights[f"recurrent_kernel_{level}"]
            )
            end = ops.zeros_like(below) if last else ends[k]
            if not last:
                kernel = weights[f"top_down_kernel_{level}"]
                sums = sums + end * ops.matmul(entering[k + 1], kernel)
                found.append(self._boundary(weights, sums[:, 4 * self.units :]))
            gates = sums[:, : 4 * self.units]
            hs[k], cs[k] = self._level(
                weights, level, gates, hs[k], cs[k], end, below
            )
            below = None if last else found[k]
        z = ops.concatenate(found, axis=-1)
        new = [ops.concatenate(hs, -1), ops.concatenate(cs, -1), z]
        return CellResult([*new, count_step(pointer)], z, z)

    def _boundary(self, weights: Tensors, s: Tensor) -> Tensor:
        """z: 0 or 1, with the gradient of the hard sigmoid."""
        slope = ops.cast(weights["slope"], s.dtype)
        soft = ops.clip((slope * s + 1) / 2, 0, 1)
        # Not soft > 0.5: half precision rounds a small s away.
        hard = ops.cast(slope * s > 0, s.dtype)
        return hard + (soft - ops.stop_gradient(soft))

    def _level(
        self,
        weights: Tensors,
        level: int,
        gates: Tensor,
        h: Tensor,
        c: Tensor,
        end: Tensor,
        below: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The new h and c: equations 2 and 3."""
        u = self.units
        gates = self.normalise(weights, f"level_{level}_", gates, 4)
        i, f, o = equal_parts(self.recurrent_activation(gates[:, : 3 * u]), 3)
        j = self.activation(gates[:, 3 * u :])
        copy = (1 - end) * (1 - below)
        new_c = copy * c + (1 - copy) * ((1 - end) * f * c + i * j)
        shown = new_c
        if self.layer_norm:
            shown = self.normalise(weights, f"state_{level}_", new_c, 1)
        new_h = o * self.activation(shown)
        return copy * h + (1 - copy) * new_h, new_c

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["slope"] = self.initial_slope
        return config


@keras.saving.register_keras_serializable(package="keras_armin")
class HMLSTM(MemoryLayer):
    """A hierarchical multiscale LSTM.

    `HMLSTM(...)` has the weights of `keras.layers.RNN(HMLSTMCell(...))` and
    computes the same numbers. In addition it carries its state on every
    backend if `stateful`, and can reset individual samples.
    `keras_armin.trace_boundaries` shows where segments end.

    Args:
        units, levels, slope, activation, recurrent_activation, use_bias,
            unit_forget_bias, layer_norm, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `HMLSTMCell`. `slope` may be a
            `keras.optimizers.schedules` schedule.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Chung et al., 2016](https://arxiv.org/abs/1609.01704)
    """

    cell: HMLSTMCell
    cell_class = HMLSTMCell
    cell_name = "hm_lstm_cell"
