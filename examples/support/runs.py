"""Training that survives a kill: logs, best weights, a file to resume from.

The folder of a run has these files:

    settings.json       the command line it was started with
    resume.npz          everything needed to continue, written after each epoch
    best.weights.h5     the weights with the best validation so far
    log.csv             a row per epoch
    tensorboard/        the same for TensorBoard
    result.json         the result, once the run is complete

An epoch is a number of updates, after which the run is validated and saved.
`--resume` repeats what was done since the last save, with the same results:
data is a function of seed and step, and the resume file, which is that of
`keras_armin.callbacks.ResumeTraining`, holds every variable.
"""

import contextlib
import csv
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time

import keras

import keras_armin
from examples.support import cli
from examples.support.cli import STOPPED
from examples.support.cli import RunError
from examples.support.distribution.engine import OneDevice

RESUME_FILE = "resume.npz"
BEST_WEIGHTS = "best.weights.h5"


class Run:
    """A run and its folder.

    Args:
        folder: Folder for its files.
        settings: dict of everything that determines the results. A resume
            checks that it is the same.
        resume: bool. Continue the run in `folder`.
        overwrite: bool. Restart even if `folder` holds an unfinished run.
        engine: An engine of `examples.support.distribution`. One process
            writes; all need access to the folder.
    """

    def __init__(
        self, folder, settings, resume=False, overwrite=False, engine=None
    ):
        self.folder = pathlib.Path(folder)
        self.engine = engine or OneDevice()
        self._settings = json.loads(json.dumps(settings, default=str))
        if resume:
            self._check_settings()
        # Killed before its first save: the beginning is as good.
        if not (resume and (self.folder / RESUME_FILE).exists()):
            self._start(overwrite or resume)
        with _as_run_errors():
            self.resume = Resume(self.folder / RESUME_FILE, self.engine)
        if self.engine.is_chief:
            self._rewrite_log()

    @classmethod
    def of(cls, arguments, engine=None, settings=None):
        """The run of a parsed command line."""
        return cls(
            arguments.output,
            settings or cli.settings(arguments),
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            engine=engine,
        )

    def _start(self, overwrite):
        unfinished = (self.folder / RESUME_FILE).exists() and not (
            self.folder / "result.json"
        ).exists()
        if unfinished and not overwrite:
            raise RunError(
                f"{self.folder} holds an unfinished run. Continue it with "
                "--resume, restart it with --overwrite, or choose another "
                "folder with --output."
            )
        self.engine.wait()  # until all processes have looked
        if self.engine.is_chief:
            self._clear()
        self.engine.wait()

    def _clear(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (RESUME_FILE, BEST_WEIGHTS, "log.csv", "result.json"):
            (self.folder / name).unlink(missing_ok=True)
        for old in (self.folder / "tensorboard").rglob("events.*"):
            old.unlink()
        _write(self.folder / "settings.json", json.dumps(self._settings))

    def _check_settings(self):
        settings = self._read_settings()
        changed = [
            f"{name}: {settings.get(name)!r} then, {value!r} now"
            for name, value in self._settings.items()
            if settings.get(name) != value
        ]
        if changed:
            raise RunError(
                f"--resume needs the settings {self.folder} was started "
                f"with. Different: {'; '.join(changed)}"
            )

    def _read_settings(self):
        path = self.folder / "settings.json"
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(
                f"--resume: there is no run in {self.folder}"
            ) from None
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}") from error

    @property
    def history(self):
        """The logs of all complete epochs."""
        return self.resume.history

    @property
    def epoch(self):
        """Number of complete epochs."""
        return self.resume.completed_epochs

    @property
    def seconds(self):
        """Time spent in complete epochs."""
        return self.history[-1]["seconds"] if self.history else 0.0

    def best(self, monitor, mode="min"):
        """The logs of the best epoch, None if there is none."""
        choose = min if mode == "min" else max
        comparable = [x for x in self.history if math.isfinite(x[monitor])]
        return choose(comparable, key=lambda logs: logs[monitor], default=None)

    def best_value(self, monitor, mode="min"):
        """The best value, rounded, None if there is none."""
        best = self.best(monitor, mode)
        return None if best is None else round(best[monitor], 5)

    def train(
        self,
        model,
        data,
        *,
        epochs,
        steps_per_epoch,
        validation_data,
        monitor,
        mode="min",
        stop_when=lambda history: False,
        callbacks=(),
    ):
        """Calls `model.fit` for the remaining epochs.

        Args:
            model: A compiled and built model.
            data: Function from the number of an update to a dataset that
                starts there.
            monitor, mode: The metric that selects the best weights, and
                whether it is to be `"min"` or `"max"`.
            stop_when: Function from the logs of all epochs to whether to stop.
            callbacks: Further callbacks, called before anything is saved.

        Returns:
            The logs of all epochs, including those before a resume.
        """
        if self.epoch >= epochs or (self.history and stop_when(self.history)):
            self.resume.set_model(model)
            self.resume.restore()
            return self.history
        if self.engine.is_chief:
            # The run is unfinished again.
            (self.folder / "result.json").unlink(missing_ok=True)
        model.fit(
            self.engine.data(data(self.epoch * steps_per_epoch)),
            initial_epoch=self.epoch,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            validation_data=self.engine.data(validation_data),
            shuffle=False,
            verbose=1 if sys.stdout.isatty() else 2,
            callbacks=[
                _StopWhenAsked(),
                *callbacks,
                _Clock(self),
                *(self._files(monitor, mode) if self.engine.is_chief else ()),
                # After a kill before it, the epoch is repeated.
                self.resume,
                _StopWhen(self, stop_when),
            ],
        )
        return self.history

    def _files(self, monitor, mode):
        return [
            _KeepBest(self, monitor, mode),
            keras.callbacks.CSVLogger(
                str(self.folder / "log.csv"), append=True
            ),
            keras.callbacks.TensorBoard(
                str(self.folder / "tensorboard"), write_graph=False
            ),
        ]

    def restore_best(self, model):
        path = self.folder / BEST_WEIGHTS
        if not path.exists():  # no epoch had a finite value
            return
        try:
            model.load_weights(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def finish(self, result):
        """Prints the result as one line of JSON, and saves it."""
        line = json.dumps(result)
        _write(self.folder / "result.json", line)
        print(f"\nlogs, weights and pictures are in {self.folder}")
        print(line)

    def _rewrite_log(self):
        """Removes what was logged after the last save."""
        path = self.folder / "log.csv"
        if not path.exists():
            return
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows[: self.epoch]])


