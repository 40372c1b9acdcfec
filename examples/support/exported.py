"""Loads models written by `char_lm.py --export`. Keras is not needed.

A folder holds

    model.onnx, or saved_model/     one step of the network, batch 1
    model.json                      vocabulary, states, layers with a memory

A step takes the index of a character and the states, and gives logits, new
states, and for each layer with a memory the slot it read.
"""

import hashlib
import json
import pathlib
from typing import NamedTuple

import numpy as np

DESCRIPTION = "model.json"
KIND = "keras_armin character model"
VERSION = 1
FILES = {"onnx": "model.onnx", "tf_saved_model": "saved_model"}


class ExportError(Exception):
    """The folder cannot be used; the message says why, in a line."""


class Memory(NamedTuple):
    layer: str
    slots: int


class ExportedModel:
    """One step of a network, as a stateless function."""

    def __init__(self, description, call):
        self.vocabulary = bytes(description["vocabulary"])
        self.memories = [Memory(**x) for x in description["memories"]]
        self._states = description["states"]
        self._input = description["input"]
        self._call = call

    def initial_states(self):
        return [
            np.zeros(state["shape"], "float32")
            if state["initial"] is None
            else np.array([state["initial"]], "float32")
            for state in self._states
        ]

    def step(self, index, states):
        """Logits, new states, and the slots that were read."""
        inputs = {self._input: np.array([index], "int32")}
        for state, value in zip(self._states, states):
            inputs[state["name"]] = value
        logits, *rest = self._call(inputs)
        count = len(self._states)
        return logits[0], rest[:count], [int(slot[0]) for slot in rest[count:]]

    def encode(self, text):
        """Indices of a text's bytes; unknown characters are a ValueError."""
        unknown = [
            character
            for character in dict.fromkeys(text)
            if set(character.encode("utf-8", "surrogatepass"))
            - set(self.vocabulary)
        ]
        if unknown:
            shown = ", ".join(f"{x!a} (U+{ord(x):04X})" for x in unknown[:10])
            more = f" and {len(unknown) - 10} more" if unknown[10:] else ""
            raise ValueError(
                f"the network has never seen these characters: {shown}{more}"
            )
        places = {byte: i for i, byte in enumerate(self.vocabulary)}
        return [places[byte] for byte in text.encode("utf-8", "surrogatepass")]


def load(folder):
    """An `ExportedModel` from its folder; an `ExportError` if it is none."""
    folder = pathlib.Path(folder)
    description = _read_description(folder)
    path = folder / FILES[description["format"]]
    if not path.exists():
        raise ExportError(f"{path} is missing")
    if digest(path) != description["sha256"]:
        raise ExportError(
            f"{path} is damaged, or not the one that {DESCRIPTION} describes"
        )
    read = _read_onnx if description["format"] == "onnx" else _read_saved_model
    model = ExportedModel(description, read(path))
    _try_out(model, path)
    return model


def digest(path):
    """A fingerprint of a file, or of a folder with all files in it."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(file.relative_to(path.parent).as_posix().encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def _read_description(folder):
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ExportError(
            f"{folder} holds no exported model: there is no {DESCRIPTION}. "
            "`python examples/char_lm.py --export FOLDER` writes one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(description, dict) or description.get("kind") != KIND:
        raise ExportError(f"{path} does not describe a {KIND}")
    if description.get("version") != VERSION:
        raise ExportError(
            f"{path} has version {description.get('version')!r}; this program "
            f"reads version {VERSION}"
        )
    _check_description(path, description)
    return description


def _check_description(path, description):
    try:
        bytes(description["vocabulary"])
        [Memory(**x) for x in description["memories"]]
        [(s["name"], s["shape"], s["initial"]) for s in description["states"]]
        known = description["format"] in FILES
        known = known and description["input"] and description["sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path} is damaged: {error!r}") from error
    if not known:
        raise ExportError(
            f"{path} is damaged: the format is {description['format']!r}"
        )


def _read_onnx(path):
    try:
        import onnxruntime
    except ImportError as error:
        raise ExportError(
            'onnxruntime is not installed: pip install ".[serve]"'
        ) from error
    options = onnxruntime.SessionOptions()
    # A step is too small to share; visitors come in threads of their own.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # of many classes, without a common one
        raise ExportError(f"{path} cannot be read: {_line(error)}") from error
    # A converter may leave out a state that the step does not look at.
    taken = {x.name for x in session.get_inputs()}

    def call(inputs):
        given = {name: x for name, x in inputs.items() if name in taken}
        return session.run(None, given)

    return call


def _read_saved_model(path):
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ExportError(
            "this model was exported for TensorFlow, which is not installed"
        ) from error
    try:
        loaded = tf.saved_model.load(str(path))
        serve = loaded.signatures["serving_default"]
    except Exception as error:
        raise ExportError(f"{path} cannot be read: {_line(error)}") from error

    def call(inputs):
        found = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        return [found[f"output_{i}"].numpy() for i in range(len(found))]

    # Its functions live as long as what was loaded.
    call.loaded = loaded
    return call


def _try_out(model, path):
    """One step, so that what does not fit is known before a visitor comes."""
    states = model.initial_states()
    try:
        logits, new_states, slots = model.step(0, states)
    except Exception as error:
        raise ExportError(
            f"{path} and {DESCRIPTION} do not fit: {_line(error)}"
        ) from error
    if (
        logits.shape != (len(model.vocabulary),)
        or [x.shape for x in new_states] != [x.shape for x in states]
        or len(slots) != len(model.memories)
    ):
        raise ExportError(f"{path} and {DESCRIPTION} do not fit")


def _line(error):
    return " ".join(str(error).split())[:300]
