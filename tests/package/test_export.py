"""Exported models run without Keras, and give the same numbers."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import export_lib
from keras_armin.baselines import NTM
from tests.helpers import load_exported
from tests.helpers.common import BACKEND
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.exported import call_model
from tests.helpers.exported import check_exported
from tests.helpers.exported import run_exported
from tests.helpers.exported_graph import operations

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    # Converters treat small weights and large ones differently.
    "masked": lambda: chain(
        layers.Normalization(mean=[0.0] * FEATURES, variance=[4.0] * FEATURES),
        layers.Masking(),
        ARMIN(64, SLOTS, return_sequences=True),
    ),
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


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(x, marks=[] if x == "onnx" else pytest.mark.slow)
        for x in FORMATS[1:]
    ],
)
def test_a_file_gives_the_same_numbers_at_any_batch_and_length(
    format, tmp_path, rng
):
    # LiteRT collects outputs of all steps only at a fixed batch size.
    name = "hard" if format == "litert" else "masked"
    calls = {name: calls_for(name, rng)}

    check_exported(tmp_path, format, {name: made(name, rng)}, calls)


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_kind_of_model_can_be_exported(tmp_path, rng):
    names = [
        name for name in VARIETIES if name != "bare_cell" or BACKEND != "torch"
    ]
    models = {name: made(name, rng) for name in names}
    calls = {name: calls_for(name, rng) for name in names}

    check_exported(tmp_path, NATIVE, models, calls)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "torch", reason="a fault of Keras on PyTorch")
def test_a_bare_cell_on_torch_needs_fixed_sizes(tmp_path, rng):
    model = made("bare_cell", rng)
    signature = [keras.InputSpec(shape=(3, 4, FEATURES), dtype="float32")]

    with pytest.raises(ValueError, match="keras_armin.ARMIN"):
        keras_armin.export(model, tmp_path / "model.pt2", "torch")
    check_exported(
        tmp_path,
        "torch",
        {"model": model},
        {"model": [{"x": inputs(rng, 3, 4)}]},
        input_signature=signature,
    )


@pytest.mark.parametrize("format", INSTEAD)
def test_what_a_backend_cannot_do_names_what_can(format, tmp_path, rng):
    file = tmp_path / f"model{export_lib.ENDINGS[format]}"

    with pytest.raises(ValueError, match=INSTEAD[format]):
        keras_armin.export(made("hard", rng), file, format)


@pytest.mark.slow("jax", "tensorflow")
def test_the_carried_state_of_a_stateful_model_is_exported(tmp_path, rng):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(2, None, FEATURES)),
            armin(stateful=True, return_sequences=True),
        ]
    )
    randomise(model, rng)
    calls = [{"x": inputs(rng, 2, time)} for time in (4, 3, 6)]
    if NATIVE == "torch":
        with pytest.raises(ValueError, match=r"keras_armin\.step_model"):
            keras_armin.export(model, tmp_path / "model.pt2", "torch")
        return

    check_exported(tmp_path, NATIVE, {"s": model}, {"s": calls})


# Sizes that nothing else has.
WIDE_SLOTS, WIDE_DIM = 97, 13
# What hands the memory on, makes it, or puts one row into it.
ONE_ROW = {
    "Reshape",
    "TensorScatterUpdate",
    "StatelessWhile",
    "While",
    "Fill",
    "Identity",
    # A gradient of its own, for whoever asks.
    "IdentityN",
    "custom_vjp_call",
    "reshape",
    "scatter",
    "scan",
    "while",
    "broadcast_in_dim",
    "jit",
    "pjit",
    "aten.zeros.default",
    "aten.view.default",
    "aten.reshape.default",
    "aten.slice.Tensor",
    "aten.index_copy.default",
    "aten.detach.default",
    "aten.clone.default",
    "<built-in function getitem>",
}


def spanning(addressing, folder):
    """Operations that give something as large as the memory."""
    layer = ARMIN(6, WIDE_SLOTS, WIDE_DIM, addressing=addressing)
    model = keras.Sequential([keras.Input((None, FEATURES)), layer])
    found = operations(model, folder)
    assert found
    names = " ".join(name for name, _ in found).lower()
    assert not any(word in names for word in ("rand", "rng", "threefry"))
    return {
        name for name, shape in found if shape[-2:] == (WIDE_SLOTS, WIDE_DIM)
    }


@pytest.mark.slow("tensorflow")
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_exported_inference_has_no_noise_and_no_operation_on_all_slots(
    addressing, tmp_path
):
    assert spanning(addressing, tmp_path) <= ONE_ROW


@pytest.mark.slow
def test_that_would_be_seen(tmp_path):
    """With soft addressing there are such operations."""
    assert not spanning("soft", tmp_path) <= ONE_ROW


def broken_files(file, folder):
    """Files that cannot be right."""
    content = file.read_bytes()
    for name, data in {
        "truncated": content[: len(content) // 2],
        "foreign": b"PNG" + bytes(1000),
        "empty": b"",
    }.items():
        path = folder / name / file.name
        path.parent.mkdir()
        path.write_bytes(data)
        yield path


def load(format, file):
    """Load a file as its users would."""
    if format == "tf_saved_model":
        import tensorflow as tf

        return tf.saved_model.load(file.parent)
    return getattr(load_exported, f"load_{format}")(str(file))


# What the runtimes say of files that are not theirs.
COMPLAINTS = {
    "tf_saved_model": "Cannot parse file|0 MetaGraphs",
    "onnx": "parsing failed|No graph was found",
    "openvino": "pugi::status_ok|Unable to read the model",
    "litert": "not a valid Flatbuffer|model allocation is null/empty",
    "torch": "not a zip file",
}


@pytest.mark.slow
# What a runtime says does not depend on who wrote the file: once is enough.
@pytest.mark.parametrize(
    "format", FORMATS if BACKEND == "tensorflow" else [NATIVE]
)
def test_a_damaged_file_is_not_loaded(format, tmp_path, rng):
    target = tmp_path / f"model{export_lib.ENDINGS[format]}"
    keras_armin.export(made("hard", rng), target, format)
    if format == "tf_saved_model":
        target = target / "saved_model.pb"

    load(format, target)
    for file in broken_files(target, tmp_path):
        with pytest.raises(Exception, match=COMPLAINTS[format]):
            load(format, file)


RING = {"tensorflow": "jax", "jax": "torch", "torch": "tensorflow"}
ELSEWHERE = """
import sys, keras, numpy as np, keras_armin
model = keras.saving.load_model(sys.argv[1])
y = model(np.load(sys.argv[2]))
np.save(sys.argv[3], keras.ops.convert_to_numpy(y))
"""


@pytest.mark.slow
def test_a_saved_model_gives_the_same_on_another_backend(tmp_path, rng):
    model, x = made("stacked", rng), inputs(rng)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    files = [str(tmp_path / name) for name in ("model.keras", "x.npy", "y.npy")]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *files],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": RING[BACKEND]},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(files[-1]), array(model(x)), atol=1e-4)


@pytest.mark.slow("jax")
def test_quantize_leaves_armin_as_it_is(rng):
    model, x = made("hard", rng), inputs(rng)
    before = array(model(x))
    model.quantize("int8")
    armin_layer, dense = model.layers

    assert "int8" in dense.dtype_policy.name
    assert armin_layer.dtype_policy.name == "float32"
    np.testing.assert_allclose(array(model(x)), before, atol=0.1)


@pytest.mark.slow("tensorflow")
@pytest.mark.skipif("litert" not in FORMATS, reason="refused, see above")
def test_litert_files_can_be_made_smaller(tmp_path, rng):
    import tensorflow as tf

    model = chain(ARMIN(64, SLOTS))
    calls = [{"x": inputs(rng, 2, 4)}]
    (expected,) = call_model(model, calls[0])
    smaller = {"optimizations": [tf.lite.Optimize.DEFAULT]}
    keras_armin.export(model, tmp_path / "float.tflite", "litert")
    keras_armin.export(model, tmp_path / "int8.tflite", "litert", **smaller)
    jobs = {"int8": ("litert", tmp_path / "int8.tflite", calls)}
    ((found,),) = run_exported(tmp_path, jobs)["int8"]

    size = (tmp_path / "float.tflite").stat().st_size
    assert (tmp_path / "int8.tflite").stat().st_size < size / 2
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_wrong_arguments_are_told(tmp_path, rng):
    model, ending = made("hard", rng), export_lib.ENDINGS["onnx"]

    with pytest.raises(TypeError, match=r"keras\.Sequential"):
        keras_armin.export(model.layers[0], tmp_path / "x", NATIVE)
    with pytest.raises(ValueError, match="'tf_saved_model', 'torch'"):
        keras_armin.export(model, tmp_path / "x", "h5")
    with pytest.raises(ValueError, match=f"must end in '{ending}'"):
        keras_armin.export(model, tmp_path / "x.pb", "onnx")
    with pytest.raises(ValueError, match=r"keras\.Input"):
        keras_armin.export(keras.Sequential([armin()]), tmp_path / "x", NATIVE)


def test_a_missing_converter_names_its_package(tmp_path, rng, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ImportError, match=r"pip install .*onnx"):
        keras_armin.export(made("hard", rng), tmp_path / "x.onnx", "onnx")
