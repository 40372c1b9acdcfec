"""Text from an exported file: the same as in Keras."""

import json
import re

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

import keras_armin
from examples import char_lm
from examples.support import exported
from examples.support import exporting
from examples.support.cli import RunError
from keras_armin import sampling
from tests.helpers import serving

BACKEND = keras.backend.backend()
PROMPT = [1, 0, 2]
# An export on JAX takes long for each.
LAYERS = "1" if BACKEND == "jax" else "2"


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(5)
    return serving.small_model("--layers", LAYERS)


@pytest.fixture(scope="module")
def step(model):
    return keras_armin.step_model(model, reads=True)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "new"
    exporting.export(model, serving.VOCABULARY, folder)
    return folder


@pytest.mark.slow("jax")
def test_an_exported_file_writes_the_same_text(model, folder):
    written = exported.load(folder)
    found = sampling.generate_steps(
        written.step, written.initial_states(), PROMPT, 20, 0.9, 4, seed=1
    )
    ids = [index for index, _ in found]
    expected = keras_armin.generate(model, PROMPT, 20, 0.9, top_k=4, seed=1)
    assert ids == PROMPT + expected


@pytest.mark.slow("jax", "tensorflow")
def test_an_exported_file_reads_the_same_slots(step, folder):
    written = exported.load(folder)
    layers = [("layer_1", 3), ("layer_2", 3)]
    assert written.memories == layers[: int(LAYERS)]
    ours, theirs = step.initial_states(), written.initial_states()
    for index in (1, 4, 2, 6):
        found = step([np.array([index], "int32"), *ours])
        logits, *found = map(keras.ops.convert_to_numpy, found)
        ours, reads = found[: step.num_states], found[step.num_states :]
        their_logits, theirs, their_reads = written.step(index, theirs)
        np.testing.assert_allclose(logits[0], their_logits, atol=1e-5)
        assert [int(slot[0]) for slot in reads] == their_reads


def test_a_learnt_beginning_is_exported():
    model = serving.small_model("--cell", "pixels")
    for weight in model.weights:
        if "initial" in weight.path:
            weight.assign(np.full(weight.shape, 0.3, "float32"))
    step = keras_armin.step_model(model)
    description = exporting._describe(step, serving.VOCABULARY, "onnx")
    states = {x["name"]: x for x in description["states"]}
    assert states["layer_1_memory"]["initial"] == pytest.approx([0.3] * 18)
    assert states["layer_1_pointer"]["initial"] is None
    read = exported.ExportedModel(description, None).initial_states()
    for ours, theirs in zip(step.initial_states(), read):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow("jax", "tensorflow")
def test_a_saved_model_does_what_keras_does_or_is_refused(tmp_path):
    if BACKEND == "torch":
        with pytest.raises(RunError, match="format='onnx'"):
            serving.export(tmp_path / "x", "tf_saved_model")
    else:
        # It is compared as it is written.
        folder = serving.export(tmp_path / "x", "tf_saved_model")
        description = json.loads((folder / "model.json").read_text())
        assert description["format"] == "tf_saved_model"


@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "torch", reason="refused, see above")
def test_a_saved_model_with_numbered_outputs_can_be_read(step, tmp_path):
    """As they were exported before outputs had names."""
    description = exporting._describe(
        step, serving.VOCABULARY, "tf_saved_model"
    )
    del description["outputs"]
    (tmp_path / exported.DESCRIPTION).write_text(json.dumps(description))
    step.export(tmp_path / "saved_model", verbose=False)

    exporting._compare(step, exported.load(tmp_path))


def test_what_is_missing_is_said_before_the_training(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match="--export-format onnx.*pip install"):
        char_lm.main(["--export", "x"])


@pytest.mark.slow("jax")
def test_an_export_that_does_something_else_is_refused(step, folder):
    written = exported.load(folder)
    exporting._compare(step, written)
    call = written._call
    written._call = lambda x: [call(x)[0] + 1e-3, *call(x)[1:]]
    with pytest.raises(RunError, match="off by 0.001"):
        exporting._compare(step, written)


def test_a_converter_that_fails_is_explained(model, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no such operation\nand more")

    monkeypatch.setattr(keras_armin, "export", fail)
    words = f"{BACKEND}: no such operation Try --export-format tf_saved_model"
    with pytest.raises(RunError, match=re.escape(words)):
        exporting.export(model, serving.VOCABULARY, tmp_path / "x")


def test_an_export_goes_where_nothing_is_lost(model, tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty"):
        exporting.export(model, serving.VOCABULARY, tmp_path)
    with pytest.raises(RunError, match="is a file"):
        exporting.export(model, serving.VOCABULARY, tmp_path / "letters.txt")
