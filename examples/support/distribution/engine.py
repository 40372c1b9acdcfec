"""The interface between scripts and devices."""

import contextlib
import os
import sys
import traceback

import keras
import numpy as np

from examples.support.cli import STOPPED
from examples.support.cli import RunError

LOST = (
    "another process of this run has ended. The same command with --resume, "
    "in all processes, continues from the last complete epoch."
)


class Engine:
    """Base of all engines, with defaults for a single device.

    The whole script runs in its context.

    Attributes:
        devices: int. Number of devices that share a batch.
        models: int. Number of models, each for a part of the batch. If it is
            1, the model sees the whole batch.
        processes: int. Number of processes.
        is_chief: bool. Whether this process writes files and reports.
    """

    devices = 1
    models = 1
    processes = 1
    is_chief = True

    def __enter__(self):
        if not self.is_chief:
            sys.stdout = open(os.devnull, "w")  # print everything only once
        return self

    def __exit__(self, kind, error, where):
        if error is not None and self.processes > 1:
            self._abort(error)
        self.leave()

    def _abort(self, error):
        """Exits at once: the other processes may be waiting for this one."""
        if self.lost_others(error):
            print(f"error: {LOST}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(f"\n{STOPPED}", file=sys.stderr)
        elif isinstance(error, RunError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)

    def leave(self):
        """Called at the end of the script."""

    def lost_others(self, error):
        """Whether the error means that another process has ended."""
        return False

    def check_batch_size(self, batch_size):
        if batch_size % self.devices:
            raise RunError(
                f"--batch-size {batch_size} cannot be split among "
                f"{self.devices} devices: it has to be a multiple of "
                f"{self.devices}."
            )

    def samples(self, batch_size):
        """The batch size to build a model for."""
        return batch_size // self.models

    def scope(self):
        """The context in which to build and compile a model."""
        return contextlib.nullcontext()

    def prepare(self, model):
        """Called with the compiled model."""

    def data(self, dataset):
        """The input of `fit` in this process, from global batches."""
        return dataset

    def agree(self, number):
        """The chief's integer, in all processes."""
        return number

    def wait(self):
        """Waits for all processes."""

    def without_others(self):
        """The context in which only the chief creates variables."""
        return contextlib.nullcontext()

    def alone(self, model, build):
        """The trained model on one device, made with `build()`.

        None in all processes but the chief's.
        """
        if not self.is_chief:
            return None
        plain = build()
        plain.set_weights(model.get_weights())
        # Weights to load include those of the optimizer.
        plain.optimizer.build(plain.trainable_variables)
        return plain

    # --- for the file to resume from ---------------------------------------

    def read(self, model, variables):
        """Arrays that do not depend on the number of devices.

        Must be called in all processes; the result is complete in the chief's.
        """
        states = {
            id(variable): self.gather(array)
            for layer in stateful_layers(model)
            for variable, array in zip(layer.states, layer.get_state().values())
        }
        return [
            states[id(v)]
            if id(v) in states
            else keras.ops.convert_to_numpy(v.value)
            for v in variables
        ]

    def write(self, model, variables, arrays):
        given = {id(v): array for v, array in zip(variables, arrays)}
        for layer in stateful_layers(model):
            own = [self.own_part(given.pop(id(v))) for v in layer.states]
            layer.set_state(dict(zip(layer.cell.state_names, own)))
        for variable in variables:
            if is_seed(variable):
                self.spread(variable, given[id(variable)])
            elif id(variable) in given:
                variable.assign(given[id(variable)])

    def gather(self, array):
        """A carried state of the global batch, from that of this process."""
        return array

    def own_part(self, array):
        """The part of a gathered state that belongs to this process."""
        return array

    def spread(self, variable, seed):
        """Sets a seed, to a different value in each model."""
        variable.assign(seed)


class OneDevice(Engine):
    def alone(self, model, build):
        return model


def stateful_layers(model):
    return [x for x in model.layers if getattr(x, "states", None)]


def is_seed(variable):
    return variable.name == "seed_generator_state"


def spread_seeds(engine, model):
    for variable in model.variables:
        if is_seed(variable):
            engine.spread(variable, keras.ops.convert_to_numpy(variable.value))


def seed_of(number, seed):
    """The state of a seed generator for one of several models.

    The first model keeps the seed, so that a saved one serves all.
    """
    seed = np.array(seed)
    if number:
        derived = np.random.SeedSequence([int(seed[0]), number])
        seed[0] = derived.generate_state(1)[0] >> 1
    return seed


def part_of(dataset, number, parts):
    """One of equal parts of every batch."""
    import tensorflow as tf

    def rows(x):
        size = (x.shape[0] or tf.shape(x)[0]) // parts
        return x[number * size : (number + 1) * size]

    return dataset.map(lambda *batch: tf.nest.map_structure(rows, batch))
