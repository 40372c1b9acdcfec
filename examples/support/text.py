"""Text as characters, which are bytes, in tf.data pipelines.

A text is cut into as many lanes as a batch has samples. Each batch takes the
next steps of every lane, so that a network that carries its state reads each
lane from its beginning to its end, and then all of them again.
"""

import gzip
import hashlib
import http.client
import io
import os
import pathlib
import sysconfig
import tarfile
import urllib.request
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from examples.support.training import RunError

CORPORA = ("stdlib", "ptb", "enwik8")

PTB_URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
# Length, and the id that `git hash-object` gives.
PTB_FILES = {
    "ptb.train.txt": (5_101_618, "04d78dc94771b5c04adc40b3be08bd8c82942e7f"),
    "ptb.valid.txt": (399_782, "7b3d9d9fd705825715695328b2de872ffbc14a84"),
    "ptb.test.txt": (449_945, "8079cdf342f8d103e5647e1160a8fe3b58a213d5"),
}
ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_LENGTH = 100_000_000
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"
STDLIB_LENGTH = 3_000_000


class Corpus(NamedTuple):
    """A text in three parts, as indices into the vocabulary."""

    train: np.ndarray  # uint8, as are the others
    valid: np.ndarray
    test: np.ndarray
    vocabulary: bytes

    def encode(self, some, what):
        """Indices of bytes; `what` they are is for the error."""
        return _encode(some, self.vocabulary, what)

    def decode(self, ids):
        """Text to be printed, whatever its bytes."""
        found = bytes(self.vocabulary[i] for i in ids)
        return found.decode("utf-8", errors="replace")


def load(name, data_dir="."):
    """One of `CORPORA`, or the text file of that path.

    PTB's vocabulary is that of its training part, which has all there is. The
    others' is that of the whole text, so that no part has a byte without an
    index. The most frequent byte comes first.
    """
    data_dir = pathlib.Path(data_dir)
    if name == "ptb":
        return _load_ptb(data_dir)
    if name == "enwik8":
        return _split(_read_enwik8(data_dir))
    if name == "stdlib":
        return _split(_read_stdlib())
    return _split(_read_file(pathlib.Path(name)))


def _split(whole):
    """The first 90 % to train, 5 % to validate, 5 % to test."""
    twentieth = len(whole) // 20
    parts = (
        whole[: len(whole) - 2 * twentieth],
        whole[len(whole) - 2 * twentieth : len(whole) - twentieth],
        whole[len(whole) - twentieth :],
    )
    vocabulary = by_frequency(whole)
    parts = (_encode(part, vocabulary, "the text") for part in parts)
    return Corpus(*parts, vocabulary)


def by_frequency(some):
    """The bytes that occur, the most frequent first."""
    counts = np.bincount(np.frombuffer(some, "uint8"), minlength=256)
    # Of equals the smaller byte comes first.
    order = np.argsort(-counts, kind="stable")
    return bytes(order[: np.count_nonzero(counts)].tolist())


def _encode(some, vocabulary, what):
    some = np.frombuffer(some, "uint8")
    known = np.zeros(256, bool)
    known[list(vocabulary)] = True
    if not known[some].all():
        strange = bytes(sorted(set(some[~known[some]].tolist())))
        raise RunError(
            f"The vocabulary does not have {strange!r}, which {what} has."
        )
    index = np.zeros(256, "uint8")
    index[list(vocabulary)] = np.arange(len(vocabulary))
    return index[some]


def _load_ptb(data_dir):
    folders = (data_dir, data_dir / "ptb")
    missing = [
        name for name in PTB_FILES if _first_there(folders, [name]) is None
    ]
    if missing:
        _download_ptb(data_dir / "ptb", missing)
    train, valid, test = (
        _read_ptb_file(_first_there(folders, [name])) for name in PTB_FILES
    )
    vocabulary = by_frequency(train)
    return Corpus(
        _encode(train, vocabulary, "ptb.train.txt"),
        _encode(valid, vocabulary, "ptb.valid.txt"),
        _encode(test, vocabulary, "ptb.test.txt"),
        vocabulary,
    )


def _read_ptb_file(path):
    found = _read_file(path)
    length, git_id = PTB_FILES[path.name]
    header = b"blob %d\0" % len(found)
    found_id = hashlib.sha1(header + found).hexdigest()
    if (len(found), found_id) != (length, git_id):
        raise RunError(
            f"{path} is not the usual {path.name}: it has {len(found):,} "
            f"bytes and the git id {found_id}; expected are {length:,} bytes "
            f"and {git_id}. The files are in {PTB_URL}, as "
            "simple-examples/data/ptb.*.txt (not ptb.char.*)."
        )
    return found


