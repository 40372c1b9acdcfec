"""Distributed training: the `--distribute` option and the engines behind it.

Each backend uses its own API: `keras.distribution` on JAX, `tf.distribute` on
TensorFlow and `DistributedDataParallel` on torch. Scripts use them through the
interface of `Engine`; without `--distribute` they get `OneDevice`.

The batch size is global: each device takes an equal part of every batch, the
first device the first samples. Each device therefore carries the memory of its
own samples, and gradients, losses and metrics are those of the global batch.
"""

import importlib
import os

import keras

from examples.support.command_types import positive
from examples.support.distribution.engine import OneDevice
from examples.support.errors import RunError

_TAKES = {"jax": ("data", "model"), "tensorflow": ("data",), "torch": ("data",)}


def add_options(parser):
    group = parser.add_argument_group("distributed training")
    group.add_argument(
        "--distribute",
        choices=("data", "model"),
        help="train on all devices, each on a part of the batch; `model` "
        "(JAX) also splits the kernels of ARMIN. Several processes: JAX by "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, "
        "TensorFlow by TF_CONFIG, torch by torchrun",
    )
    group.add_argument(
        "--model-devices",
        type=positive,
        help="--distribute model: how many devices share a kernel (default: 2)",
    )
    group.add_argument(
        "--virtual-devices",
        type=positive,
        help="JAX, TensorFlow: number of virtual CPU devices, to try it out",
    )


def start(arguments):
    """The engine that a parsed command line asks for.

    To be called before the backend has done anything: the number of devices
    cannot be changed afterwards.
    """
    backend = keras.backend.backend()
    _check(arguments, backend)
    if arguments.distribute is None:
        return OneDevice()
    engine = importlib.import_module(f"{__name__}.on_{backend}")
    started = engine.start(arguments)
    started.check_batch_size(arguments.batch_size)
    return started


def _check(arguments, backend):
    if arguments.distribute is None:
        for name in ("virtual_devices", "model_devices"):
            if getattr(arguments, name):
                raise RunError(
                    f"--{name.replace('_', '-')} goes with --distribute, which "
                    "is missing."
                )
        if backend == "torch" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RunError(
                "torchrun has started several processes, which would all do "
                "the same and write the same files. They work together with "
                "--distribute data."
            )
    elif arguments.distribute not in _TAKES[backend]:
        raise RunError(
            f"--distribute {arguments.distribute} is for KERAS_BACKEND=jax. "
            f"Received: {backend}, which takes --distribute data."
        )
    if arguments.model_devices and arguments.distribute != "model":
        raise RunError("--model-devices is for --distribute model.")
