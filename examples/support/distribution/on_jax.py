"""Distributed training on JAX, with `keras.distribution`.

There is one model and one computation over all devices of all processes, which
the compiler splits. So the noise of a sample does not depend on the number of
devices.
"""

import contextlib
import os

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

from examples.support.cli import RunError
from examples.support.distribution.engine import Engine
from examples.support.distribution.engine import part_of

# Seconds. The chief tests and draws at the end, while others wait.
_SHUTDOWN_TIMEOUT = 24 * 60 * 60
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(arguments):
    if arguments.virtual_devices:
        _make_devices(arguments.virtual_devices)
    _join_processes()
    if arguments.distribute == "data":
        return JaxDevices(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )
    return JaxDevices(_model_parallel(arguments))


class JaxDevices(Engine):
    def __init__(self, distribution):
        self.distribution = distribution
        self.devices = distribution.num_model_replicas
        self.processes = jax.process_count()
        self.is_chief = jax.process_index() == 0
        keras.distribution.set_distribution(distribution)

    def leave(self):
        keras.distribution.set_distribution(None)

    def lost_others(self, error):
        kind = jax.errors.JaxRuntimeError
        return isinstance(error, kind) or "Gloo" in str(error)

    def data(self, dataset):
        if self.processes == 1:
            return dataset
        return part_of(dataset, jax.process_index(), self.processes)

    def agree(self, number):
        if self.processes == 1:
            return number
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))

    def wait(self):
        if self.processes > 1:
            multihost_utils.sync_global_devices("wait")

    @contextlib.contextmanager
    def without_others(self):
        # Keras creates variables when it saves, which would wait for all.
        keras.distribution.set_distribution(None)
        try:
            yield
        finally:
            keras.distribution.set_distribution(self.distribution)

    def alone(self, model, build):
        keras.distribution.set_distribution(None)
        return super().alone(model, build)


def _make_devices(count):
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise RunError(
            f"--virtual-devices {count} comes too late: {error}"
        ) from error


def _join_processes():
    given = {name: os.environ.get(name) for name in _VARIABLES}
    if not any(given.values()):
        return
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise RunError(
            "several JAX processes need the environment variables "
            f"{', '.join(_VARIABLES)}. Missing: {', '.join(missing)}."
        )
    address, count, number = given.values()
    jax.distributed.initialize(
        address,
        int(count),
        int(number),
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
    )


def _model_parallel(arguments):
    """A mesh that splits the batch, and the columns of wide kernels.

    Kernels whose columns cannot be split evenly are on all devices, as is
    everything else.
    """
    devices, sharing = jax.device_count(), arguments.model_devices or 2
    if jax.process_count() > 1:
        raise RunError("--distribute model takes one process, not several.")
    if devices % sharing:
        raise RunError(
            f"--model-devices {sharing} does not divide the {devices} devices."
        )
    columns = _columns(arguments)
    split = [name for name, count in columns.items() if count % sharing == 0]
    if not split:
        raise RunError(
            "--distribute model takes --model armin with kernels that can be "
            f"split among {sharing} devices (--model-devices). Received: "
            f"--model {arguments.model} with columns {columns}. Choose --units "
            "accordingly."
        )
    mesh = keras.distribution.DeviceMesh(
        (devices // sharing, sharing),
        ("batch", "model"),
        keras.distribution.list_devices(),
    )
    layouts = keras.distribution.LayoutMap(mesh)
    for name in split:
        layouts[f".*/armin_cell[^/]*/{name}"] = (None, "model")
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
    )


def _columns(arguments):
    if arguments.model != "armin":
        return {}
    units, slots = arguments.units, arguments.slots
    dim = arguments.memory_dim or units
    return {
        "kernel": slots + (units + dim) + (4 * units + dim),
        "gate_recurrent_kernel": units + dim,
        "recurrent_kernel": 4 * units + dim,
    }
