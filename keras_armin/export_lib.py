"""Export of whole models that run without Keras and this package.

Based on `model.export` of Keras. Added here: errors for what is not supported,
dynamic batch size and length where Keras would fix them, and export through
ONNX where Keras has no exporter.
"""

import contextlib
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_armin import keras_private
from keras_armin.step_model import StepModel

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
_EXPORT_ON_TENSORFLOW = (
    "save the model with `model.save('model.keras')`, load it with "
    "KERAS_BACKEND=tensorflow and export it there"
)
_UNSUPPORTED = {
    ("torch", "tf_saved_model"): (
        "Use format='torch' or format='onnx'. For this format: "
        f"{_EXPORT_ON_TENSORFLOW}."
    ),
    ("jax", "litert"): f"Instead, {_EXPORT_ON_TENSORFLOW}.",
    ("torch", "litert"): (
        "Keras would fix all sizes, and needs a package that this one is not "
        f"tested with. Instead, {_EXPORT_ON_TENSORFLOW}."
    ),
    ("tensorflow", "torch"): (
        "Use format='tf_saved_model' or "
        "format='onnx', or load the model with KERAS_BACKEND=torch."
    ),
    ("jax", "torch"): (
        "Use format='tf_saved_model' or "
        "format='onnx', or load the model with KERAS_BACKEND=torch."
    ),
}
_STATEFUL_FORMATS = ("tf_saved_model",)


