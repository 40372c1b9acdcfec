"""The interface between scripts and devices."""

import contextlib
import os
import sys
import traceback

import keras
import numpy as np

from examples.support.errors import LOST
from examples.support.errors import STOPPED
from examples.support.errors import RunError


class Engine:
    """What all engines have in common, as it is in the simplest case.

    - `devices`: among so many a batch is split.
    - `models`: so many models, each with a part of the batch, are the whole.
      Where it is 1, the one model has the whole batch.
    - `processes`: how many there are.
    - `is_chief`: whether this process writes files and reports.

    As a context it is what the whole script runs in.
    """

    devices = 1
    models = 1
    processes = 1
    is_chief = True

    def __enter__(self):
        if not self.is_chief:
            # Print everything only once.
            sys.stdout = open(os.devnull, "w")
        return self

    def __exit__(self, kind, error, where):
        if error is not None and self.processes > 1:
            self._break_off(error)
        self.leave()

    def _break_off(self, error):
        """Exit without waiting: the other processes may wait for this one."""
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
        """At the end of the script."""

    def lost_others(self, error):
        """Whether that is how the end of another process shows itself."""
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
        """Where a model is built and compiled."""
        return contextlib.nullcontext()

    def prepare(self, model):
        """Once it is compiled."""

    def data(self, dataset):
        """From batches of whole size what this process gives to `fit`."""
        return dataset

    def agree(self, number):
        """The chief's integer, in all processes."""
        return number

    def wait(self):
        """For all processes."""

    def without_others(self):
        """For what Keras does with variables and only the chief does."""
        return contextlib.nullcontext()

    def alone(self, model, build):
        """The trained model on one device, `build()` being a new one.

        None in other processes than the chief's.
        """
        if not self.is_chief:
            return None
        plain = build()
        plain.set_weights(model.get_weights())
        # Saved weights are loaded into it, and those of the optimizer go along.
        plain.optimizer.build(plain.trainable_variables)
        return plain

    # --- for the file to resume from ---------------------------------------

    def read(self, model, variables):
        """Arrays that do not depend on how many devices there are.

        All processes have to call it, only the chief gets what counts.
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
        """A carried state of all processes, in the order of the batch."""
        return array

    def own_part(self, array):
        """The part of a gathered state that belongs to this process."""
        return array

    def spread(self, variable, seed):
        """Set a seed, for each model another one that comes of `seed`."""
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

    The first has the very seed, so that a file written by it serves all.
    """
    seed = np.array(seed)
    if number:
        derived = np.random.SeedSequence([int(seed[0]), number])
        seed[0] = derived.generate_state(1)[0] >> 1
    return seed


def part_of(dataset, number, parts):
    """Of every batch one of equal parts."""
    import tensorflow as tf

    def own(*batch):
        def rows(x):
            size = (x.shape[0] or tf.shape(x)[0]) // parts
            return x[number * size : (number + 1) * size]

        return tf.nest.map_structure(rows, batch)

    return dataset.map(own)
