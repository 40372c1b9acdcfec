"""Keras callbacks for training memory layers."""

import json
import math
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin import backends
from keras_armin import keras_private
from keras_armin import validation
from keras_armin.inspection import MemoryTrace
from keras_armin.inspection import trace_memory
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_layer import MINIMUM
from keras_armin.memory_layer import MemoryLayer
from keras_armin.memory_rnn import MemoryRNN

# What NumPy and JSON raise for a file that is damaged, or something else.
_NOT_READABLE = (
    OSError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)


class _Annealing(keras.callbacks.Callback):
    """Sets a scalar weight of all cells in a model during training."""

    weight: str

    def __init__(
        self,
        schedule: Callable[[int], Any],
        per: str = "batch",
        initial_step: int = 0,
    ) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(
                "Argument `schedule` must be a learning rate schedule or a "
                f"function from an integer to a float. Received: {schedule!r}"
            )
        self.schedule = schedule
        self.per = validation.choice("per", per, ("batch", "epoch"))
        self.step = validation.count("initial_step", initial_step)
        self._first_step_of_epoch = self.step
        self._value: float | None = None

    def _cells(self) -> list[MemoryCell]:
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryCell)
            and getattr(layer, self.weight, None) is not None
        ]

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._value = None
        kind = type(self).__name__
        if not self._cells():
            raise ValueError(
                f"`{kind}` found no ARMIN with a `{self.weight}` in the model "
                f"'{self.model.name}', nor another layer with one. "
                + self._advice
            )
        for layer in keras_private.all_layers(self.model):
            if (
                isinstance(layer, MemoryLayer)
                and self.weight in layer.schedules
            ):
                raise ValueError(
                    f"Layer '{layer.name}' has its own schedule for "
                    f"`{self.weight}`. Use either that or `{kind}`."
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._first_step_of_epoch = self.step
        if self.per == "epoch":
            self._set(epoch)

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        if self.per == "batch":
            self._set(self._first_step_of_epoch + batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.step = self._first_step_of_epoch + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None and self._value is not None:
            logs[self.weight] = self._value

    def _set(self, step: int) -> None:
        value = float(ops.convert_to_numpy(self.schedule(step)))
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"The `schedule` of `{type(self).__name__}` must return finite "
                f"numbers of at least 0. Received: {value} at step {step}"
            )
        value = max(value, MINIMUM[self.weight])
        if value == self._value:
            return
        self._value = value
        # Through `self.model`, which on JAX syncs the variables from the
        # training loop first.
        for cell in self._cells():
            getattr(cell, self.weight).assign(value)


class TemperatureAnnealing(_Annealing):
    """Sets the temperature of every ARMIN in the model during training.

    It applies to `ARMIN`, `TARDIS` and `AwTA` layers and their bare cells, at
    any depth of the model.

    Args:
        schedule: A `keras.optimizers.schedules` schedule, or a function from
            an integer to a float. Values below 0.001, as of a cosine decay to
            0, are replaced by 0.001.
        per: `"batch"` or `"epoch"`: the unit of the schedule. Batches are
            counted over the whole training, epochs as `fit` numbers them, so
            that with `"epoch"` a `fit(initial_epoch=...)` continues the
            schedule. Defaults to `"batch"`. With `steps_per_execution` the
            batches of one execution share the temperature of the first.
        initial_step: int. Number of the first batch. Defaults to `0`.

    The current value is added to the logs of an epoch as `temperature`.
    """

    weight = "temperature"
    _advice = "There is no temperature to set."


class NoiseAnnealing(_Annealing):
    """Sets the `noise_scale` of every ARMIN in the model during training.

    It applies to `ARMIN` layers and bare `ARMINCell`s at any depth of the
    model that were created with a `noise_scale` above 0; those created with 0
    never draw noise.

    Args:
        schedule, per, initial_step: As for `TemperatureAnnealing`; the noise
            scale may fall to 0.

    The current value is added to the logs of an epoch as `noise_scale`.
    """

    weight = "noise_scale"
    _advice = "A layer created with `noise_scale=0` never draws noise."


class ValidationState(keras.callbacks.Callback):
    """Separates the states of validation and training inside `fit`.

    Validation starts from the initial state of stateful layers, and training
    continues afterwards from its own state. Applies to the layers of this
    package. Use a new instance for each `fit`.

    Args:
        reset_each_epoch: bool. Also reset the state before every epoch.
            Defaults to `False`.
    """

    def __init__(self, reset_each_epoch: bool = False) -> None:
        super().__init__()
        self.reset_each_epoch = validation.flag(
            "reset_each_epoch", reset_each_epoch
        )
        self._training = False
        self._saved: list | None = None

    def _layers(self) -> list[MemoryRNN]:
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryRNN) and layer.states is not None
        ]

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._training = True

    def on_train_end(self, logs: dict | None = None) -> None:
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if self.reset_each_epoch:
            for layer in self._layers():
                layer.reset_state()

    def on_test_begin(self, logs: dict | None = None) -> None:
        if not self._training:
            return
        layers = self._layers()
        self._saved = [layer.get_state() for layer in layers]
        for layer in layers:
            layer.reset_state()

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._saved is None:
            return
        for layer, state in zip(self._layers(), self._saved):
            layer.set_state(state)
        self._saved = None


