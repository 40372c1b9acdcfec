"""Run exported models with their own runtime, without Keras and the package.

    python load_exported.py jobs.json

`jobs.json` holds a list of jobs: `format`, `file`, `inputs` (an .npz that has
`<call>/<input>`) and `outputs` (the .npz to write: `<call>/<number>`). The
calls are made in order on one loaded model; inputs have the names the model
was exported with, and stand in their order. A job with `stepped` steps along
the time of its first input; what leaves as `new_<name>` enters the next step
as `<name>`, or without names what leaves after the first output, in order. The
first of all steps is its only output.
"""

import json
import os
import sys

import numpy as np


def load_tf_saved_model(file):
    import tensorflow as tf

    # Its function alone would let the variables go.
    loaded = tf.saved_model.load(file)
    signature = loaded.signatures["serving_default"]
    _, names = signature.structured_input_signature

    def run(inputs):
        tensors = {name: tf.constant(x) for name, x in inputs.items()}
        if len(tensors) > 1 and set(tensors) == set(names):
            return signature(**tensors)
        tensors = list(tensors.values())
        outputs = loaded.serve(tensors if len(tensors) > 1 else tensors[0])
        return tf.nest.flatten(outputs)

    return run


def load_torch(file):
    import torch

    module = torch.export.load(file).module()

    def run(inputs):
        tensors = [torch.from_numpy(x) for x in inputs.values()]
        outputs = module(tensors if len(tensors) > 1 else tensors[0])
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [x.detach() for x in outputs]

    return run


def load_onnx(file):
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    outputs = [x.name for x in session.get_outputs()]

    def run(inputs):
        if set(names) <= set(inputs):  # a converter leaves out unused ones
            inputs = {name: inputs[name] for name in names}
        found = session.run(None, dict(zip(names, inputs.values())))
        return dict(zip(outputs, found))

    return run


def load_openvino(file):
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(file, "CPU", exact)

    names = {name for x in model.inputs for name in x.get_names()}

    def run(inputs):
        # By name where there are several: their order is not kept.
        by_name = set(inputs) <= names
        found = model(inputs if by_name else [*inputs.values()])
        return {x.get_any_name(): y for x, y in found.items()}

    return run


def load_litert(file):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=file)
    runner = interpreter.get_signature_runner()

    def run(inputs):
        if len(inputs) == 1:
            # The converter gives names of its own.
            inputs = dict(zip(runner.get_input_details(), inputs.values()))
        return dict(sorted(runner(**inputs).items()))

    return run


def along(step):
    """A function of a whole sequence, from a step with its states."""

    def run(inputs):
        (name, sequence), *_ = inputs.items()
        states = {key: x for key, x in inputs.items() if key != name}
        outputs = []
        for t in range(sequence.shape[1]):
            found = step({name: sequence[:, t], **states})
            if isinstance(found, dict):
                states = {x: np.asarray(found.pop(f"new_{x}")) for x in states}
                (output,) = found.values()
            else:
                output, *new_states = [np.asarray(x) for x in found]
                states = dict(zip(states, new_states))
            outputs.append(np.asarray(output))
        return [np.stack(outputs, axis=1)]

    return run


def run_job(job):
    run = globals()[f"load_{job['format']}"](job["file"])
    calls = {}
    with np.load(job["inputs"]) as given:
        for name in given.files:
            call, _, name_of_input = name.partition("/")
            calls.setdefault(call, {})[name_of_input] = given[name]
    if job["stepped"]:
        run = along(run)
    found = {}
    for call, inputs in calls.items():
        outputs = run(inputs)
        if isinstance(outputs, dict):
            outputs = outputs.values()
        for number, output in enumerate(outputs):
            found[f"{call}/{number}"] = np.asarray(output)
    np.savez(job["outputs"], **found)


def main(jobs_file):
    with open(jobs_file) as file:
        jobs = json.load(file)
    # TensorFlow imports Keras if it can, which it must not here.
    out_of_reach = ("keras", "keras_armin")
    sys.modules.update(dict.fromkeys(out_of_reach))
    for job in jobs:
        run_job(job)
    assert not any(sys.modules[name] for name in out_of_reach)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(sys.argv[1])
