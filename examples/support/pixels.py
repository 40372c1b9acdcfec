"""Images one pixel at a time, in a scrambled order, as tf.data pipelines.

An image becomes a sequence of its pixels, from 0 to 1, one per step. One
permutation, the same for all images, removes spatial locality: only a network
that remembers the whole sequence can classify the digit.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from examples.support.training import RunError

CLASSES = 10
_LARGEST_EVALUATION_BATCH = 500


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
    """The data set `name`, of `DATA_SETS`, as `Splits`."""
    return DATA_SETS[name](data_dir)


def permutation(steps):
    """The order of the pixels, as in the authors' released code."""
    return np.random.RandomState(1).permutation(steps)


def load_mnist(data_dir):
    """MNIST by way of TensorFlow Datasets: 54,000 / 6,000 / 10,000 images.

    Validation is the last tenth of what comes as training data, which
    TensorFlow Datasets has shuffled, once and for all, when it prepared it.
    """
    return _split_mnist(*_read_mnist(data_dir))


def load_small_mnist(data_dir):
    """MNIST at 14 x 14: each pixel the mean of four, 196 steps."""

    def shrink(images, labels):
        fours = images.reshape(-1, 14, 2, 14, 2).astype("float32")
        return fours.mean(axis=(2, 4)), labels

    return _split_mnist(*(shrink(*x) for x in _read_mnist(data_dir)))


def _split_mnist(training, test):
    training = _scrambled(*training, largest=255)
    return Splits(
        training.part(slice(54_000)),
        training.part(slice(54_000, None)),
        _scrambled(*test, largest=255),
    )


def load_digits(data_dir=None):
    """scikit-learn's own 8 x 8 digits: 1,437 / 180 / 180, nothing to fetch.

    They come writer by writer; a fixed shuffle mixes them before the cut, so
    that every writer is in every part.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise RunError(
            f"--data digits comes with scikit-learn ({error}). Install it by "
            "`pip install keras-armin[examples]`."
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    samples = _scrambled(images, labels, largest=16)
    order = np.random.RandomState(1).permutation(len(samples))
    return Splits(*(samples.part(w) for w in np.split(order, [1437, 1617])))


DATA_SETS = {
    "digits": load_digits,
    "mnist-14": load_small_mnist,
    "mnist": load_mnist,
}


def _read_mnist(data_dir):
    """`(images, labels)` of training and of test data."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise RunError(
            f"--data mnist needs TensorFlow Datasets ({error}). Install it "
            "by `pip install keras-armin[examples]`, or take --data digits."
        ) from error
    folder = data_dir or tfds.core.constants.DATA_DIR
    _prepare_mnist(tfds, folder)
    try:
        training, test = tfds.as_numpy(
            tfds.load(
                "mnist",
                split=["train", "test"],
                data_dir=folder,
                download=False,
                as_supervised=True,
                batch_size=-1,
            )
        )
    # TensorFlow has an error of its own for each way a file can be broken.
    except Exception as error:
        raise _damaged(folder, _first_line(error)) from error
    if (len(training[1]), len(test[1])) != (60_000, 10_000):
        raise _damaged(folder, "images are missing")
    return training, test


def _prepare_mnist(tfds, folder):
    """Download what is not there."""
    try:
        builder = tfds.builder("mnist", data_dir=folder)
    except Exception as error:
        raise _damaged(folder, _first_line(error)) from error
    if builder.is_prepared():
        return
    try:
        import requests  # as TensorFlow Datasets does

        # Without a network it would try again for minutes.
        requests.head(builder.URL, timeout=20)
        builder.download_and_prepare()
    # No network, a proxy, a full disk, a server's page instead of the file.
    except Exception as error:
        raise RunError(
            f"there is no MNIST in {folder}, and downloading it there failed "
            f"({_first_line(error)}). Name by --data-dir a folder in which "
            "TensorFlow Datasets has prepared it, or take --data digits, "
            "which needs no download."
        ) from error


def _damaged(folder, why):
    return RunError(
        f"the files of MNIST in {folder} are damaged ({why}). Delete its "
        "folder mnist to have them downloaded again, or take --data digits, "
        "which needs no download."
    )


def _first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else repr(error)


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

    Each pass over the data has an order of its own. The samples at its end
    that do not fill a batch are left out: others in each pass.
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
    """All samples once, in batches of one shape: the largest that allows it.

    Its size is a multiple of `multiple`. Where that takes more samples than
    there are, some without weight fill up; the others weigh a little more, so
    that means over all of them are means over the true ones.
    """
    missing = -len(images) % multiple
    total = len(images) + missing
    largest = max(multiple, _LARGEST_EVALUATION_BATCH)
    size = max(
        size
        for size in range(multiple, largest + 1, multiple)
        if total % size == 0
    )
    samples = [images, labels]
    if missing:
        samples = [np.resize(x, (total, *x.shape[1:])) for x in samples]
        weights = np.full(total, total / len(images), "float32")
        weights[len(images) :] = 0
        samples.append(weights)
    return tf.data.Dataset.from_tensor_slices(tuple(samples)).batch(size)
