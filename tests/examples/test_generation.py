"""Text from a trained model: in Keras, and from an exported file."""

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
from examples.support import generation
from examples.support import sampling
from examples.support.cli import RunError
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
def writer(model):
    return generation.Writer(model)


@pytest.fixture(scope="module")
def step(model):
    return keras_armin.step_model(model, reads=True)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "new"
    exporting.export(model, serving.VOCABULARY, folder)
    return folder


LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], "float32"))
CHANCES = {
    (1.0, 9): [0.4, 0.3, 0.2, 0.1],
    (0.5, 9): [16 / 30, 9 / 30, 4 / 30, 1 / 30],
    (1.0, 2): [4 / 7, 3 / 7, 0, 0],
    (0.0, 9): [1, 0, 0, 0],
}


@pytest.mark.parametrize("temperature, top_k", CHANCES)
def test_characters_come_as_often_as_they_should(temperature, top_k, rng):
    chosen = [
        sampling.choose(np, LOGITS, noise, temperature, top_k)
        for noise in sampling.gumbel_noise(rng, 4000, 4)
    ]
    found = np.bincount(chosen, minlength=4) / 4000
    expected = CHANCES[temperature, top_k]
    np.testing.assert_allclose(found, expected, atol=0.03)


@pytest.mark.parametrize("temperature, top_k", CHANCES)
def test_compiled_loops_choose_as_numpy_does(temperature, top_k, rng):
    logits = keras.ops.convert_to_tensor(LOGITS)
    for noise in sampling.gumbel_noise(rng, 30, 4):
        found = sampling.choose(
            keras.ops,
            logits,
            keras.ops.convert_to_tensor(noise),
            temperature,
            top_k,
        )
        expected = sampling.choose(np, LOGITS, noise, temperature, top_k)
        assert int(found) == expected


def test_noise_is_the_same_by_rows_and_at_once():
    at_once = sampling.gumbel_noise(np.random.default_rng(3), 4, 5)
    rng = np.random.default_rng(3)
    by_rows = [sampling.gumbel_noise(rng, 5) for _ in range(4)]
    np.testing.assert_array_equal(at_once, by_rows)


def test_the_likeliest_text_is_that_of_the_whole_model(model, writer):
    written = writer(PROMPT, length=6, temperature=0)

    ids = np.array([[*PROMPT, *written]] * 2, "int32")
    logits = model.predict_on_batch({"ids": ids, "reset": np.ones(2, bool)})
    likeliest = np.asarray(logits)[0].argmax(axis=-1)
    assert written == likeliest[len(PROMPT) - 1 : -1].tolist()


def test_a_seed_gives_one_text_and_another_seed_another(writer):
    first = writer(PROMPT, 20, seed=1)
    assert len(first) == 20 and set(first) <= set(range(7))
    assert writer(PROMPT, 20, seed=1) == first
    assert writer(PROMPT, 20, seed=2) != first
    assert writer(PROMPT, 20, top_k=1, seed=2) == writer(
        PROMPT, 20, temperature=0
    )
    assert writer(PROMPT, 0) == []
    with pytest.raises(ValueError, match="prompt"):
        writer([], 3)


def test_a_writer_sees_new_weights(model, writer):
    before = [w.copy() for w in model.get_weights()]
    first = writer(PROMPT, 20, seed=1)
    try:
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=w.shape) for w in before])
        assert writer(PROMPT, 20, seed=1) != first
    finally:
        model.set_weights(before)
    assert writer(PROMPT, 20, seed=1) == first


def test_an_exported_file_writes_the_same_text(writer, folder):
    written = exported.load(folder)
    found = sampling.write(
        written.step, written.initial_states(), PROMPT, 20, 0.9, 4, seed=1
    )
    ids = [index for index, _ in found]
    assert ids == PROMPT + writer(PROMPT, 20, 0.9, top_k=4, seed=1)


def test_an_exported_file_reads_the_same_slots(step, folder):
    written = exported.load(folder)
    call = generation.compiled_step(step)
    layers = [("layer_1", 3), ("layer_2", 3)]
    assert written.memories == layers[: int(LAYERS)]
    ours, theirs = step.initial_states(), written.initial_states()
    for index in (1, 4, 2, 6):
        logits, *found = call([np.array([index], "int32"), *ours])
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


def test_a_saved_model_does_what_keras_does_or_is_refused(tmp_path):
    if BACKEND == "torch":
        with pytest.raises(RunError, match="format='onnx'"):
            serving.export(tmp_path / "x", "tf_saved_model")
    else:
        # It is compared as it is written.
        folder = serving.export(tmp_path / "x", "tf_saved_model")
        description = json.loads((folder / "model.json").read_text())
        assert description["format"] == "tf_saved_model"


def test_what_is_missing_is_said_before_the_training(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match="--export-format onnx.*pip install"):
        char_lm.main(["--export", "x"])


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
