"""Models of a single step that take and return their states."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_armin import validation
from keras_armin.keras_private import all_layers
from keras_armin.keras_private import run_through_graph
from keras_armin.recurrent_step import RecurrentStep
from keras_armin.types import Tensor

# Layers that process the steps of a sequence independently.
_STEPWISE_LAYERS = (
    keras.layers.InputLayer,
    keras.layers.Identity,
    keras.layers.Dense,
    keras.layers.Embedding,
    keras.layers.Masking,
    keras.layers.TimeDistributed,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Softmax,
    keras.layers.Rescaling,
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.ActivityRegularization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.BatchNormalization,
    keras.layers.UnitNormalization,
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Concatenate,
)
# Likewise, operations of functional models, such as `x + y`.
_STEPWISE_OPERATIONS = {
    "Add",
    "Subtract",
    "Multiply",
    "Divide",
    "TrueDivide",
    "Negative",
    "Cast",
    "Tanh",
    "Sigmoid",
    "Relu",
    "Gelu",
    "Silu",
    "Exp",
    "Square",
    # Operations on masks.
    "Equal",
    "NotEqual",
    "Any",
    "LogicalAnd",
    "LogicalOr",
    "LogicalNot",
}


class StepModel(keras.Model):
    """A model of a single step that takes and returns its states.

    Created by `keras_armin.step_model`. Called on the list
    `[*inputs, *states]` it returns `[*outputs, *new_states]`, followed with
    `reads=True` by the slots that were read, `(batch,)` for each layer with a
    memory. It is an ordinary Keras model without a loop, and can be exported
    as such.

    Attributes:
        output_names: Names of what a call returns, also in exported files: the
            layer that an output of the model comes from, as in `"dense"`; for
            the new value of state `"armin_h"`, an input, `"new_armin_h"`; and
            for the slots read by layer `"armin"`, `"armin_read"`.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None, 3)), keras_armin.ARMIN(8, memory_slots=4)])
    >>> step = keras_armin.step_model(model)
    >>> states = step.initial_states(batch_size=2)
    >>> output, *states = step([np.zeros((2, 3), "float32"), *states])
    >>> tuple(output.shape)
    (2, 12)
    """

    def __call__(self, inputs: list, *args: Any, **kwargs: Any) -> Any:
        self._check_inputs(inputs)
        # Keras does not accept a list of arrays and tensors, which inputs and
        # states usually are.
        inputs = [
            ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
            for x in inputs
        ]
        return super().__call__(inputs, *args, **kwargs)

    def initial_states(self, batch_size: int = 1) -> list[np.ndarray]:
        """Initial states as NumPy arrays, for the first call."""
        batch_size = validation.size("batch_size", batch_size)
        states = self.initial_tensors(batch_size)
        return [np.array(ops.convert_to_numpy(state)) for state in states]

    def initial_tensors(self, batch_size: int = 1) -> list:
        """Initial states as tensors, also inside a graph."""
        return [
            state
            for layer in self._recurrent_steps
            for state in layer.initial_states(batch_size)
        ]

    def _check_inputs(self, inputs: Any) -> None:
        is_list = isinstance(inputs, (list, tuple))
        if is_list and len(inputs) == len(self.inputs):
            return
        num_inputs = len(self.inputs) - self.num_states
        got = f"{len(inputs)} of them" if is_list else type(inputs).__name__
        raise ValueError(
            f"Argument `inputs` of '{self.name}' must be a list of "
            f"{len(self.inputs)} tensors, {num_inputs} for the step and "
            f"{self.num_states} states. Received: {got}. Pass `[x, "
            "*step.initial_states(batch_size)]` at the first step, then the "
            "states that the step before has returned."
        )

    @property
    def num_states(self) -> int:
        """Number of states among the inputs, and among the outputs."""
        return sum(len(x.state_sizes) for x in self._recurrent_steps)

    @property
    def num_outputs(self) -> int:
        """Number of outputs before the states."""
        reads = sum(x.has_reads for x in self._recurrent_steps)
        return len(self.outputs) - self.num_states - reads

    @property
    def _recurrent_steps(self) -> list[RecurrentStep]:
        return [x for x in self.layers if isinstance(x, RecurrentStep)]


def step_model(
    model: keras.Model, reads: bool = False, stepwise: tuple = ()
) -> StepModel:
    """Convert a model of sequences into a model of a single step.

    Each recurrent layer becomes one step of its cell, with the same weights;
    its states are inputs and outputs. Stepping over a sequence gives the same
    outputs as the model at inference. If a layer returns only its last output,
    the step returns the output of a sequence that ends there. A `reset` that
    the model passes to its layers is ignored: to restart, pass
    `initial_states()`.

    Args:
        model: A built functional or `Sequential` model. Its inputs have the
            shape `(batch, time, ...)`; those of the step have the shape
            `(batch, ...)`.
        reads: bool. Also return the slot that each memory layer has read, -1
            at a masked step. Defaults to `False`.
        stepwise: Classes of further layers in the model that process the steps
            of a sequence independently. Unrecognised layers are rejected
            unless listed here. Defaults to `()`.

    Returns:
        A `StepModel`.

    Notes:
        Any recurrent layer of Keras may be among the layers. Layers that look
        at several steps at once (`Bidirectional`, convolutions, pooling over
        time) are rejected, and so are unrecognised layers unless they are
        listed in `stepwise`, as in `stepwise=(MyLayer,)`. The step model has
        no loop and can be exported in every format of `keras_armin.export`.
    """
    _check_model(model)
    sequence_inputs = [x for x in model.inputs if len(x.shape) > 1]
    steps = [
        keras.Input(x.shape[2:], dtype=x.dtype, name=x.name)
        for x in sequence_inputs
    ]
    walk = _StepBuilder(reads, tuple(stepwise))
    outputs = walk.through(model, _with_time(model, steps))
    step = StepModel(
        [*steps, *walk.states],
        [*_without_time(model, outputs), *walk.new_states, *walk.reads],
        name=f"{model.name}_step",
    )
    # Keras names them after operations, those that remove the time axis.
    step.output_names = _output_names(model, step)
    return step


def _output_names(model: keras.Model, step: StepModel) -> list[str]:
    outputs = keras.Model(model.inputs, model.outputs).output_names
    states = [x.name for x in step.inputs[-step.num_states :]]
    reads = [x.name for x in step._recurrent_steps if x.has_reads]
    names: list[str] = []
    # Formats such as ONNX have one namespace for inputs and outputs.
    taken = {x.name for x in step.inputs}
    for name in [
        *outputs,
        *(f"new_{name}" for name in states),
        *(f"{name}_read" for name in reads),
    ]:
        unique, number = name, 0
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        names.append(unique)
    return names


def _with_time(model: keras.Model, steps: list) -> list:
    """The inputs of the model: sequences of one step.

    Inputs without a time axis, such as a `reset`, are placeholders.
    """
    remaining = iter(steps)

    def one_step(x: Tensor) -> Any:
        if len(x.shape) > 1:
            return ops.expand_dims(next(remaining), 1)
        return keras.Input((), dtype=x.dtype)

    return [one_step(x) for x in model.inputs]


def _without_time(model: keras.Model, outputs: list) -> list:
    time = next(x.shape[1] for x in model.inputs if len(x.shape) > 1)

    def is_sequence(whole: Any, step: Any) -> bool:
        return (
            len(whole.shape) > 1
            and whole.shape[1] == time
            and step.shape[1] == 1
        )

    return [
        ops.squeeze(step, 1) if is_sequence(whole, step) else step
        for whole, step in zip(model.outputs, outputs)
    ]


class _StepBuilder:
    """Replays a model with steps in place of its recurrent layers."""

    def __init__(self, reads: bool, stepwise: tuple) -> None:
        self.with_reads = reads
        self.stepwise = (*_STEPWISE_LAYERS, *stepwise)
        self.states: list = []
        self.new_states: list = []
        self.reads: list = []
        self._names: set[str] = set()

    def through(self, model: keras.Model, inputs: list) -> list:
        # Also converts a `Sequential`, and flattens the outputs.
        flat = keras.Model(model.inputs, model.outputs)
        return run_through_graph(flat, inputs, self._call)

    def _call(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, keras.layers.RNN):
            return self._step(layer, *args, **kwargs)
        if _is_functional(layer) and _has_recurrence(layer):
            outputs = self.through(layer, keras.tree.flatten([args, kwargs]))
            return keras.tree.pack_sequence_as(layer.output, outputs)
        self._check_stepwise(layer)
        return layer(*args, **kwargs)

    def _step(
        self,
        rnn: keras.layers.RNN,
        sequences: Tensor,
        initial_state: Any = None,
        mask: Tensor = None,
        training: Any = None,
        **_: Any,
    ) -> Any:
        if initial_state is not None:
            raise ValueError(
                f"The model passes an `initial_state` to layer '{rnn.name}', "
                "from which each step would restart. Make a step model of "
                "each part, and pass the states between them."
            )
        step = RecurrentStep(rnn, reads=self.with_reads)
        if step.name in self._names:
            raise ValueError(
                f"Layer '{rnn.name}' is used more than once in the model; each "
                "use would need its own states. Use separate layers with the "
                "same weights."
            )
        self._names.add(step.name)
        states = [
            keras.Input((size,), dtype=rnn.compute_dtype, name=name)
            for name, size in zip(step.state_names, step.state_sizes)
        ]
        output, new_states, read = step(sequences, states, mask=mask)
        self.states += states
        self.new_states += new_states
        self.reads += read
        return [output, *new_states] if rnn.return_state else output

    def _check_stepwise(self, layer: Any) -> None:
        if isinstance(layer, self.stepwise):
            return
        is_layer = isinstance(layer, keras.layers.Layer)
        kind = type(layer).__name__
        if not is_layer and kind in _STEPWISE_OPERATIONS:
            return
        advice = "list its class in `stepwise` if it does"
        if isinstance(layer, keras.layers.Bidirectional):
            advice = "it starts from the end, which a stream does not have"
        raise ValueError(
            "A step model needs layers that process steps independently. Layer "
            f"'{layer.name}' of class {kind} is not known to: {advice}."
        )


def _is_functional(layer: Any) -> bool:
    return isinstance(layer, keras.Model) and bool(
        getattr(layer, "inputs", None)
    )


def _has_recurrence(model: keras.Model) -> bool:
    return any(isinstance(x, keras.layers.RNN) for x in all_layers(model))


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `model` must be a `keras.Model`. Received: "
            f"{type(model).__name__}"
        )
    if not _is_functional(model) or not model.built:
        raise ValueError(
            "Argument `model` must be a functional or `Sequential` model that "
            f"is built. Received: '{model.name}' of class "
            f"{type(model).__name__}. A subclassed model can call its cells "
            "step by step itself: `cell(inputs, states)`."
        )
    if not _has_recurrence(model):
        raise ValueError(
            f"Argument `model` must have a recurrent layer. '{model.name}' "
            "has none."
        )
    if all(len(x.shape) < 2 for x in model.inputs):
        raise ValueError(
            f"Argument `model` must have an input of shape (batch, time, ...). "
            f"Received: '{model.name}' with inputs of the shapes "
            f"{[tuple(x.shape) for x in model.inputs]}"
        )