class _Clock(keras.callbacks.Callback):
    """Adds the seconds since the start of the run to the logs."""

    def __init__(self, run):
        super().__init__()
        self.engine = run.engine
        self.started = time.monotonic() - run.seconds

    def on_epoch_end(self, epoch, logs=None):
        # The same in all processes, which have to stop at the same time.
        passed = round(1000 * (time.monotonic() - self.started))
        logs["seconds"] = self.engine.agree(passed) / 1000


class _KeepBest(keras.callbacks.Callback):
    """Like `ModelCheckpoint`, but a kill leaves the old file or the new."""

    def __init__(self, run, monitor, mode):
        super().__init__()
        self.run, self.monitor, self.mode = run, monitor, mode

    def on_epoch_end(self, epoch, logs=None):
        value, best = logs[self.monitor], self.run.best(self.monitor, self.mode)
        sign = 1 if self.mode == "min" else -1
        if best is not None and not sign * value < sign * best[self.monitor]:
            return
        if math.isfinite(value):
            path = self.run.folder / BEST_WEIGHTS
            partial = path.with_name(f"partial.{BEST_WEIGHTS}")
            with self.run.engine.without_others():
                self.model.save_weights(partial)
            os.replace(partial, path)


class Resume(keras_armin.callbacks.ResumeTraining):
    """The same for any engine: of several processes one writes."""

    def __init__(self, filepath, engine):
        super().__init__(filepath)
        self.engine = engine

    def restore(self):
        optimizer = self.model.optimizer
        with self.engine.scope():
            optimizer.build(self.model.trainable_variables)
        # Not in this scope, where TensorFlow does not read what each replica
        # has for itself.
        with _as_run_errors():
            super().restore()

    def get_variables(self):
        return self.engine.read(self.model, self.variables)

    def set_variables(self, arrays):
        self.engine.write(self.model, self.variables, arrays)

    def write_file(self, arrays):
        if self.engine.is_chief:
            super().write_file(arrays)


class _StopWhen(keras.callbacks.Callback):
    def __init__(self, run, stop_when):
        super().__init__()
        self.run, self.stop_when = run, stop_when

    def on_epoch_end(self, epoch, logs=None):
        if self.stop_when(self.run.history):
            self.model.stop_training = True


@contextlib.contextmanager
def _as_run_errors():
    try:
        yield
    except ValueError as error:
        raise RunError(f"{error} --overwrite does so.") from error


def _write(path, text):
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


@contextlib.contextmanager
def explained_errors(stopped=STOPPED):
    """Ends a script without a traceback on a `RunError` or a signal.

    Ctrl-C, and the termination signal that batch systems send, print
    `stopped`. The run remains as it was saved last.
    """
    before = {
        number: signal.signal(number, _interrupt)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    except RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr)
        sys.exit(130)
    finally:
        _stop_asked.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


_stop_asked = threading.Event()


def _interrupt(*_):
    _stop_asked.set()
    raise KeyboardInterrupt


class _StopWhenAsked(keras.callbacks.Callback):
    """Raises again: an exception in a signal handler can be lost.

    This happens in code whose exceptions are ignored, such as a finaliser.
    """

    def on_train_batch_end(self, batch, logs=None):
        if _stop_asked.is_set():
            raise KeyboardInterrupt


class Speed(keras.callbacks.Callback):
    """Logs the milliseconds per update, without validation."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates
        self._started = self._ended = None

    def on_epoch_begin(self, epoch, logs=None):
        self._started, self._ended = time.perf_counter(), None

    def on_test_begin(self, logs=None):
        self._ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = (self._ended or time.perf_counter()) - self._started
        logs["ms_per_update"] = 1000 * seconds / self.updates


def seed_everything(seed, deterministic=False):
    keras.utils.set_random_seed(seed)
    if deterministic and keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
