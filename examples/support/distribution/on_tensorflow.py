"""Distributed training on TensorFlow, with `tf.distribute`.

Each device has a replica of the model, for its part of the batch. Weights are
mirrored; states and seeds, variables without an aggregation, are written by
each replica independently. Replicas have different seeds, so the noise depends
on their number.
"""

import os

import numpy as np
import tensorflow as tf

import keras_armin
from examples.support.cli import RunError
from examples.support.distribution.engine import Engine
from examples.support.distribution.engine import part_of
from examples.support.distribution.engine import seed_of
from examples.support.distribution.engine import spread_seeds

# What a collective operation raises when another process has ended.
_LOST_PEER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


def start(arguments):
    if os.environ.get("TF_CONFIG"):
        if arguments.virtual_devices:
            raise RunError(
                "--virtual-devices is for one TensorFlow process, and "
                "TF_CONFIG asks for several."
            )
        return Workers(_MultiWorkerStrategy())
    devices = None
    if arguments.virtual_devices:
        devices = _make_devices(arguments.virtual_devices)
    return Replicas(tf.distribute.MirroredStrategy(devices))


class Replicas(Engine):
    """The devices of this machine."""

    first_replica = 0  # of this process

    def __init__(self, strategy):
        self.strategy = strategy
        self.devices = self.models = strategy.num_replicas_in_sync

    def scope(self):
        return self.strategy.scope()

    def data(self, dataset):
        return dataset.map(_without_bool)  # `fit` distributes the parts

    def prepare(self, model):
        keras_armin.distribution.clip_summed_gradients(model.optimizer)
        spread_seeds(self, model)

    def spread(self, variable, seed):
        for i, own in enumerate(variable.value.values):
            own.assign(
                tf.cast(seed_of(self.first_replica + i, seed), own.dtype)
            )


class _MultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Also reduces scalars and nested structures, which Keras passes."""

    def reduce(self, reduce_op, value, axis):
        reduce = super().reduce

        def reduced(x):
            has_axes = self.experimental_local_results(x)[0].shape.rank
            return reduce(reduce_op, x, axis if has_axes else None)

        return tf.nest.map_structure(reduced, value)


class Workers(Replicas):
    """Several processes, with a device each."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.processes = self.devices
        here = len(strategy.extended.worker_devices)
        if here > 1:
            raise RunError(
                "--distribute data with TF_CONFIG takes one device per "
                f"process. This one has {here}: start a process for each, with "
                "its own CUDA_VISIBLE_DEVICES."
            )
        resolver = strategy.cluster_resolver
        has_chief = "chief" in resolver.cluster_spec().as_dict()
        is_worker = resolver.task_type == "worker"
        self.first_replica = resolver.task_id + (has_chief and is_worker)
        self.is_chief = self.first_replica == 0

    def leave(self):
        # The chief would mistake the end of another process for a failure.
        self.wait()

    def lost_others(self, error):
        return isinstance(error, _LOST_PEER_ERRORS)

    def data(self, dataset):
        own = part_of(dataset, self.first_replica, self.devices)
        return self.strategy.distribute_datasets_from_function(
            lambda context: own.map(_without_bool)
        )

    def agree(self, number):
        value = tf.constant(number if self.is_chief else 0, "int64")
        return int(self.strategy.reduce("SUM", value, axis=None))

    def wait(self):
        self.agree(0)

    def gather(self, array):
        return self.strategy.gather(tf.constant(array), axis=0).numpy()

    def own_part(self, array):
        return np.split(array, self.devices)[self.first_replica]


def _make_devices(count):
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        raise RunError(
            f"--virtual-devices {count} comes too late: {error}"
        ) from error
    return [device.name for device in tf.config.list_logical_devices("CPU")]


def _without_bool(*batch):
    """Keras adds the batches of replicas, to infer shapes."""
    return tf.nest.map_structure(
        lambda x: tf.cast(x, "int32") if x.dtype == tf.bool else x, batch
    )
