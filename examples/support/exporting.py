"""Writes a trained character model for `exported.py` to read."""

import importlib.util
import json
import logging
import shutil
import warnings

import keras
import numpy as np

import keras_armin
from examples.support import exported
from examples.support.cli import RunError

FORMATS = tuple(exported.FILES)
# Largest difference of logits between Keras and the exported model.
_TOLERANCE = 1e-4


def check_tools(format):
    """Raises a `RunError` if this backend cannot write the format."""
    try:
        keras_armin.export_lib.check_format(format)
    except (ValueError, ImportError) as error:
        raise RunError(f"--export-format {format}: {error}") from error
    if format == "onnx" and importlib.util.find_spec("onnxruntime") is None:
        raise RunError(
            'the exported network needs onnxruntime: pip install ".[serve]"'
        )


def export(model, vocabulary, folder, format=FORMATS[0]):
    """Writes one step of the model, and compares it with Keras.

    Args:
        model: A model from indices of characters to logits.
        vocabulary: bytes, one for each index.
        folder: Output folder. An existing export is replaced.
        format: One of `FORMATS`.
    """
    check_tools(format)
    _clear(folder)
    step = keras_armin.step_model(model, reads=True)
    path = folder / exported.FILES[format]
    _write(step, path, format)
    description = _describe(step, vocabulary, format)
    # Last: without it an incomplete folder is not an export.
    (folder / exported.DESCRIPTION).write_text(json.dumps(description) + "\n")
    try:
        written = exported.load(folder)
    except exported.ExportError as error:
        raise RunError(f"The exported model cannot be used: {error}") from error
    _compare(step, written)
    print(
        "\nexported; to try it, run: python examples/serve_char_lm.py "
        f"--model {folder}"
    )


def _clear(folder):
    """Removes an earlier export, and nothing else."""
    if folder.is_file():
        raise RunError(f"--export takes a folder; {folder} is a file")
    old = (folder / exported.DESCRIPTION).exists()
    if folder.exists() and any(folder.iterdir()) and not old:
        raise RunError(f"--export: {folder} is not empty, and not an export")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (exported.DESCRIPTION, *exported.FILES.values()):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write(step, path, format):
    signature = [
        keras.InputSpec(shape=(1, *x.shape[1:]), dtype=x.dtype, name=x.name)
        for x in step.inputs
    ]
    logging.disable(logging.WARNING)  # converters report much
    try:
        with warnings.catch_warnings(action="ignore"):
            keras_armin.export(step, path, format, input_signature=[signature])
    except Exception as error:  # whatever the converters raise
        other = FORMATS[1 - FORMATS.index(format)]
        raise RunError(
            f"The network could not be exported as {format} on the backend "
            f"{keras.backend.backend()}: {str(error).strip().splitlines()[0]} "
            f"Try --export-format {other}, or another KERAS_BACKEND."
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _describe(step, vocabulary, format):
    names = [x.name for x in step.inputs]
    memories = [
        {"layer": layer.name, "slots": layer.rnn.cell.memory_slots}
        for layer in step.layers
        if getattr(layer, "has_memory", False) and layer.rnn.cell.memory_slots
    ]
    states = [
        {
            "name": name,
            "shape": list(state.shape),
            "initial": state[0].tolist() if state.any() else None,
        }
        for name, state in zip(names[1:], step.initial_states())
    ]
    return {
        "kind": exported.KIND,
        "version": exported.VERSION,
        "format": format,
        "vocabulary": list(vocabulary),
        "input": names[0],
        "states": states,
        "outputs": step.output_names,
        "memories": memories,
    }


def _compare(step, written):
    """Runs both on a few characters."""
    rng = np.random.default_rng(0)
    ours = theirs = step.initial_states()
    for index in rng.integers(0, len(written.vocabulary), 8):
        logits, *ours = step([np.array([index], "int32"), *ours])
        ours = ours[: step.num_states]
        found, theirs, _ = written.step(index, theirs)
        logits = keras.ops.convert_to_numpy(logits)
        difference = np.abs(logits[0] - found).max()
        if not difference < _TOLERANCE:
            raise RunError(
                "The exported network differs from the one in Keras: its "
                f"logits are off by {difference:.2g}. Try another "
                "--export-format or KERAS_BACKEND."
            )
