"""Exported models run without Keras, and give the same numbers."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import exporting
from keras_armin.baselines import NTM
from tests.exported import check_exported
from tests.helpers import BACKEND
from tests.helpers import DIM
from tests.helpers import FEATURES
from tests.helpers import SLOTS
from tests.helpers import UNITS
from tests.helpers import inputs
from tests.helpers import randomise

FORMATS = {
    "tensorflow": ("tf_saved_model", "onnx", "openvino", "litert"),
    "jax": ("tf_saved_model", "onnx", "openvino"),
    "torch": ("torch", "onnx", "openvino"),
}[BACKEND]
NATIVE = FORMATS[0]
# What a refusal has to name, by format.
INSTEAD = {
    "tensorflow": {"torch": "format='tf_saved_model'"},
    "jax": {
        "torch": "format='tf_saved_model'",
        "litert": "KERAS_BACKEND=tensorflow",
    },
    "torch": {
        "tf_saved_model": "format='torch'",
        "litert": "KERAS_BACKEND=tensorflow",
    },
}[BACKEND]
# (batch, time): fewer steps than slots and more, and a single sample.
SIZES = ((3, 4), (1, 12))
VOCABULARY = 9


def chain(*parts, shape=(None, FEATURES), dtype="float32"):
    first = keras.Input(shape, dtype=dtype)
    return keras.Sequential([first, *parts, layers.Dense(3)])


def armin(**arguments):
    return ARMIN(UNITS, SLOTS, **arguments)


# Each model has several things to try: what costs is their number.
VARIETIES = {
    "hard": lambda: chain(armin()),
    "stacked": lambda: chain(
        armin(
            layer_norm=True,
            zoneout=0.1,
            memory_dim=DIM,
            dropout=0.2,
            recurrent_dropout=0.3,
            return_sequences=True,
        ),
        armin(),
    ),
    "both_ways": lambda: chain(
        layers.Bidirectional(armin(addressing="soft", return_sequences=True))
    ),
    "masked": lambda: chain(layers.Masking(), armin(return_sequences=True)),
    "tokens": lambda: chain(
        layers.Embedding(VOCABULARY, FEATURES, mask_zero=True),
        armin(
            addressing="relaxed",
            content_addressing=True,
            write_inputs=True,
            learn_initial_state=True,
        ),
        shape=(None,),
        dtype="int32",
    ),
    "bare_cell": lambda: chain(
        layers.RNN(ARMINCell(UNITS, SLOTS), return_sequences=True)
    ),
    "ntm": lambda: chain(NTM(UNITS, memory_slots=SLOTS, memory_dim=DIM)),
}


def made(name, rng):
    model = VARIETIES[name]()
    randomise(model, rng)
    return model


def calls_for(name, rng):
    found = []
    for batch, time in SIZES:
        x = inputs(rng, batch, time)
        if name == "masked":
            x[0, time // 2 :] = 0
        if name == "tokens":
            x = rng.integers(0, VOCABULARY, (batch, time)).astype("int32")
        found.append({"x": x})
    return found


@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_file_gives_the_same_numbers_at_any_batch_and_length(
    format, tmp_path, rng
):
    # LiteRT collects outputs of all steps only at a fixed batch size.
    name = "hard" if format == "litert" else "masked"
    calls = {name: calls_for(name, rng)}

    check_exported(tmp_path, format, {name: made(name, rng)}, calls)


@pytest.mark.skipif("litert" not in FORMATS, reason="refused, see below")
def test_litert_wants_a_fixed_batch_for_all_outputs(tmp_path, rng):
    model = made("masked", rng)
    signature = [keras.InputSpec(shape=(3, None, FEATURES), dtype="float32")]
    calls = [{"x": inputs(rng, 3, time)} for time in (4, 12)]

    with pytest.raises(ValueError, match="fixed batch size"):
        keras_armin.export(model, tmp_path / "model.tflite", "litert")
    check_exported(
        tmp_path,
        "litert",
        {"masked": model},
        {"masked": calls},
        input_signature=signature,
    )


def test_every_kind_of_model_can_be_exported(tmp_path, rng):
    names = [
        name for name in VARIETIES if name != "bare_cell" or BACKEND != "torch"
    ]
    models = {name: made(name, rng) for name in names}
    calls = {name: calls_for(name, rng) for name in names}

    check_exported(tmp_path, NATIVE, models, calls)


@pytest.mark.skipif(BACKEND != "torch", reason="a fault of Keras on PyTorch")
@pytest.mark.parametrize("format", FORMATS[:1])
def test_a_bare_cell_on_torch_says_what_to_use_instead(format, tmp_path, rng):
    model = made("bare_cell", rng)
    file = tmp_path / f"model{exporting.ENDINGS[format]}"

    with pytest.raises(ValueError, match="keras_armin.ARMIN"):
        keras_armin.export(model, file, format)


@pytest.mark.parametrize("format", INSTEAD)
def test_what_a_backend_cannot_do_names_what_can(format, tmp_path, rng):
    file = tmp_path / f"model{exporting.ENDINGS[format]}"

    with pytest.raises(ValueError, match=INSTEAD[format]):
        keras_armin.export(made("hard", rng), file, format)