def export(
    model: keras.Model,
    filepath: Any,
    format: str | None = None,
    input_signature: Any = None,
    **kwargs: Any,
) -> None:
    """Export a model to a file that runs without Keras and this package.

    Args:
        model: A built `keras.Model`.
        filepath: A folder for `"tf_saved_model"`, otherwise a file with the
            extension `.pt2`, `.onnx`, `.xml` or `.tflite`.
        format: `"tf_saved_model"` (TensorFlow, JAX), `"torch"` (PyTorch),
            `"onnx"`, `"openvino"` (all three) or `"litert"` (TensorFlow).
            `None` infers it from the extension of `filepath`; without one it
            is `"tf_saved_model"`. Defaults to `None`.
        input_signature: As in `model.export`. `None` uses the shapes of the
            model's inputs, with a dynamic batch size (except for stateful
            layers) and a dynamic length where the model has one.
        **kwargs: Passed to `model.export`.

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

        The states of a step model leave in the order in which they enter, and
        its outputs have the names `step.output_names`: state `armin_h` leaves
        as `new_armin_h`, to enter as `armin_h` at the next step. In a
        SavedModel, `serve` takes and returns lists, and the signature
        `serving_default` works by name; LiteRT works by name alone; `.pt2`
        files have no names, so there the order counts.

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
    write = _write_step if isinstance(model, StepModel) else _write
    _explain_errors(
        lambda: write(model, filepath, format, input_signature, kwargs)
    )


def _write(
    model: keras.Model,
    filepath: str,
    format: str,
    signature: list,
    kwargs: dict,
) -> None:
    if format == "onnx" and keras.backend.backend() == "torch":
        return _export_onnx_from_torch(model, filepath, signature, kwargs)
    if format == "torch":
        kwargs.setdefault("dynamic_shapes", _dynamic_shapes(signature))
    if format == "litert":
        kwargs.setdefault("target_spec", _builtin_ops_only())
    layers = keras_private.all_layers(model) if format == "onnx" else []
    with _constant_statistics(layers):
        model.export(
            filepath, format=format, input_signature=signature, **kwargs
        )


@contextlib.contextmanager
def _constant_statistics(layers: list) -> Iterator[None]:
    """Turn the tensors of `Normalization` layers into arrays for a while.

    They are not weights, and tf2onnx makes further inputs of the file of them.
    """
    layers = [x for x in layers if isinstance(x, keras.layers.Normalization)]
    before = [(layer.mean, layer.variance) for layer in layers]
    try:
        for layer, statistics in zip(layers, before):
            layer.mean, layer.variance = map(
                keras.ops.convert_to_numpy, statistics
            )
        yield
    finally:
        for layer, statistics in zip(layers, before):
            layer.mean, layer.variance = statistics


def _write_step(
    step: StepModel, filepath: str, format: str, signature: list, kwargs: dict
) -> None:
    """Name the outputs, which Keras would number."""
    if format == "tf_saved_model":
        return _export_saved_step(step, filepath, signature, **kwargs)
    if format == "litert":  # whose runner returns a dict in any case
        return _write(_named(step), filepath, format, signature, kwargs)
    _write(step, filepath, format, signature, kwargs)
    if format == "onnx":
        _name_onnx_outputs(filepath, step.output_names)


def _named(step: StepModel) -> keras.Model:
    """The same model, which returns a dict."""
    return keras.Model(step.inputs, dict(zip(step.output_names, step.outputs)))


def _export_saved_step(
    step: StepModel,
    filepath: str,
    signature: list,
    verbose: bool,
    **kwargs: Any,
) -> None:
    named = _named(step).__call__
    archive = keras.export.ExportArchive()
    archive.track(step)
    archive.add_endpoint("serve", step.__call__, signature, **kwargs)
    archive.add_endpoint("serving_default", named, signature, **kwargs)
    archive.write_out(filepath, verbose=verbose)


def _name_onnx_outputs(file: str, names: list[str]) -> None:
    """Whatever the converter, and whatever it calls other values."""
    import onnx

    model = onnx.load(file)
    _rename_values(model.graph, {name: f"{name}_inside" for name in names})
    for output, name in zip(model.graph.output, names):
        # Not renamed: a value may be two outputs, or an input too.
        model.graph.node.add(
            op_type="Identity", input=[output.name], output=[name]
        )
        output.name = name
    onnx.save(model, file)


def _rename_values(graph: Any, names: dict[str, str]) -> None:
    for x in (*graph.output, *graph.initializer, *graph.value_info):
        x.name = names.get(x.name, x.name)
    for node in graph.node:
        node.input[:] = [names.get(x, x) for x in node.input]
        node.output[:] = [names.get(x, x) for x in node.output]
        for attribute in node.attribute:
            _rename_values(attribute.g, names)


def _format_of(filepath: str) -> str:
    ending = pathlib.Path(filepath).suffix
    for format, known in ENDINGS.items():
        if known == ending:
            return format
    known = ", ".join(f"{e!r} ({f})" for f, e in ENDINGS.items() if e)
    advice = ""
    if ending in (".keras", ".h5"):
        advice = " Use `model.save` for files that Keras loads."
    raise ValueError(
        f"Argument `filepath` must end in one of {known}, or have no extension "
        "for a folder (tf_saved_model), if `format` is not given. Received: "
        f"{filepath!r}.{advice}"
    )


def check_format(format: str) -> None:
    """Raise if the format is not supported on this backend."""
    backend = keras.backend.backend()
    if format not in ENDINGS:
        raise ValueError(
            f"Argument `format` must be one of {list(ENDINGS)}. Received: "
            f"{format!r}"
        )
    if (backend, format) in _UNSUPPORTED:
        raise ValueError(
            f"format={format!r} is not supported on the {backend} backend. "
            f"{_UNSUPPORTED[backend, format]}"
        )
    _check_packages(format, backend)


def _check(model: keras.Model, filepath: str, format: str) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Argument `model` must be a `keras.Model`. Received: {model!r}. "
            "Wrap a layer in `keras.Sequential([keras.Input(...), layer])`."
        )
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' is not built. Call it on data, or add a "
            "`keras.Input`, before exporting it."
        )
    ending = pathlib.Path(filepath).suffix
    # A folder may have a dot in its name, but not another format's extension.
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
    if format not in _STATEFUL_FORMATS and _stateful_layers(model):
        raise ValueError(
            f"Layer '{_stateful_layers(model)[0].name}' has `stateful=True`: "
            f"its state is not exported with format={format!r}. Use "
            "format='tf_saved_model' on TensorFlow or JAX, or a model that "
            "takes and returns its states: `keras_armin.step_model(model)`."
        )


def _check_packages(format: str, backend: str) -> None:
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


def _stateful_layers(model: keras.Model) -> list:
    layers = keras_private.all_layers(model)
    return [x for x in layers if getattr(x, "stateful", False)]


def _signature_of(model: keras.Model) -> list:
    """The signature of Keras, with the batch size of stateful layers."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            f"The inputs of model '{model.name}' are unknown. Pass "
            "`input_signature=[keras.InputSpec(shape=(None, None, features), "
            "dtype='float32')]`."
        )
    fixed = bool(_stateful_layers(model))

    def spec(x: Any) -> keras.InputSpec:
        shape = tuple(x.shape) if fixed else (None, *x.shape[1:])
        return keras.InputSpec(shape=shape, dtype=x.dtype, name=x.name)

    if isinstance(model, keras.Sequential):
        return [spec(inputs[0])]
    return [keras.tree.map_structure(spec, model.input)]


