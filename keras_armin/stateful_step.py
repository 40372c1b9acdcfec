"""A step that keeps its memory itself, to be served as a stream."""

from typing import Any

import keras
from keras import ops

from keras_armin import checks
from keras_armin.streaming import step_model


def streaming_model(
    model: keras.Model,
    batch_size: int = 1,
    reads: bool = False,
    stepwise: tuple = (),
) -> "StreamingModel":
    """From a model of sequences, a step that keeps its states between calls.

    Args:
        model, reads, stepwise: As for `keras_armin.step_model`.
        batch_size: int. Number of streams that run side by side. Defaults to
            `1`.

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

    It is called on the inputs of one step, of shape `(batch_size, ...)` each,
    and returns what the step returns, but for the states. `reset()` starts
    all streams anew, `reset(samples)` those at which the bool tensor `samples`
    of shape `(batch_size,)` is true. `export` writes a SavedModel that keeps
    the states on its side.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None, 3)), keras_armin.ARMIN(8, memory_slots=4)])
    >>> stream = keras_armin.streaming_model(model, batch_size=2)
    >>> tuple(stream(np.zeros((2, 3), "float32")).shape)
    (2, 16)
    """

    def __init__(self, step, batch_size=1, **kwargs):
        super().__init__(**kwargs)
        self.step = step
        self.batch_size = checks.size("batch_size", batch_size)
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
        """Start all streams anew, or those that `samples` marks."""
        if samples is None:
            samples = [True] * self.batch_size
        samples = ops.cast(samples, "bool")
        checks.shape(
            "samples", samples.shape, (self.batch_size,), self.name, "(batch,)"
        )
        anew = self.step.initial_tensors(self.batch_size)
        for variable, initial in zip(self.states, anew):
            variable.assign(
                ops.where(samples[:, None], initial, variable.value)
            )

    def export(self, filepath, format="tf_saved_model", verbose=True, **kwargs):
        """Write a SavedModel with the signatures `serve` and `reset`.

        `serve` takes the inputs of a step, `reset` a bool tensor of shape
        `(batch_size,)`. The file starts in the state that this model is in.
        """
        backend = keras.backend.backend()
        if format != "tf_saved_model" or backend == "torch":
            raise ValueError(
                "A model that keeps its states can be exported as "
                "format='tf_saved_model', from TensorFlow or JAX. Received: "
                f"format={format!r} on {backend}. Other formats keep nothing "
                "between calls: export `keras_armin.step_model(...)`, whose "
                "states come in and go out."
            )

        def reset(samples):
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
        # The model is called on one structure, a list where there are more.
        inputs = specs if len(specs) == 1 else [specs]
        archive.add_endpoint("serve", self.__call__, inputs, **kwargs)
        samples = keras.InputSpec(shape=(self.batch_size,), dtype="bool")
        archive.add_endpoint("reset", reset, [samples], **kwargs)
        archive.write_out(str(filepath), verbose=verbose)

    def _check_batch(self, inputs):
        expected = self.step.inputs[: self._first_state]
        if len(inputs) != len(expected):
            raise ValueError(
                f"Argument `inputs` of '{self.name}' must hold "
                f"{len(expected)} tensors. Received: {len(inputs)}"
            )
        for x, spec in zip(inputs, expected):
            shape = (self.batch_size, *spec.shape[1:])
            checks.shape("inputs", x.shape, shape, self.name, "(batch, ...)")
