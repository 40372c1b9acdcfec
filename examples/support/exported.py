"""Loads models written by `char_lm.py --export`, without Keras.

A folder holds

    model.onnx, or saved_model/     one step of the network, batch size 1
    model.json                      vocabulary, states, layers with a memory

A step takes the index of a character and the states, and returns logits, new
states, and the slot that each layer with a memory has read.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np

DESCRIPTION = "model.json"
KIND = "keras_armin character model"
VERSION = 1
FILES = {"onnx": "model.onnx", "tf_saved_model": "saved_model"}


class ExportError(Exception):
    """The folder cannot be used; the message says why, in one line."""


class Memory(NamedTuple):
    layer: str
    slots: int


class ExportedModel:
    """One step of a network, as a stateless function."""

    def __init__(self, description, call):
        self.vocabulary = bytes(description["vocabulary"])
        self.memories = [Memory(**x) for x in description["memories"]]
        self._states = [
            (state["name"], state["shape"], state["initial"])
            for state in description["states"]
        ]
        self._input = description["input"]
        self._call = call

    def initial_states(self):
        return [
            np.zeros(shape, "float32")
            if initial is None
            else np.array([initial], "float32")
            for _, shape, initial in self._states
        ]

    def step(self, index, states):
        """Logits, new states, and the slots that were read."""
        inputs = {self._input: np.array([index], "int32")}
        for (name, *_), value in zip(self._states, states):
            inputs[name] = value
        logits, *rest = self._call(inputs)
        count = len(self._states)
        return logits[0], rest[:count], [int(slot[0]) for slot in rest[count:]]

    def encode(self, text):
        """Indices of the bytes of a text; a ValueError if some are unknown."""
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
    """An `ExportedModel`, or an `ExportError` that says why not."""
    folder = pathlib.Path(folder)
    description = _read_description(folder)
    try:
        model = ExportedModel(description, call=None)
        path = folder / FILES[description["format"]]
    except (KeyError, TypeError, ValueError) as error:
        path = folder / DESCRIPTION
        raise ExportError(f"{path} is damaged: {error!r}") from error
    if not path.exists():
        raise ExportError(f"{path} is missing")
    read = _read_onnx if path.suffix == ".onnx" else _read_saved_model
    try:
        model._call = read(path, description.get("outputs"))
    except ImportError as error:
        raise ExportError(
            f'{error}. Install it with `pip install ".[serve]"`, or for a '
            "SavedModel TensorFlow"
        ) from error
    except Exception as error:  # the libraries have no common class
        raise ExportError(f"{path} cannot be read: {_line(error)}") from error
    _try_out(model, path)
    return model


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
    return description


def _read_onnx(path, outputs):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # A step is too small to share; each request has its own thread.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    # Converters may leave out a state that the step does not use.
    names = {x.name for x in session.get_inputs()}
    return lambda inputs: session.run(
        outputs, {name: x for name, x in inputs.items() if name in names}
    )


def _read_saved_model(path, outputs):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]

    def call(inputs):
        found = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        # Earlier exports have numbers in the place of names.
        names = outputs or [f"output_{i}" for i in range(len(found))]
        return [found[name].numpy() for name in names]

    call.loaded = loaded  # its functions live only as long as it does
    return call


def _try_out(model, path):
    """One step, to find a mismatch before the first request."""
    states, why = model.initial_states(), ""
    try:
        logits, new_states, slots = model.step(0, states)
        fits = (
            logits.shape == (len(model.vocabulary),)
            and [x.shape for x in new_states] == [x.shape for x in states]
            and len(slots) == len(model.memories)
        )
    except Exception as error:
        fits, why = False, f": {_line(error)}"
    if not fits:
        raise ExportError(f"{path} and {DESCRIPTION} do not fit{why}")


def _line(error):
    return " ".join(str(error).split())[:300]
