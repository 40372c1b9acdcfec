"""Distributed training: `--distribute`, and an engine for each backend.

Each backend uses its own API: `keras.distribution` on JAX, `tf.distribute` on
TensorFlow and `DistributedDataParallel` on torch. Scripts use them through
`Engine`; without `--distribute` they get `OneDevice`.

The batch size is global: each device takes an equal part of every batch, the
first device the first samples. So each device carries the memory of its own
samples, and gradients, losses and metrics are those of the global batch.
"""

import importlib
import os

import keras

from examples.support import cli
from examples.support.cli import RunError
from examples.support.distribution.engine import OneDevice

_MODES = {"jax": ("data", "model"), "tensorflow": ("data",), "torch": ("data",)}


def add_options(parser):
    cli.add_options(
        parser,
        "distributed training",
        {
            "distribute": (
                ("data", "model"),
                None,
                "train on all devices, each on a part of the batch; `model` "
                "(JAX) also splits the kernels of ARMIN. For several processes "
                "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
                "JAX_PROCESS_ID (JAX) or TF_CONFIG (TensorFlow), or use "
                "torchrun (torch)",
            ),
            "model_devices": (
                cli.positive,
                None,
                "--distribute model: devices that share a kernel (default: 2)",
            ),
            "virtual_devices": (
                cli.positive,
                None,
                "JAX, TensorFlow: number of virtual CPU devices, to try it out",
            ),
        },
    )


def start(arguments):
    """The engine for a parsed command line.

    Must be called before the backend is used, since the number of devices
    cannot be changed afterwards.
    """
    backend = keras.backend.backend()
    _check(arguments, backend)
    if arguments.distribute is None:
        return OneDevice()
    module = importlib.import_module(f"{__name__}.on_{backend}")
    engine = module.start(arguments)
    engine.check_batch_size(arguments.batch_size)
    return engine


def _check(arguments, backend):
    mode = arguments.distribute
    if mode is None:
        for name in ("virtual_devices", "model_devices"):
            if getattr(arguments, name):
                raise RunError(f"--{name.replace('_', '-')} needs --distribute")
        if backend == "torch" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RunError(
                "torchrun has started several processes, which would all do "
                "the same and write the same files. Use --distribute data."
            )
    elif mode not in _MODES[backend]:
        raise RunError(
            f"--distribute {mode} is for KERAS_BACKEND=jax. Received: "
            f"{backend}, which takes --distribute data."
        )
    elif arguments.model_devices and mode != "model":
        raise RunError("--model-devices is for --distribute model.")
