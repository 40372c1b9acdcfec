"""The program of tests/test_distribution.py, for one or more processes.

    python -m tests.helpers.distributed train FILE CASE... -- OPTIONS
    python -m tests.helpers.distributed fork PORT COUNT FILE CASE... -- OPTIONS
    python -m tests.helpers.distributed char_lm ARGUMENTS

The first trains small networks on the devices that OPTIONS of a command line
ask for, and writes what came out into FILE. The second does so in COUNT
processes, as torchrun would start them, without the time that each takes to
import all this. The last is `char_lm.py`; with DIES in the environment it
kills itself in its second epoch.
"""

import contextlib
import os
import signal
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from examples import char_lm
from examples import permuted_mnist
from examples.support import distribution
from examples.support import runs
from examples.support.distribution.engine import OneDevice
from examples.support.distribution.engine import is_seed
from keras_armin import noise
from keras_armin.callbacks import ValidationState

BATCH, STEPS, SYMBOLS, UPDATES = 8, 4, 5, 20
CASES = ("pixels", "carried", "noisy")
_SIZES = (
    *("--units", "8", "--slots", "4", "--batch-size", str(BATCH)),
    *("--learning-rate", "3e-3"),
)


def options(*argv):
    return char_lm.parse_arguments(
        [*_SIZES, "--embedding", "6", "--steps", str(STEPS), *argv]
    )


def build_model(case, samples):
    if case == "pixels":
        arguments = permuted_mnist.parse_arguments(
            [*_SIZES, "--addressing", "soft", "--memory-dim", "6"]
        )
        return permuted_mnist.build_model(arguments, STEPS, UPDATES)
    return char_lm.build_model(options(), SYMBOLS, samples, UPDATES)


def batches(case):
    """One for each update; carried states are reset at random."""
    rng = np.random.default_rng(3)
    if case == "pixels":
        x = rng.random((UPDATES, BATCH, STEPS, 1), "float32")
        y = rng.integers(0, 10, (UPDATES, BATCH))
    else:
        # Each symbol follows from the one before: something to learn.
        first = rng.integers(0, SYMBOLS, (UPDATES, BATCH, 1))
        ids = (first + np.arange(STEPS + 1)) % SYMBOLS
        x = {
            "ids": ids[..., :-1].astype("int32"),
            "reset": rng.random((UPDATES, BATCH)) < 0.1,
        }
        y = ids[..., 1:]
    return tf.data.Dataset.from_tensor_slices((x, y.astype("int32")))


def train(engine, case, validate=False):
    """The model, and as a dict of arrays what it has become."""
    runs.seed_everything(1)
    if case == "carried":
        still = mock.patch.object(
            noise, "gumbel", lambda shape, seed: keras.ops.zeros(shape)
        )
    else:
        still = contextlib.nullcontext()
    with still:
        with engine.scope():
            model = build_model(case, engine.samples(BATCH))
        engine.prepare(model)
        validation = {}
        if validate:
            validation["validation_data"] = engine.data(batches(case).take(2))
            validation["validation_freq"] = 8
        fitted = model.fit(
            engine.data(batches(case)),
            epochs=UPDATES,
            steps_per_epoch=1,
            shuffle=False,
            verbose=0,
            callbacks=[ValidationState()],
            **validation,
        )
    variables = [*model.variables, *model.optimizer.variables]
    arrays = engine.read(model, variables)
    found = {f"{case}/{i}": array for i, array in enumerate(arrays)}
    return model, {**found, f"{case}/loss": fitted.history["loss"]}


def train_here(case):
    return train(OneDevice(), case)[1]


def train_on(engine, case):
    model, found = train(engine, case, validate=case == "carried")
    if keras.backend.backend() == "tensorflow":
        check_seeds(model)
    if case == "carried":
        # Written to be read again, in another order of samples.
        layer = model.get_layer("layer_1")
        before = engine.read(model, layer.states)
        turned = [array[::-1].copy() for array in before]
        engine.write(model, layer.states, turned)
        for x, array in zip(engine.read(model, layer.states), turned):
            np.testing.assert_array_equal(x, array)
        found["own state"] = own_state(layer.states[1])
    return model, found


def check_seeds(model):
    """No two replicas have the same noise."""
    seeds = [v for v in model.variables if is_seed(v)]
    assert seeds
    for variable in seeds:
        own = [tuple(x.numpy()) for x in variable.value.values]
        assert len(set(own)) == len(own), own


def own_state(variable):
    """What the first device here holds of a state."""
    value = variable.value
    if keras.backend.backend() == "jax":
        return np.array(value.addressable_shards[0].data)
    if keras.backend.backend() == "tensorflow":
        return getattr(value, "values", [value])[0].numpy()
    return keras.ops.convert_to_numpy(value)


def sharding_of(model):
    """On JAX: how states and kernels are split, by name."""
    cell = model.get_layer("layer_1").cell
    variables = [
        *model.get_layer("layer_1").states,
        cell.recurrent_kernel,
        cell.address_recurrent_kernel,
    ]
    return {
        f"sharding {v.name}": np.array(str(tuple(v.value.sharding.spec)))
        for v in variables
    }


def train_all(path, cases, argv):
    with distribution.start(options(*argv)) as engine:
        found = {}
        for case in cases:
            model, arrays = train_on(engine, case)
            found.update(arrays)
            if case == "carried" and keras.backend.backend() == "jax":
                found.update(sharding_of(model))
        if engine.is_chief:
            np.savez(path, devices=engine.devices, **found)


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def run_char_lm(argv):
    patch = contextlib.nullcontext()
    if os.environ.get("DIES"):
        patch = mock.patch.object(runs, "Speed", lambda updates: Die())
    with runs.explained_errors(), patch:
        char_lm.main(argv)


def fork(port, count):
    """Returns in the new processes; the first one ends with their verdict."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["WORLD_SIZE"] = str(count)
    children = []
    for number in range(count):
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        child = os.fork()
        if child == 0:
            return
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(f"ended with {codes}" if any(codes) else 0)


def main(mode, *argv):
    if mode == "char_lm":
        run_char_lm(argv)
        return
    if mode == "fork":
        port, count, *argv = argv
        fork(port, int(count))
    path, *rest = argv
    cut = rest.index("--")
    train_all(path, rest[:cut], rest[cut + 1 :])


if __name__ == "__main__":
    main(*sys.argv[1:])
