"""Export of whole models, to be run without Keras and this package.

`model.export` of Keras does the work wherever it can. What is done here is to
refuse what cannot work, to leave batch and time open where Keras would fix
them, and to go by way of ONNX where Keras knows no way.
"""

import importlib.util
import pathlib
import tempfile
from typing import Any

import keras

from keras_armin import keras_private

ENDINGS = {
    "tf_saved_model": "",
    "torch": ".pt2",
    "onnx": ".onnx",
    "openvino": ".xml",
    "litert": ".tflite",
}
_ONNX_CONVERTERS = {
    "tensorflow": ("tf2onnx", "onnx"),
    "jax": ("jax2onnx", "onnx"),
    "torch": ("onnxscript", "onnx"),
}
_ON_TENSORFLOW = (
    "Save the model with `model.save('model.keras')`, load it with "
    "KERAS_BACKEND=tensorflow and export it there"
)
_REFUSED = {
    ("torch", "tf_saved_model"): (
        "PyTorch cannot write it. Use format='torch' or format='onnx' here. "
        f"{_ON_TENSORFLOW}, if it has to be this format."
    ),
    ("jax", "litert"): f"JAX cannot write it. {_ON_TENSORFLOW}.",
    ("torch", "litert"): (
        "Keras fixes every size there, by way of a package that this one is "
        f"not tested with. {_ON_TENSORFLOW}."
    ),
    ("tensorflow", "torch"): (
        "Only PyTorch writes it. Use format='tf_saved_model' or "
        "format='onnx', or load the model with KERAS_BACKEND=torch."
    ),
    ("jax", "torch"): (
        "Only PyTorch writes it. Use format='tf_saved_model' or "
        "format='onnx', or load the model with KERAS_BACKEND=torch."
    ),
}
_HOLD_STATE = ("tf_saved_model",)


def export(
    model: keras.Model,
    filepath: Any,
    format: str | None = None,
    input_signature: Any = None,
    **kwargs,
) -> None:
    """Write a model to a file that runs without Keras and this package.

    Args:
        model: A built `keras.Model`.
        filepath: Where to write: a folder for `"tf_saved_model"`, else a file
            with the ending `.pt2`, `.onnx`, `.xml` or `.tflite`.
        format: `"tf_saved_model"` (TensorFlow, JAX), `"torch"` (PyTorch),
            `"onnx"`, `"openvino"` (all three) or `"litert"` (TensorFlow).
            `None` goes by the ending of `filepath`; no ending stands for
            `"tf_saved_model"`. Defaults to `None`.
        input_signature: As in `model.export`. `None` stands for the shapes of
            the model's inputs, with any batch size (but that of a stateful
            layer) and any length that the model leaves open.
        **kwargs: For `model.export`.

    Notes:
        Which backend writes which format:

        | `format` | TensorFlow | JAX | PyTorch |
        | --- | --- | --- | --- |
        | `"tf_saved_model"` (folder) | yes | yes | no: use `"torch"` |
        | `"torch"` (`.pt2`) | no | no: use `"tf_saved_model"` | yes |
        | `"onnx"` (`.onnx`) | yes | yes | yes |
        | `"openvino"` (`.xml`, `.bin`) | yes | yes | yes |
        | `"litert"` (`.tflite`) | yes (1) | no (2) | no (2) |

        (1) Outputs of all steps, or masks, need a fixed batch size. (2) Load
        the `.keras` file on TensorFlow and export it there. "Yes" means any
        batch size, any length and the same numbers to 1e-4, tested in a
        process that cannot import Keras. "No" raises an error that says what
        to use. The converters come with `pip install ".[export]"`.

        Keras' own `model.export` does most of the work. This function is
        needed on PyTorch, where an ONNX file written by Keras declares any
        length and runs with one step only, and for OpenVINO.

        An exported model has no noise, and with `addressing` `"hard"` or
        `"relaxed"` it reads one row of the memory and replaces one.
        `stateful=True` works with `"tf_saved_model"`, at the batch size of the
        model; other formats raise an error: use `keras_armin.step_model`,
        which can be exported in every format. (A LiteRT step is tested with
        one sample at a time: once it was wrong after a change of the batch
        size, which could not be reproduced.)

        `keras.layers.RNN(ARMINCell(...))` on PyTorch needs fixed sizes in
        `input_signature`, since the loop of Keras fixes them. `ARMIN` does
        not.

        How to run a file, with a float32 NumPy array `x`:

            model = tf.saved_model.load("model_folder")
            y = model.serve(x)

            model = torch.export.load("model.pt2").module()
            y = model(torch.from_numpy(x))

            model = onnxruntime.InferenceSession("model.onnx")
            y = model.run(None, {model.get_inputs()[0].name: x})[0]

            model = openvino.Core().compile_model("model.xml", "CPU")
            y = model(x)[0]

            from ai_edge_litert.interpreter import Interpreter
            model = Interpreter("model.tflite").get_signature_runner()
            y = model(**{name: x for name in model.get_input_details()})

        `examples/RESULTS.md` has sizes, times and reduced precision.
    """
    backend = keras.backend.backend()
    filepath = str(filepath)
    if format is None:
        format = _format_of(filepath)
    check_format(format)
    _check(model, filepath, format)
    if input_signature is None:
        input_signature = _signature_of(model)
    kwargs.setdefault("verbose", False)
    if format == "openvino":
        return _export_openvino(model, filepath, input_signature, kwargs)
    if format == "onnx" and backend == "torch":
        return _export_onnx_from_torch(model, filepath, input_signature, kwargs)
    if format == "torch":
        kwargs.setdefault("dynamic_shapes", _open_dims(input_signature))
    if format == "litert":
        kwargs.setdefault("target_spec", _builtin_operations())
    return _in_clear_words(
        lambda: model.export(
            filepath, format=format, input_signature=input_signature, **kwargs
        )
    )


