"""Continuing an interrupted `fit`."""

import json
import os
import pathlib
import zipfile
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin import backends
from keras_armin import keras_private

# What NumPy and JSON raise for a file that is damaged, or something else.
_NOT_READABLE = (
    OSError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)


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