class _SavedTraining(NamedTuple):
    history: list
    generator: np.ndarray | None
    variables: list


class ResumeTraining(keras.callbacks.Callback):
    """Saves the state of training after each epoch, and resumes from it.

    After an interruption the same `fit` in a new process continues with the
    first epoch that was not completed, and ends with the same weights as
    without the interruption. Saved are weights, optimizer, the steps of
    schedules, and what `keras.callbacks.BackupAndRestore` leaves out: seeds
    (on torch also the state of its global generator) and the states that
    stateful layers carry. The file is replaced atomically.

    List it after the callbacks that change the logs or save files themselves.

    Args:
        filepath: Path of the file, such as `"run/resume.npz"`. If it exists,
            training continues from it; delete it to start from the beginning.
            It is kept after training, so that the same call with more
            `epochs` continues.

    Attributes:
        history: List of dicts: the logs of each epoch, and its number as
            `"epoch"`. Includes those before an interruption.

    Notes:
        An epoch has to see the same data after an interruption: pass arrays
        with `shuffle=False`, and let a dataset that continues from one epoch
        to the next begin with epoch `completed_epochs`. The state of other
        callbacks is not saved: for `TemperatureAnnealing` and
        `NoiseAnnealing` use `per="epoch"`, or
        `initial_step=completed_epochs * steps_per_epoch`. On TensorFlow,
        bitwise equal weights also require
        `tf.config.experimental.enable_op_determinism()`.

        With several processes, a subclass overrides `get_variables` and
        `set_variables` to gather and distribute the states that each process
        carries, and `write_file` so that one process writes.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((5, 3)), keras_armin.ARMIN(8, memory_slots=4)])
    >>> model.compile("adam", "mse")
    >>> x, y = np.zeros((4, 5, 3)), np.zeros((4, 12))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/resume.npz"
    ...     resume = keras_armin.callbacks.ResumeTraining(path)
    ...     fitted = model.fit(x, y, shuffle=False, epochs=2, verbose=0,
    ...                        callbacks=[resume])
    ...     again = keras_armin.callbacks.ResumeTraining(path)
    >>> again.completed_epochs
    2
    """

    def __init__(self, filepath: str | os.PathLike) -> None:
        super().__init__()
        self.filepath = pathlib.Path(filepath)
        self.history: list[dict[str, Any]] = []
        if self.filepath.exists():
            self.history = self._read_file().history

    @property
    def completed_epochs(self) -> int:
        """Number of completed epochs: 0 if there is no file."""
        return self.history[-1]["epoch"] + 1 if self.history else 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self.model.built:
            raise ValueError(
                "`ResumeTraining` needs a model that is built before `fit`. "
                f"'{self.model.name}' is not: call it on data, or add a "
                "`keras.Input`."
            )
        self.restore()
        keras_private.set_initial_epoch(self.model, self.completed_epochs)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        # Otherwise it would apply to a later `fit` without this callback too.
        keras_private.set_initial_epoch(self.model, None)

    def on_train_end(self, logs: dict | None = None) -> None:
        keras_private.set_initial_epoch(self.model, None)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs = {
            name: np.asarray(x).tolist() for name, x in (logs or {}).items()
        }
        self.history.append({"epoch": epoch, **logs})
        self.write_file(self.get_variables())

    def restore(self) -> None:
        """Assign what the file holds, if there is one, to the model.

        To do so without training, call `set_model(model)` first.
        """
        self.history = []
        if not self.filepath.exists():
            return
        saved = self._read_file()
        self.history = saved.history
        model = self.model
        # Otherwise it has no variables before the first update.
        model.optimizer.build(model.trainable_variables)
        expected = self.get_variables()
        self._check_shapes(saved.variables, expected)
        self.set_variables(
            [
                # NumPy does not know bfloat16, and saves its bytes.
                array.view(like.dtype) if array.dtype.kind == "V" else array
                for array, like in zip(saved.variables, expected)
            ]
        )
        if saved.generator is not None:
            backends.set_generator_state(saved.generator)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the model, of its optimizer and carried states."""
        own = [*self.model.variables, *self.model.optimizer.variables]
        # Keras does not track the states of its own stateful layers.
        tracked = {id(variable) for variable in own}
        return own + [x for x in self._carried_states() if id(x) not in tracked]

    def get_variables(self) -> list[np.ndarray]:
        """The values of `variables`."""
        carried = {id(variable) for variable in self._carried_states()}
        return [
            backends.gather_state(variable)
            if id(variable) in carried
            else np.asarray(ops.convert_to_numpy(variable.value))
            for variable in self.variables
        ]

    def set_variables(self, arrays: list[np.ndarray]) -> None:
        """Assign what `get_variables` has returned."""
        carried = {id(variable) for variable in self._carried_states()}
        for variable, array in zip(self.variables, arrays):
            if id(variable) in carried:
                backends.scatter_state(variable, array)
            else:
                variable.assign(array)

    def write_file(self, arrays: list[np.ndarray]) -> None:
        """Replace the file by one with these values and the history."""
        self.filepath.parent.mkdir(parents=True, exist_ok=True)
        partial = self.filepath.with_name(f"{self.filepath.name}.partial")
        named = {f"variable_{i}": array for i, array in enumerate(arrays)}
        generator = backends.generator_state()
        if generator is not None:
            named["generator"] = generator
        with partial.open("wb") as file:
            np.savez(file, history=json.dumps(self.history), **named)
        os.replace(partial, self.filepath)

    def _read_file(self) -> _SavedTraining:
        try:
            with np.load(self.filepath) as file:
                arrays = {name: file[name] for name in file.files}
            return _SavedTraining(
                json.loads(str(arrays.pop("history"))),
                arrays.pop("generator", None),
                [arrays[f"variable_{i}"] for i in range(len(arrays))],
            )
        except _NOT_READABLE as error:
            raise ValueError(
                f"{self.filepath} is damaged, or not a file of "
                f"`ResumeTraining` ({error}). Delete it to start from the "
                "beginning."
            ) from error

    def _check_shapes(
        self, arrays: list[np.ndarray], expected: list[np.ndarray]
    ) -> None:
        difference = None
        if len(arrays) != len(expected):
            difference = (
                f"{len(expected)} variables, and the file {len(arrays)}"
            )
        for variable, x, y in zip(self.variables, arrays, expected):
            if difference is None and x.shape != y.shape:
                difference = (
                    f"'{variable.path}' of shape {y.shape}, and the file one "
                    f"of shape {x.shape}"
                )
        if difference is None:
            return
        raise ValueError(
            f"{self.filepath} does not fit this model and optimizer: they have "
            f"{difference}. Delete it to start from the beginning."
        )

    def _carried_states(self) -> list[keras.Variable]:
        """The variables that hold the state of each sample."""
        return [
            variable
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, keras.layers.RNN) and layer.states
            for variable in keras.tree.flatten(layer.states)
        ]


class SlotUsage(keras.callbacks.Callback):
    """Logs how evenly a layer reads its memory, at the end of each epoch.

    Added to the logs, and so to `History`, `CSVLogger` and `TensorBoard`:

    - `slot_usage`: fraction of the slots that had the largest read weight at
      any step;
    - `read_entropy`: entropy in bits of all reads, 0 if the same slot is
      always read, log2(memory_slots) if all slots are read equally often.

    List it before the callbacks that use these logs.

    Args:
        layer: The `ARMIN`, or `keras.layers.RNN` around an `ARMINCell`.
        sequences: Inputs of that layer, `(batch, time, features)`; or, with
            `inputs_model`, inputs of that model.
        inputs_model: Model that computes the inputs of the layer, such as
            `keras.Model(model.inputs, layer.input)`. Defaults to `None`.
        prefix: str. Prefix of both names, to distinguish several layers.
            Defaults to `""`.
    """

    def __init__(
        self,
        layer: keras.layers.RNN,
        sequences: Any,
        inputs_model: keras.Model | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.sequences = sequences
        self.inputs_model = inputs_model
        self.prefix = prefix

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is None:
            return
        self.model  # noqa: B018 syncs the variables on JAX
        sequences = self.sequences
        if self.inputs_model is not None:
            sequences = self.inputs_model(sequences)
        trace = trace_memory(self.layer, sequences)
        logs[f"{self.prefix}slot_usage"] = slot_usage(trace)
        logs[f"{self.prefix}read_entropy"] = entropy_in_bits(read_share(trace))


def slot_usage(trace: MemoryTrace) -> float:
    """Fraction of the slots that had the largest read weight at any step."""
    slots = trace.read_weights.shape[-1]
    return np.isin(np.arange(slots), trace.read_slots).sum() / slots


def read_share(trace: MemoryTrace) -> np.ndarray:
    """Fraction of all reads that went to each slot."""
    total = trace.read_weights.sum(axis=(0, 1), dtype="float64")
    return total / total.sum()


def entropy_in_bits(share: np.ndarray) -> float:
    used = share[share > 0]
    return float(-(used * np.log2(used)).sum())