def _dynamic_shapes(signature: list) -> list | None:
    """The unknown dimensions as torch.export expects them, or None."""
    import torch

    def dims(spec: keras.InputSpec) -> dict:
        unknown = [i for i, size in enumerate(spec.shape) if size is None]
        return {axis: torch.export.Dim.DYNAMIC for axis in unknown}

    found = keras.tree.map_structure(dims, signature)
    if any(None in x.shape for x in keras.tree.flatten(signature)):
        # Keras takes its inputs as `*args`: a single argument, a tuple.
        return [tuple(found)]
    return None


def _export_onnx_from_torch(
    model: keras.Model, filepath: str, signature: list, kwargs: dict
) -> None:
    """Not by Keras, which uses TorchScript if a dimension is unknown.

    TorchScript records the steps of its example: the file declares a dynamic
    length and fails at all others.
    """
    import torch

    def example(spec: keras.InputSpec) -> Any:
        # Different sizes, and none of 1, which torch would specialize.
        shape = [size or 3 + axis for axis, size in enumerate(spec.shape)]
        return keras.ops.ones(shape, dtype=spec.dtype)

    specs = keras.tree.flatten(signature)
    kwargs.setdefault("opset_version", None)
    kwargs.setdefault("dynamic_shapes", _dynamic_shapes(signature))
    model.eval()  # required by torch; the layers run inference anyway
    program = torch.onnx.export(
        model,
        tuple(keras.tree.map_structure(example, signature)),
        input_names=[x.name or f"input_{i}" for i, x in enumerate(specs)],
        dynamo=True,
        **kwargs,
    )
    program.save(filepath)


def _export_openvino(
    model: keras.Model, filepath: str, signature: list, kwargs: dict
) -> None:
    """Through an intermediate file that OpenVINO reads.

    The exporter of Keras fails on JAX and PyTorch, and on TensorFlow turns
    unused results into additional outputs.
    """
    import openvino

    on_tensorflow = keras.backend.backend() == "tensorflow"
    between = "tf_saved_model" if on_tensorflow else "onnx"
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model{ENDINGS[between]}"
        export(model, file, between, signature, **kwargs)
        if keras.backend.backend() == "torch":
            _inline_loop_weights(file)
        converted = openvino.convert_model(file)
        openvino.save_model(converted, filepath, compress_to_fp16=False)


def _inline_loop_weights(file: str) -> None:
    """OpenVINO reads a `Scan` only if it captures no outer values."""
    import onnx
    from onnxscript import optimizer

    any_size = 2**31
    model = optimizer.optimize(
        onnx.load(file), input_size_limit=any_size, output_size_limit=any_size
    )
    weights = {x.name: x for x in model.graph.initializer}
    for loop in (x for x in model.graph.node if x.op_type == "Scan"):
        (body,) = (x.g for x in loop.attribute if x.name == "body")
        used = dict.fromkeys(name for node in body.node for name in node.input)
        body.initializer.extend(weights[x] for x in used if x in weights)
    onnx.save(model, file)


def _builtin_ops_only() -> dict:
    """Keras would allow operations that the LiteRT runtime does not have."""
    import tensorflow as tf

    return {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}


# Texts in errors of the exporters, and their explanations.
_EXPLANATIONS = {
    "specialized": (
        "A layer of the model fixes the batch size or the length in the "
        "export, such as `keras.layers.RNN` on PyTorch. Use "
        "`keras_armin.ARMIN` instead, or pass an `input_signature` without "
        "unknown dimensions."
    ),
    "TensorList": (
        "LiteRT supports sequences of outputs only with a fixed batch size. "
        "Set it, as in `input_signature=[keras.InputSpec(shape=(1, None, "
        "features), dtype='float32')]`, or use `return_sequences=False` and "
        "no mask."
    ),
}


def _explain_errors(write: Callable[[], Any]) -> None:
    try:
        write()
    except Exception as error:
        for sign, meaning in _EXPLANATIONS.items():
            if sign in str(error):
                raise ValueError(meaning) from error
        raise
