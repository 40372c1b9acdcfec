"""Many devices on TensorFlow, by `tf.distribute`.

Each device has a replica of the model, for its part of the batch. What all
have in common is mirrored. Variables without an aggregation, states and seeds
among them, are written by each replica for itself. Noise comes of a seed for
each replica, and so depends on how many there are.
"""

import os

import numpy as np
import tensorflow as tf

from examples.support.distribution.one_device import OneDevice
from examples.support.distribution.one_device import part_of
from examples.support.distribution.one_device import seed_of
from examples.support.distribution.one_device import spread_seeds
from examples.support.errors import RunError
from keras_armin import backends
from keras_armin import keras_private


def start(arguments):
    if os.environ.get("TF_CONFIG"):
        if arguments.virtual_devices:
            raise RunError(
                "--virtual-devices is for one TensorFlow process, and "
                "TF_CONFIG asks for several."
            )
        return Workers(tf.distribute.MultiWorkerMirroredStrategy())
    devices = None
    if arguments.virtual_devices:
        devices = _make_devices(arguments.virtual_devices)
    return Replicas(tf.distribute.MirroredStrategy(devices))


class Replicas(OneDevice):
    """The devices of this machine."""

    first_replica = 0  # of this process

    def __init__(self, strategy):
        self.strategy = strategy
        self.devices = self.models = strategy.num_replicas_in_sync

    def scope(self):
        return self.strategy.scope()

    def data(self, dataset):
        here = len(self.strategy.extended.worker_devices)
        processes = self.devices // here

        def of_replicas(context):
            mine = part_of(dataset, self.first_replica // here, processes)
            return _in_parts(mine.map(_without_bool), here)

        return self.strategy.distribute_datasets_from_function(of_replicas)

    def prepare(self, model):
        keras_private.clip_sum_of_replicas(model.optimizer)
        spread_seeds(self, model)

    def alone(self, model, build):
        weights = model.get_weights()
        if not self.is_chief:
            return None
        plain = build()
        plain.set_weights(weights)
        return plain

    def spread(self, variable, seed):
        for i, own in enumerate(variable.value.values):
            own.assign(
                tf.cast(seed_of(self.first_replica + i, seed), own.dtype)
            )


class Workers(Replicas):
    """Those of several processes."""

    def __init__(self, strategy):
        super().__init__(strategy)
        resolver = strategy.cluster_resolver
        workers = resolver.cluster_spec().as_dict()
        self.is_chief = resolver.task_type == "chief" or (
            "chief" not in workers and resolver.task_id == 0
        )
        number = resolver.task_id
        if resolver.task_type == "worker" and "chief" in workers:
            number += 1
        here = len(strategy.extended.worker_devices)
        self.first_replica = number * here

    def leave(self, error):
        if error is None:
            # The chief would take it for a failure.
            self.wait()

    def lost_others(self, error):
        return isinstance(
            error,
            (
                tf.errors.UnavailableError,
                tf.errors.AbortedError,
                tf.errors.CancelledError,
                tf.errors.InternalError,
            ),
        )

    def agree(self, number):
        values = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                number if context.replica_id_in_sync_group == 0 else 0, "int64"
            )
        )
        return int(self.strategy.reduce("SUM", values, axis=None))

    def wait(self):
        self.agree(0)

    def gather(self, variable):
        here = backends.gather(variable)
        parts = np.split(here, backends.copies(variable))
        values = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                parts[context.replica_id_in_sync_group - self.first_replica]
            )
        )
        numbers = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant([context.replica_id_in_sync_group])
        )
        # They need not come in order where a process has several devices.
        order = np.argsort(self.strategy.gather(numbers, axis=0).numpy())
        found = self.strategy.gather(values, axis=0).numpy()
        return np.concatenate([np.split(found, self.devices)[i] for i in order])

    def scatter(self, variable, array):
        count = backends.copies(variable)
        parts = np.split(array, self.devices)
        own = parts[self.first_replica : self.first_replica + count]
        backends.scatter(variable, np.concatenate(own))


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
    """Keras adds up a batch of all replicas, to learn its shapes."""
    return tf.nest.map_structure(
        lambda x: tf.cast(x, "int32") if x.dtype == tf.bool else x, batch
    )


def _in_parts(dataset, count):
    """Each batch as `count` smaller ones, one after the other."""

    def cut(*batch):
        def stacked(x):
            size = x.shape[0] and x.shape[0] // count
            return tf.reshape(x, (count, size or -1, *x.shape[1:]))

        return tf.data.Dataset.from_tensor_slices(
            tf.nest.map_structure(stacked, batch)
        )

    return dataset if count == 1 else dataset.flat_map(cut)