def _format_of(filepath):
    ending = pathlib.Path(filepath).suffix
    for format, known in ENDINGS.items():
        if known == ending:
            return format
    known = ", ".join(f"{e!r} ({f})" for f, e in ENDINGS.items() if e)
    advice = ""
    if ending in (".keras", ".h5"):
        advice = " What Keras itself loads is written by `model.save`."
    raise ValueError(
        f"Argument `filepath` must end in one of {known}, or have no ending "
        "for a folder (tf_saved_model), if `format` is not given. Received: "
        f"{filepath!r}.{advice}"
    )


def check_format(format: str) -> None:
    """Raise if this format cannot be written here, and say what can."""
    backend = keras.backend.backend()
    if format not in ENDINGS:
        raise ValueError(
            f"Argument `format` must be one of {list(ENDINGS)}. Received: "
            f"{format!r}"
        )
    if (backend, format) in _REFUSED:
        raise ValueError(
            f"format={format!r} cannot be had with the backend {backend}. "
            f"{_REFUSED[backend, format]}"
        )
    _check_packages(format, backend)


def _check(model, filepath, format):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Argument `model` must be a `keras.Model`. Received: {model!r}. "
            "A layer by itself needs `keras.Sequential([keras.Input(...), "
            "layer])`."
        )
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' has no weights yet. Call it on data, or "
            "give it a `keras.Input`, before it is exported."
        )
    ending = pathlib.Path(filepath).suffix
    # A folder may have a point in its name, but not another format's ending.
    if ending != ENDINGS[format] and (
        ENDINGS[format] or ending in ENDINGS.values()
    ):
        takes = f"must end in '{ENDINGS[format]}'"
        if not ENDINGS[format]:
            takes = f"is a folder and must not end in '{ending}'"
        raise ValueError(
            f"Argument `filepath` {takes} with format={format!r}. Received: "
            f"{filepath!r}"
        )
    if format not in _HOLD_STATE and _stateful_layers(model):
        raise ValueError(
            f"Layer '{_stateful_layers(model)[0].name}' has `stateful=True`: "
            f"its state is not exported with format={format!r}. Use "
            "format='tf_saved_model' on TensorFlow or JAX, or hand the state "
            "over yourself: `keras_armin.step_model(model)`."
        )


def _check_packages(format, backend):
    needed = []
    if format in ("tf_saved_model", "litert"):
        needed = ["tensorflow"]
    if format == "openvino":
        needed = ["openvino"]
    if format == "onnx" or (format == "openvino" and backend != "tensorflow"):
        needed += _ONNX_CONVERTERS[backend]
    missing = [x for x in needed if importlib.util.find_spec(x) is None]
    if missing:
        raise ImportError(
            f"format={format!r} on {backend} needs "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}, or "
            "all converters with pip install keras-armin[export]"
        )


def _stateful_layers(model):
    layers = keras_private.all_layers(model)
    return [x for x in layers if getattr(x, "stateful", False)]


