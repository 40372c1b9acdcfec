"""Models of a single step that keep their states between calls."""

from typing import Any

import keras
from keras import ops

from keras_armin import validation
from keras_armin.step_model import StepModel
from keras_armin.step_model import step_model
from keras_armin.types import Tensor


def streaming_model(
    model: keras.Model,
    batch_size: int = 1,
    reads: bool = False,
    stepwise: tuple = (),
) -> "StreamingModel":
    """Convert a model of sequences into a step that keeps its states.

    Args:
        model, reads, stepwise: As for `keras_armin.step_model`.
        batch_size: int. Number of parallel streams. Defaults to `1`.

    Returns:
        A `StreamingModel`.

    Notes:
        `StreamingModel.export(folder)` writes a SavedModel that keeps the
        states itself, with the signatures `serve` and `reset` (TensorFlow,
        JAX). Other formats keep nothing between calls: export
        `keras_armin.step_model(model)` for those.
    """
    step = step_model(model, reads=reads, stepwise=stepwise)
    return StreamingModel(step, batch_size, name=f"{model.name}_stream")


class StreamingModel(keras.Model):
    """A `StepModel` with variables that hold its states.

    Called on the inputs of one step, each of shape `(batch_size, ...)`, it
    returns the outputs of the step without the states. `reset()` restarts all
    streams from the initial state, `reset(samples)` those where the bool
    tensor `samples` of shape `(batch_size,)` is true. `export` writes a
    SavedModel that keeps the states itself.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None, 3)), keras_armin.ARMIN(8, memory_slots=4)])
    >>> stream = keras_armin.streaming_model(model, batch_size=2)
    >>> tuple(stream(np.zeros((2, 3), "float32")).shape)
    (2, 12)
    """

    def __init__(
        self, step: StepModel, batch_size: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.step = step
        self.batch_size = validation.size("batch_size", batch_size)
        self._first_state = len(step.inputs) - step.num_states
        self.states = [
            self.add_weight(
                shape=(self.batch_size, *x.shape[1:]),
                initializer="zeros",
                dtype=x.dtype,
                trainable=False,
                autocast=False,
                name=x.name,
            )
            for x in step.inputs[self._first_state :]
        ]
        self.built = True
        self.reset()

    def call(self, inputs: Any) -> Any:
        inputs = keras.tree.flatten(inputs)
        self._check_batch(inputs)
        states = [ops.convert_to_tensor(variable) for variable in self.states]
        outputs = list(self.step([*inputs, *states], training=False))
        first = self.step.num_outputs
        for variable in self.states:
            variable.assign(outputs.pop(first))
        return outputs[0] if len(outputs) == 1 else outputs

    def reset(self, samples: Any = None) -> None:
        """Restart streams from the initial state.

        Args:
            samples: Bool tensor of shape `(batch_size,)`, true for the streams
                to restart. Defaults to `None`, all of them.
        """
        if samples is None:
            samples = [True] * self.batch_size
        samples = self._check_samples(samples)
        initial_states = self.step.initial_tensors(self.batch_size)
        for variable, initial in zip(self.states, initial_states):
            variable.assign(
                ops.where(samples[:, None], initial, variable.value)
            )

    def export(
        self,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        """Export a SavedModel with the signatures `serve` and `reset`.

        `serve` takes the inputs of a step. `reset` takes `samples`, a bool
        tensor of shape `(batch_size,)` that is true for the streams to
        restart, and returns it. It has no default: to restart all streams
        call `reset(tf.ones(batch_size, "bool"))`. The exported model starts in
        the current state.
        """
        backend = keras.backend.backend()
        if format != "tf_saved_model" or backend == "torch":
            raise ValueError(
                "A model that keeps its states can be exported with "
                "format='tf_saved_model' on TensorFlow or JAX only. Received: "
                f"format={format!r} on {backend}. For other formats, export "
                "`keras_armin.step_model(...)`, which takes and returns its "
                "states."
            )

        def reset(samples: Tensor) -> Tensor:
            self.reset(samples)
            return samples

        specs = [
            keras.InputSpec(
                shape=(self.batch_size, *x.shape[1:]), dtype=x.dtype
            )
            for x in self.step.inputs[: self._first_state]
        ]
        archive = keras.export.ExportArchive()
        archive.track(self)
        # The model is called on a single structure, a list of several inputs.
        inputs = specs if len(specs) == 1 else [specs]
        archive.add_endpoint("serve", self.__call__, inputs, **kwargs)
        samples = keras.InputSpec(
            shape=(self.batch_size,), dtype="bool", name="samples"
        )
        archive.add_endpoint("reset", reset, [samples], **kwargs)
        archive.write_out(str(filepath), verbose=verbose)

    def _check_samples(self, samples: Any) -> Tensor:
        validation.no_indices("samples", samples)
        samples = ops.cast(samples, "bool")
        if tuple(samples.shape) != (self.batch_size,):
            raise ValueError(
                f"Argument `samples` of '{self.name}' must be a bool tensor of "
                f"shape (batch_size,) = ({self.batch_size},), true for the "
                "streams to restart; `reset()` restarts all. Received: shape "
                f"{tuple(samples.shape)}"
            )
        return samples

    def _check_batch(self, inputs: list) -> None:
        expected = self.step.inputs[: self._first_state]
        if len(inputs) != len(expected):
            raise ValueError(
                f"Argument `inputs` of '{self.name}' must hold "
                f"{len(expected)} tensors. Received: {len(inputs)}"
            )
        for x, spec in zip(inputs, expected):
            shape = (self.batch_size, *spec.shape[1:])
            meaning = "(batch, ...) of one step, without a time axis,"
            validation.shape("inputs", x.shape, shape, self.name, meaning)
