"""The independently recurrent network."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import prepare_inputs
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.baselines._recurrent_cell import RecurrentCell
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.gradient_clipping import LARGEST_FACTOR
from keras_armin.gradient_clipping import LARGEST_GRADIENT_FLOAT16
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# The gradient over a whole sequence grows at most by this factor.
LARGEST_GROWTH = 2.0


@keras.saving.register_keras_serializable(package="keras_armin")
class MaxMagnitude(keras.constraints.Constraint):
    """Keeps every element of a weight between `-largest` and `largest`.

    Args:
        largest: float above 0.
    """

    def __init__(self, largest: float) -> None:
        self.largest = validation.positive("largest", largest)

    def __call__(self, w: Tensor) -> Tensor:
        return ops.clip(w, -self.largest, self.largest)

    def get_config(self) -> dict[str, Any]:
        return {"largest": self.largest}


@keras.saving.register_keras_serializable(package="keras_armin")
class IndRNNCell(RecurrentCell):
    """One step of an independently recurrent network.

        h' = relu(W x + u * h + b)                              (2)

    `u` is a vector: a unit sees of the last state only its own value. The
    gradient of a unit over T steps is the product of `u` and the slopes of
    the activation. With `|u| <= 2^(1/T)` it grows at most by 2: a constraint on
    `u` that `max_length` sets.

    The publication normalises batches, before or after the activation. With
    `layer_norm` it is `LN(W x + b) + u * h` here, which leaves the bound as it
    is. The state is clipped where the compute dtype is about to overflow.

    `recurrent_dropout` sets `u` of some units to 0 for a whole sequence. The
    others keep theirs, in training as at inference: the usual
    `u / (1 - recurrent_dropout)` could exceed the bound, at each of T steps.

    Args:
        units: int. Size of the state, which is the output.
        activation: Defaults to `"relu"`.
        use_bias: bool. Defaults to `True`.
        max_length: int. The longest sequence, T. Defaults to `None`: of any
            length, with a bound of 1, also for a state that is carried from
            batch to batch.
        layer_norm: bool. Defaults to `False`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel`. The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For `recurrent_weights`, `u`. The initializer defaults to `None`,
            uniform from 0 to the bound; the constraint to `None`, the bound.
        bias_initializer, bias_regularizer, bias_constraint: For `bias`. The
            initializer defaults to `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). The same for the last state,
            without scaling the rest. Defaults to `0.0`.
        seed: int. Seed of dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, pointer]`; `pointer` counts steps.
        training: bool. Whether to apply dropout.

    Example:

    >>> from keras_armin.baselines import IndRNNCell
    >>> rnn = keras.layers.RNN(IndRNNCell(8, max_length=5))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Li et al., 2018](https://arxiv.org/abs/1803.04831)
    """

    state_names = ("output", "pointer")

    def __init__(
        self,
        units: int,
        activation: str | Callable | None = "relu",
        use_bias: bool = True,
        max_length: int | None = None,
        layer_norm: bool = False,
        recurrent_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(recurrent_initializer=recurrent_initializer, **kwargs)
        self.units = validation.size("units", units)
        self.activation = keras.activations.get(activation)
        self.use_bias = validation.flag("use_bias", use_bias)
        if max_length is not None:
            max_length = validation.size("max_length", max_length)
        self.max_length = max_length
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.output_size = self.units
        self.state_size = [self.units, memory_ops.POINTER_DIGITS]

    @property
    def bound(self) -> float:
        """The largest magnitude of a recurrent weight."""
        if self.max_length is None:
            return 1.0
        return LARGEST_GROWTH ** (1 / self.max_length)

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        sizes = [self.units]
        self.kernel = self.add_kernel("kernel", "kernel", self.input_dim, sizes)
        uniform = keras.initializers.RandomUniform(0.0, self.bound)
        self.recurrent_weights = self.add_weight(
            shape=(self.units,),
            initializer=self.recurrent_initializer or uniform,
            regularizer=self.recurrent_regularizer,
            constraint=self.recurrent_constraint or MaxMagnitude(self.bound),
            name="recurrent_weights",
        )
        if self.use_bias:
            self.bias = self.add_bias(
                "bias", [(self.units, self.bias_initializer)]
            )
        if self.layer_norm:
            self.build_norm("", [(self.units, keras.initializers.Zeros())])
        self.built = True

    def _draw_sequence_noise(self, batch: Any) -> SequenceNoise:
        """In the recurrence units are dropped, and the others not scaled."""
        drawn = super()._draw_sequence_noise(batch)
        if drawn.recurrent is None:
            return drawn
        kept = ops.cast(drawn.recurrent > 0, self.compute_dtype)
        return drawn._replace(recurrent=kept)

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        sums = affine(inputs, weights["kernel"], weights.get("bias"))
        return {"inputs": self.normalise(weights, "", sums, 1)}

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        h, pointer = states
        h = times(clip_gradient(h), sequence_noise.recurrent)
        h = self.activation(
            projected["inputs"] + weights["recurrent_weights"] * h
        )
        half = backends.is_float16(h.dtype)
        largest = LARGEST_GRADIENT_FLOAT16 if half else LARGEST_FACTOR
        return CellResult([ops.clip(h, -largest, largest), count_step(pointer)])


@keras.saving.register_keras_serializable(package="keras_armin")
class IndRNN(MemoryLayer):
    """An independently recurrent layer, which can be stacked many times.

    `IndRNN(...)` has the weights of `keras.layers.RNN(IndRNNCell(...))` and
    computes the same numbers. In addition it carries its state on every
    backend if `stateful`, and can reset individual samples.

    Args:
        units, activation, use_bias, max_length, layer_norm,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint,
            dropout, recurrent_dropout, seed: See `IndRNNCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Li et al., 2018](https://arxiv.org/abs/1803.04831)
    """

    cell: IndRNNCell
    cell_class = IndRNNCell
    cell_name = "indrnn_cell"