def _signature_of(model):
    """Keras' own, but for the batch size that a stateful layer needs."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            f"Model '{model.name}' does not say what its inputs are like. "
            "Give `input_signature=[keras.InputSpec(shape=(None, None, "
            "features), dtype='float32')]`."
        )
    fixed = bool(_stateful_layers(model))

    def spec(x):
        shape = tuple(x.shape) if fixed else (None, *x.shape[1:])
        return keras.InputSpec(shape=shape, dtype=x.dtype, name=x.name)

    if isinstance(model, keras.Sequential):
        return [spec(inputs[0])]
    return [keras.tree.map_structure(spec, model.input)]


def _open_dims(signature):
    """The unknown dimensions, as torch.export takes them, or None."""
    import torch

    def dims(spec):
        unknown = [i for i, size in enumerate(spec.shape) if size is None]
        return {axis: torch.export.Dim.DYNAMIC for axis in unknown}

    found = keras.tree.map_structure(dims, signature)
    if any(None in x.shape for x in keras.tree.flatten(signature)):
        # Keras takes its inputs as `*args`: one argument, which is a tuple.
        return [tuple(found)]
    return None


def _export_onnx_from_torch(model, filepath, signature, kwargs):
    """Not by Keras, which turns to TorchScript when a dimension is unknown.

    That writes down the one step of its example: the file declares any length
    and fails at all others.
    """
    import torch

    def example(spec):
        # Different from each other and from 1, which torch takes for fixed.
        shape = [size or 3 + axis for axis, size in enumerate(spec.shape)]
        return keras.ops.ones(shape, dtype=spec.dtype)

    specs = keras.tree.flatten(signature)
    kwargs.setdefault("opset_version", None)
    kwargs.setdefault("dynamic_shapes", _open_dims(signature))
    model.eval()  # torch asks for it; layers are in inference here anyway
    program = _in_clear_words(
        lambda: torch.onnx.export(
            model,
            tuple(keras.tree.map_structure(example, signature)),
            input_names=[x.name or f"input_{i}" for i, x in enumerate(specs)],
            dynamo=True,
            **kwargs,
        )
    )
    program.save(filepath)


def _export_openvino(model, filepath, signature, kwargs):
    """By way of a file that OpenVINO reads.

    Keras' own way fails on JAX and PyTorch, and on TensorFlow turns all that
    is computed and not used into further outputs.
    """
    import openvino

    on_tensorflow = keras.backend.backend() == "tensorflow"
    between = "tf_saved_model" if on_tensorflow else "onnx"
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model{ENDINGS[between]}"
        export(model, file, between, signature, **kwargs)
        if keras.backend.backend() == "torch":
            _take_weights_into_loops(file)
        converted = openvino.convert_model(file)
        openvino.save_model(converted, filepath, compress_to_fp16=False)


def _take_weights_into_loops(file):
    """OpenVINO reads a `Scan` only if it uses nothing from outside."""
    import onnx
    from onnxscript import optimizer

    any_size = {"input_size_limit": 2**31, "output_size_limit": 2**31}
    model = optimizer.optimize(onnx.load(file), **any_size)
    weights = {x.name: x for x in model.graph.initializer}
    for loop in (x for x in model.graph.node if x.op_type == "Scan"):
        (body,) = (x.g for x in loop.attribute if x.name == "body")
        used = dict.fromkeys(name for node in body.node for name in node.input)
        body.initializer.extend(weights[x] for x in used if x in weights)
    onnx.save(model, file)


def _builtin_operations():
    """Keras would let operations in that the LiteRT runtime does not have."""
    import tensorflow as tf

    return {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}


# What stands in an error, and what it means.
_MEANINGS = {
    "specialized": (
        "A layer of the model fixes the batch size or the length while it is "
        "exported; `keras.layers.RNN` on PyTorch does. Use "
        "`keras_armin.ARMIN` in its place, or give an `input_signature` "
        "without unknown dimensions."
    ),
    "TensorList": (
        "LiteRT collects the outputs of all steps only at a fixed batch size. "
        "Give it, as in `input_signature=[keras.InputSpec(shape=(1, None, "
        "features), dtype='float32')]`, or use `return_sequences=False` and "
        "no mask."
    ),
}


def _in_clear_words(write):
    try:
        return write()
    except Exception as error:
        for sign, meaning in _MEANINGS.items():
            if sign in str(error):
                raise ValueError(meaning) from error
        raise
