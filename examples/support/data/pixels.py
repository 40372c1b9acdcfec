"""Images as sequences of pixels in a fixed random order, for tf.data.

An image becomes a sequence of its pixels, from 0 to 1, one per step. The same
permutation of all images removes spatial locality: only a network that
remembers the whole sequence can classify the digit.
"""

import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from examples.support.cli import RunError

CLASSES = 10
LARGEST_EVALUATION_BATCH = 500


class Samples(NamedTuple):
    images: np.ndarray  # (samples, steps, 1) float32
    labels: np.ndarray  # (samples,) int32

    def __len__(self):
        return len(self.labels)

    def part(self, which):
        return Samples(self.images[which], self.labels[which])


class Splits(NamedTuple):
    training: Samples
    validation: Samples
    test: Samples


def load(name, data_dir=None):
    """One of `DATA_SETS`, as `Splits`."""
    try:
        return DATA_SETS[name](data_dir)
    except ImportError as error:
        raise RunError(
            f"--data {name} needs another library ({error}). Install it with "
            "`pip install keras-armin[examples]`."
        ) from error


def standardized(splits):
    """With the mean 0 and the deviation 1 that the training pixels then have.

    Most pixels are 0, and a recurrent network sees one at a time: without
    this it takes long to notice them at all.
    """
    images = splits.training.images
    mean, deviation = images.mean(dtype="float64"), images.std(dtype="float64")

    def prepare(samples):
        scaled = (samples.images - mean) / deviation
        return Samples(scaled.astype("float32"), samples.labels)

    return Splits(*map(prepare, splits))


def permutation(steps):
    """The order of the pixels, as in the authors' released code."""
    return np.random.RandomState(1).permutation(steps)


def load_mnist(data_dir, small=False):
    """MNIST from TensorFlow Datasets: 54,000 / 6,000 / 10,000 images.

    Validation is the last tenth of the training data, which TensorFlow
    Datasets shuffles once, when it prepares the files. `small` images have 14
    x 14 pixels, each the mean of four.
    """

    def prepare(images, labels):
        if small:
            images = images.reshape(-1, 14, 2, 14, 2).astype("float32")
            images = images.mean(axis=(2, 4))
        return _scrambled(images, labels, largest=255)

    training, test = (prepare(*part) for part in _read_mnist(data_dir))
    cut = slice(54_000), slice(54_000, None)
    return Splits(*map(training.part, cut), test)


def load_digits(data_dir=None):
    """scikit-learn's 8 x 8 digits, without a download: 1,437 / 180 / 180.

    They are sorted by writer; a fixed shuffle puts every writer into every
    part.
    """
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    samples = _scrambled(images, labels, largest=16)
    order = np.random.RandomState(1).permutation(len(samples))
    return Splits(*(samples.part(w) for w in np.split(order, [1437, 1617])))


DATA_SETS = {
    "digits": load_digits,
    "mnist-14": functools.partial(load_mnist, small=True),
    "mnist": load_mnist,
}


def _read_mnist(data_dir):
    """`(images, labels)` of training and of test data."""
    import requests  # which TensorFlow Datasets needs
    import tensorflow_datasets as tfds

    folder = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder("mnist", data_dir=folder)
        if not builder.is_prepared():
            # Without a network the download would be retried for minutes.
            requests.head(builder.URL, timeout=20)
            builder.download_and_prepare()
        return tfds.as_numpy(
            builder.as_dataset(
                split=["train", "test"], as_supervised=True, batch_size=-1
            )
        )
    except Exception as error:  # no network, a full disk, a damaged file, ...
        lines = str(error).strip().splitlines() or [""]
        raise RunError(
            f"MNIST could not be loaded from {folder} ({type(error).__name__}: "
            f"{lines[0]}). If its files are damaged, delete the folder mnist. "
            "If it cannot be downloaded, use --data digits, or --data-dir with "
            "a folder in which TensorFlow Datasets has prepared it."
        ) from error


def _scrambled(images, labels, largest):
    """Pixels from 0 to `largest` as sequences from 0 to 1."""
    images = images.reshape(len(images), -1)
    images = images[:, permutation(images.shape[1])]
    return Samples(
        (images / np.float32(largest)).astype("float32")[..., None],
        labels.astype("int32"),
    )


def updates_per_pass(images, labels, batch_size):
    """Number of full batches in one pass over the data."""
    if len(images) < batch_size:
        raise RunError(
            f"--batch-size {batch_size} is more than there are images to "
            f"train with: {len(images)}"
        )
    return len(images) // batch_size


def training_batches(images, labels, batch_size, seed, first_step=0):
    """Endless batches, a function of seed and step.

    Each pass over the data has another order, and leaves out the samples at
    its end that do not fill a batch.
    """
    samples, steps = len(images), updates_per_pass(images, labels, batch_size)
    images, labels = tf.constant(images), tf.constant(labels)

    def one_pass(number):
        order = tf.random.experimental.stateless_shuffle(
            tf.range(samples), seed=tf.stack([tf.cast(seed, "int64"), number])
        )
        order = tf.reshape(order[: steps * batch_size], (steps, batch_size))
        return tf.data.Dataset.from_tensor_slices(order)

    passes = tf.data.Dataset.range(first_step // steps, np.iinfo("int64").max)
    return (
        passes.flat_map(one_pass)
        .skip(first_step % steps)
        .map(lambda which: (tf.gather(images, which), tf.gather(labels, which)))
        .prefetch(4)
    )


def evaluation_batches(images, labels, multiple=1):
    """All samples once, in the largest batches that all have one shape.

    The batch size is a multiple of `multiple`. If that takes more samples than
    there are, some with a weight of zero are added. The others then have
    slightly larger weights, so that means are those of the actual samples.
    """
    missing = -len(images) % multiple
    total = len(images) + missing
    largest = max(multiple, LARGEST_EVALUATION_BATCH)
    sizes = range(multiple, largest + 1, multiple)
    samples = [images, labels]
    if missing:
        samples = [np.resize(x, (total, *x.shape[1:])) for x in samples]
        weights = np.full(total, total / len(images), "float32")
        weights[len(images) :] = 0
        samples.append(weights)
    return tf.data.Dataset.from_tensor_slices(tuple(samples)).batch(
        max(size for size in sizes if total % size == 0)
    )
