"""Algorithmic tasks as tf.data pipelines, a function of seed and step."""

import numpy as np
import tensorflow as tf

# Keeps the streams of random numbers of one batch apart.
_LENGTHS, _BITS, _BUCKETS = 0, 1, 2


def copy_task(
    batch_size,
    max_length,
    width=8,
    min_length=1,
    buckets=5,
    seed=0,
    first_step=0,
):
    """Endless batches of the copy task.

    A sequence of `length` random bit vectors, between a start and an end
    flag, is to be repeated:

        time     0      1 .. length   length + 1    length + 2 .. 2 length + 1
        input    start  the bits      end           zeros
        target                                      the bits

    The lengths from `min_length` to `max_length` are cut into `buckets`
    ranges, the longer the narrower: what only the longest sequences teach
    would otherwise be seen too seldom. A batch has lengths from one range,
    drawn at random, and is padded to the longest it may hold, so that short
    sequences cost less and there are only that many shapes to compile for.

    Yields `(inputs, targets, weights)` of shapes `(batch, time, width + 2)`,
    `(batch, time, width)` and `(batch, time)`. The weights pick the answer
    and give every sequence the same say: with them, the mean over batch and
    time is the mean loss of a bit of an average sequence.
    """
    edges = _bucket_edges(min_length, max_length, buckets)
    buckets = len(edges) - 1
    edges = tf.constant(edges)
    spec_shape = (batch_size, None, width + 2)

    def make(step):
        seeds = _seeds(seed, step)
        bucket = tf.random.stateless_uniform(
            (), seeds[_BUCKETS], 0, buckets, dtype=tf.int32
        )
        low, high = edges[bucket] + 1, edges[bucket + 1]
        inputs, targets, weights = copy_batch(
            batch_size, low, high, width, seeds
        )
        return tf.ensure_shape(inputs, spec_shape), targets, weights

    steps = tf.data.Dataset.range(first_step, np.iinfo("int64").max)
    return steps.map(make, num_parallel_calls=1).prefetch(4)


def _bucket_edges(min_length, max_length, buckets):
    """Largest length of each range, after the one below the smallest."""
    share = np.sqrt(np.linspace(0.0, 1.0, buckets + 1))
    edges = min_length - 1 + share * (max_length - min_length + 1)
    return np.unique(edges.round().astype("int32"))


def fixed_length_batch(batch_size, length, width=8, seed=0):
    """One batch of the copy task with sequences of one length."""
    low = high = tf.constant(length)
    return copy_batch(batch_size, low, high, width, _seeds(seed, length))


def _seeds(seed, step):
    """Seeds of the three streams of one step."""
    step = tf.cast(step, tf.int64)
    return [
        tf.stack([tf.constant(seed * 3 + stream, tf.int64), step])
        for stream in (_LENGTHS, _BITS, _BUCKETS)
    ]


def copy_batch(batch_size, low, high, width, seeds):
    """Sequences of `low` to `high` vectors, padded for `high`."""
    length = tf.random.stateless_uniform(
        (batch_size, 1), seeds[_LENGTHS], low, high + 1, dtype=tf.int32
    )
    bits = tf.random.stateless_uniform(
        (batch_size, high, width), seeds[_BITS], 0, 2, dtype=tf.int32
    )
    bits = tf.cast(bits, tf.float32)
    time = tf.range(2 * high + 2)[None]  # (1, time)

    def bits_from(start):
        """The bits moved to begin at `start`, and where they are."""
        index = time - start
        there = (index >= 0) & (index < length)
        index = tf.where(there, index, 0)
        there = tf.cast(there, tf.float32)
        return tf.gather(bits, index, batch_dims=1) * there[..., None], there

    given, _ = bits_from(tf.ones_like(length))
    targets, answer = bits_from(length + 2)
    flags = tf.stack(
        [tf.broadcast_to(time == 0, tf.shape(answer)), time == length + 1], -1
    )
    inputs = tf.concat([given, tf.cast(flags, tf.float32)], axis=-1)
    steps = tf.cast(2 * high + 2, tf.float32)
    weights = answer * steps / tf.cast(length, tf.float32)
    return inputs, targets, weights
