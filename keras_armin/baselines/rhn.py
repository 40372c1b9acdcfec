"""The recurrent highway network."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
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
class RHNCell(RecurrentCell):
    """One step of a recurrent highway network.

    A step is `depth` highway layers, the first of which sees the input:

        s_0 = s of the last step, output = s_depth
        s_l = h_l * t_l + s_{l-1} * c_l                         (6)
        h_l = tanh(W_H x [l = 1] + R_Hl s_{l-1} + b_Hl)         (7)
        t_l = sigma(W_T x [l = 1] + R_Tl s_{l-1} + b_Tl)        (8)
        c_l = sigma(W_C x [l = 1] + R_Cl s_{l-1} + b_Cl)        (9)

    and with `coupled` gates, which all published results have, `c_l = 1 - t_l`.

    With `layer_norm`, which is not in the publication, h, t and c of each
    layer are normalised before their activations. Like the authors' code,
    `recurrent_dropout` uses one mask for all layers and steps.

    Args:
        units: int. Size of the state, which is the output.
        depth: int. Number of highway layers in a step. Defaults to `5`.
        coupled: bool. Whether the carry gate is `1 - t`. Defaults to `True`.
        transform_bias: float. Where the bias of t starts; of c, at its
            negative. Defaults to `-2.0`.
        activation: Activation of h. Defaults to `"tanh"`.
        recurrent_activation: Activation of t and c. Defaults to `"sigmoid"`.
        use_bias: bool. Defaults to `True`.
        layer_norm: bool. Defaults to `False`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel`. The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For the kernels of the layers, `recurrent_kernel_1` and so on. The
            initializer defaults to `"orthogonal"`, h, t and c independently.
        bias_initializer, bias_regularizer, bias_constraint: For the biases of
            the layers, except t and c. The initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). The same for the states that enter
            the matrix products. Defaults to `0.0`.
        seed: int. Seed of dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, pointer]`; `pointer` counts steps.
        training: bool. Whether to apply dropout.

    Example:

    >>> from keras_armin.baselines import RHNCell
    >>> rnn = keras.layers.RNN(RHNCell(8, depth=3))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Zilly et al., 2016](https://arxiv.org/abs/1607.03474)
    """

    state_names: tuple[str, ...] = ("output", "pointer")

    def __init__(
        self,
        units: int,
        depth: int = 5,
        coupled: bool = True,
        transform_bias: float = -2.0,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        use_bias: bool = True,
        layer_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units = validation.size("units", units)
        self.depth = validation.size("depth", depth)
        self.coupled = validation.flag("coupled", coupled)
        self.transform_bias = validation.finite(
            "transform_bias", transform_bias
        )
        self.activation = keras.activations.get(activation)
        self.recurrent_activation = keras.activations.get(recurrent_activation)
        self.use_bias = validation.flag("use_bias", use_bias)
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.output_size = self.units
        self.state_size = [self.units, memory_ops.POINTER_DIGITS]

    # --- weights ------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Columns h, t and, unless the gates are coupled, c."""
        return 2 if self.coupled else 3

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_highway("", self.units)
        self.built = True

    def build_highway(self, prefix: str, units: int) -> None:
        """Weights of all layers; `prefix` distinguishes two networks."""
        sizes = [units] * self.blocks
        added = [
            self.add_kernel(f"{prefix}kernel", "kernel", self.input_dim, sizes)
        ]
        for layer in range(1, self.depth + 1):
            name = f"{prefix}recurrent_kernel_{layer}"
            added.append(self.add_kernel(name, "recurrent", units, sizes))
            starts = self._starts(units, not self.layer_norm)
            if self.use_bias:
                added.append(self.add_bias(f"{prefix}bias_{layer}", starts))
            if self.layer_norm:
                zeros = self._starts(units, True, keras.initializers.Zeros())
                self.build_norm(f"{prefix}layer_{layer}_", zeros)
        for weight in added:
            setattr(self, weight.name, weight)

    def _starts(self, units: int, gated: bool, initializer: Any = None) -> list:
        """Widths and initializers of h, t and c in a bias."""
        initializer = initializer or self.bias_initializer
        if not gated:
            return [(units, initializer)] * self.blocks
        t, c = (
            keras.initializers.Constant(sign * self.transform_bias)
            for sign in (1, -1)
        )
        return [(units, x) for x in (initializer, t, c)[: self.blocks]]

    # --- equations ----------------------------------------------------------

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        return {"inputs": ops.matmul(inputs, weights["kernel"])}

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        s, pointer = states
        mask = sequence_noise.recurrent
        s = self.highway(weights, "", projected["inputs"], s, mask)[-1]
        return CellResult([s, count_step(pointer)])

    def highway(
        self,
        weights: Tensors,
        prefix: str,
        inputs: Tensor,
        s: Tensor,
        mask: Tensor = None,
        scales: list | None = None,
    ) -> list:
        """s_1 to s_depth; `scales` multiply the sums of each layer."""
        found = []
        for layer in range(1, self.depth + 1):
            kernel = weights[f"{prefix}recurrent_kernel_{layer}"]
            sums = ops.matmul(times(s, mask), kernel)
            sums = sums + inputs if layer == 1 else sums
            sums = times(sums, scales[layer - 1] if scales else None)
            bias = weights.get(f"{prefix}bias_{layer}")
            sums = sums if bias is None else sums + bias
            sums = self.normalise(
                weights, f"{prefix}layer_{layer}_", sums, self.blocks
            )
            s = self._mix(sums, s)
            found.append(s)
        return found

    def _mix(self, sums: Tensor, s: Tensor) -> Tensor:
        """Equation 6, from h, t and c before their activations."""
        h, gates = ops.split(sums, [s.shape[-1]], axis=-1)
        h, t = self.activation(h), self.recurrent_activation(gates)
        if self.coupled:
            return h * t + s * (1 - t)
        t, c = equal_parts(t, 2)
        return h * t + s * c


@keras.saving.register_keras_serializable(package="keras_armin")
class RHN(MemoryLayer):
    """A recurrent highway network.

    `RHN(...)` has the weights of `keras.layers.RNN(RHNCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples.

    Args:
        units, depth, coupled, transform_bias, activation,
            recurrent_activation, use_bias, layer_norm, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `RHNCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Zilly et al., 2016](https://arxiv.org/abs/1607.03474)
    """

    cell: RHNCell
    cell_class = RHNCell
    cell_name = "rhn_cell"
