"""The cell that a search over recurrent architectures found."""

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

BASE = 8  # leaves of the tree


@keras.saving.register_keras_serializable(package="keras_armin")
class NASCell(RecurrentCell):
    """One step of the cell found by neural architecture search.

    The publication shows it as a picture (figure 8), without equations. Eight
    leaves combine `a = W x` and `m = U h + b`, and a tree combines them:

        l0, l2, l5, l7 = sigma(a + m), l1 = relu(a + m), l3 = relu(a * m),
        l4, l6 = tanh(a + m), each with columns of its own
        p0 = tanh(l0 * l1), p1 = tanh(l2 + l3)
        p2 = tanh(l4 * l5), p3 = sigma(l6 + l7)
        c' = tanh(p0 + c) * p1
        h' = tanh(c' * tanh(p2 + p3)), or P h' with a projection

    The picture leaves open to which of the factors of `l3` the bias belongs:
    here, as in the authors' code, to `m`. That code, the `NASCell` of
    TensorFlow, has no bias unless it is asked for one. With `layer_norm`, which
    is not in the publication, each leaf of `a` and of `m` is normalised.

    Args:
        units: int. Size of the cell state.
        projection_units: int. Size of the output after a projection, which is
            also what is fed back. Defaults to `None`: no projection, and an
            output of `units`.
        use_bias: bool. Defaults to `True`.
        layer_norm: bool. Defaults to `False`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel` and `projection_kernel`. The initializer defaults to
            `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For `recurrent_kernel`. The initializer defaults to
            `"orthogonal"`, each leaf independently.
        bias_initializer, bias_regularizer, bias_constraint: For `bias`. The
            initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). The same for the last output.
            Defaults to `0.0`.
        seed: int. Seed of dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, c, pointer]`; `pointer` counts steps.
        training: bool. Whether to apply dropout.

    Example:

    >>> from keras_armin.baselines import NASCell
    >>> rnn = keras.layers.RNN(NASCell(8, projection_units=4))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 4)

    Reference:
        - [Zoph and Le, 2016](https://arxiv.org/abs/1611.01578)
    """

    state_names = ("output", "c", "pointer")

    def __init__(
        self,
        units: int,
        projection_units: int | None = None,
        use_bias: bool = True,
        layer_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units = validation.size("units", units)
        if projection_units is not None:
            projection_units = validation.size(
                "projection_units", projection_units
            )
        self.projection_units = projection_units
        self.use_bias = validation.flag("use_bias", use_bias)
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.output_size = projection_units or self.units
        self.state_size = [
            self.output_size,
            self.units,
            memory_ops.POINTER_DIGITS,
        ]

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        sizes = [self.units] * BASE
        self.kernel = self.add_kernel("kernel", "kernel", self.input_dim, sizes)
        self.recurrent_kernel = self.add_kernel(
            "recurrent_kernel", "recurrent", self.output_size, sizes
        )
        if self.use_bias:
            self.bias = self.add_bias(
                "bias", [(size, self.bias_initializer) for size in sizes]
            )
        if self.projection_units:
            self.projection_kernel = self.add_kernel(
                "projection_kernel", "kernel", self.units, [self.output_size]
            )
        if self.layer_norm:
            zeros = [(size, keras.initializers.Zeros()) for size in sizes]
            self.build_norm("input_", zeros)
            self.build_norm("recurrent_", zeros)
        self.built = True

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        a = ops.matmul(inputs, weights["kernel"])
        return {"a": self.normalise(weights, "input_", a, BASE)}

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        h, c, pointer = states
        h = times(h, sequence_noise.recurrent)
        m = affine(h, weights["recurrent_kernel"], weights.get("bias"))
        m = self.normalise(weights, "recurrent_", m, BASE)
        new_h, new_c = tree(projected["a"], m, c)
        if self.projection_units:
            new_h = ops.matmul(new_h, weights["projection_kernel"])
        return CellResult([new_h, new_c, count_step(pointer)])


def tree(a: Tensor, m: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The new h, before a projection, and the new c."""
    a, m = equal_parts(a, BASE), equal_parts(m, BASE)
    s = [x + y for x, y in zip(a, m)]
    p0 = ops.tanh(ops.sigmoid(s[0]) * ops.relu(s[1]))
    # The product of two large numbers would overflow in float16.
    product = ops.relu(ops.clip(a[3], -99, 99) * ops.clip(m[3], -99, 99))
    p1 = ops.tanh(ops.sigmoid(s[2]) + product)
    p2 = ops.tanh(ops.tanh(s[4]) * ops.sigmoid(s[5]))
    p3 = ops.sigmoid(ops.tanh(s[6]) + ops.sigmoid(s[7]))
    new_c = ops.tanh(p0 + c) * p1
    return ops.tanh(new_c * ops.tanh(p2 + p3)), new_c


@keras.saving.register_keras_serializable(package="keras_armin")
class NAS(MemoryLayer):
    """A layer of the cell found by neural architecture search.

    `NAS(...)` has the weights of `keras.layers.RNN(NASCell(...))` and computes
    the same numbers. In addition it carries its state on every backend if
    `stateful`, and can reset individual samples.

    Args:
        units, projection_units, use_bias, layer_norm, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `NASCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Zoph and Le, 2016](https://arxiv.org/abs/1611.01578)
    """

    cell: NASCell
    cell_class = NASCell
    cell_name = "nas_cell"