def _download_ptb(folder, missing):
    archive = io.BytesIO(_download(PTB_URL, "35 MB", missing, folder))
    try:
        with tarfile.open(fileobj=archive) as tar:
            found = {
                name: tar.extractfile(member).read()
                for member in tar
                if (name := pathlib.PurePosixPath(member.name).name) in missing
            }
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RunError(f"{PTB_URL} gave a damaged archive: {error}") from error
    for name in missing:
        if name not in found:
            raise RunError(f"The archive from {PTB_URL} has no {name}.")
        _keep(folder / name, found[name])


def _read_enwik8(data_dir):
    folders = (data_dir, data_dir / "enwik8")
    path = _first_there(folders, ["enwik8", "enwik8.gz", "enwik8.zip"])
    if path is None:
        path = data_dir / "enwik8" / "enwik8.zip"
        _keep(path, _download(ENWIK8_URL, "36 MB", ["enwik8"], data_dir))
    found = _unpack(path)
    md5 = hashlib.md5(found).hexdigest()
    if (len(found), md5) != (ENWIK8_LENGTH, ENWIK8_MD5):
        raise RunError(
            f"{path} is not enwik8: it holds {len(found):,} bytes with the "
            f"MD5 {md5}; expected are {ENWIK8_LENGTH:,} bytes and "
            f"{ENWIK8_MD5}. Download it from {ENWIK8_URL}."
        )
    return found


def _unpack(path):
    packed = _read_file(path)
    try:
        if path.suffix == ".gz":
            return gzip.decompress(packed)
        if path.suffix == ".zip":
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                return archive.read("enwik8")
    except (OSError, EOFError, KeyError, zlib.error, zipfile.BadZipFile) as e:
        raise RunError(
            f"{path} ({len(packed):,} bytes) is damaged or cut off: {e}. "
            f"Download it from {ENWIK8_URL}."
        ) from e
    return packed


def _read_stdlib():
    """Source text of Python's own modules, up to a length.

    Modules with an underscore are left out: some differ between machines.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("[a-z]*.py"))
    found = b"".join(path.read_bytes() for path in paths)[:STDLIB_LENGTH]
    if not found:
        raise RunError(
            f"There is no source text of Python's modules in {folder}. Choose "
            "another text by --data."
        )
    return found


def _first_there(folders, names):
    paths = (folder / name for folder in folders for name in names)
    # A folder may have the name of a file.
    return next((path for path in paths if path.is_file()), None)


def _read_file(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}. --data takes "
            f"{', '.join(CORPORA)} or the path of a text file."
        ) from error


def _download(url, size, missing, folder):
    missing = ", ".join(missing)
    print(f"{missing} not found: downloading {url} ({size})")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read()
    # The errors of urllib are of the first kind.
    except (OSError, http.client.HTTPException) as error:
        raise RunError(
            f"{missing} is not in {folder} and could not be downloaded from "
            f"{url}: {error}. If you have it, say where by --data-dir."
        ) from error


def _keep(path, content):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Choose another "
            "folder by --data-dir."
        ) from error


def lanes(ids, batch_size, steps, what="A text"):
    """The text as contiguous lanes `(batch, len // batch)`.

    `what` it is is for the error.
    """
    length = len(ids) // batch_size
    if length <= steps:
        raise RunError(
            f"{what} of {len(ids):,} characters is too short for {batch_size} "
            f"samples of {steps} steps and the character after: that takes "
            f"{batch_size * (steps + 1):,}. Choose a smaller --batch-size or "
            "--steps, or a longer text."
        )
    return ids[: batch_size * length].reshape(batch_size, length)


def chunks(ids, batch_size, steps):
    """Number of batches in a pass over the text."""
    return (lanes(ids, batch_size, steps).shape[1] - 1) // steps


def pipeline(ids, batch_size, steps, first_step=0):
    """Endless batches, a function of the step: one pass after another.

    Each is a pair of inputs and targets, the characters that come next,
    `(batch, steps)`. The inputs are a dict of the characters, `ids`, and of
    `reset` `(batch,)`, true where a pass begins.
    """
    of_a_pass = chunks(ids, batch_size, steps)
    table = tf.constant(lanes(ids, batch_size, steps))

    def make(step):
        position = step % of_a_pass
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
    """One pass of a single lane that leaves no character out.

    Its batches have weights too, of zero for what fills the last one up.
    """
    ids = np.asarray(ids, "int32")
    count = -(-(len(ids) - 1) // steps)
    padding = (0, count * steps + 1 - len(ids))
    weights = np.pad(np.ones(len(ids) - 1, "float32"), padding)

    def in_chunks(x):
        return x.reshape(count, 1, steps)

    filled = np.pad(ids, padding)
    inputs = {
        "ids": in_chunks(filled[:-1]),
        "reset": (np.arange(count) == 0)[:, None],
    }
    return tf.data.Dataset.from_tensor_slices(
        (inputs, in_chunks(filled[1:]), in_chunks(weights))
    )
