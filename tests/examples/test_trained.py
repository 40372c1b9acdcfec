"""The trained models in the repository reach the figures of their card."""

import re

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

import keras_armin
from examples import demo
from examples.support import exported
from examples.support import trained
from examples.support.data import sequences
from keras_armin import sampling

LARGEST_FILE = 1_500_000
TEXT_BITS = 2.3


@pytest.fixture(scope="module")
def copy():
    return trained.load("copy")


@pytest.fixture(scope="module")
def recall():
    return trained.load("recall")


@pytest.fixture(scope="module")
def text():
    return trained.load("text")


def test_files_are_small_and_on_the_card():
    card = (trained.FOLDER / "README.md").read_text()
    files = sorted(trained.FOLDER.glob("*.keras"))

    assert {file.stem for file in files} == set(trained.FIGURES)
    for file in files:
        assert file.stat().st_size <= LARGEST_FILE
        assert f"`{file.name}`" in card


@pytest.mark.slow("jax")  # compiles every initializer
@pytest.mark.parametrize("name", trained.FIGURES)
def test_files_leave_compilation_to_the_user(name):
    model = keras.models.load_model(trained.FOLDER / f"{name}.keras")

    assert not model.compiled


def test_the_copy_model_reaches_its_figures(copy):
    found = trained.copy_figures(copy, per_length=2)

    assert found["right"] >= 0.99
    assert found["loss"] < 0.005


def test_the_recall_model_reaches_its_figures(recall):
    found = trained.recall_figures(recall, per_length=100)

    assert found["right"] >= 0.98
    assert found["loss"] < 0.05
    assert recall.get_layer("memory").cell.addressing == "hard"


def test_the_text_model_reaches_its_figures(text):
    found = trained.text_figures(text, every=10)

    assert found["bpc"] < TEXT_BITS


@pytest.mark.slow("jax", "tensorflow")
def test_figures_are_those_of_the_weights(text, recall):
    text, recall = map(keras.models.clone_model, (text, recall))

    assert trained.text_figures(text, every=75)["bpc"] > 7
    assert trained.recall_figures(recall, per_length=20)["right"] < 0.1


def test_the_text_model_and_its_export_are_the_same(text):
    written = exported.load(trained.FOLDER / "text")
    ids = list(b"def main(argv=None):\n    return")
    expected = keras.ops.convert_to_numpy(text(np.array([ids])))[0]

    states, found = written.initial_states(), []
    for index in ids:
        logits, states, _ = written.step(index, states)
        found.append(logits)
    assert written.vocabulary == bytes(range(256))
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-4)


def test_the_export_writes_the_text_of_the_model(text):
    written = exported.load(trained.FOLDER / "text")
    prompt, options = list(b"def "), {"length": 40, "temperature": 0.6}
    found = sampling.generate_steps(
        written.step,
        written.initial_states(),
        prompt,
        **options,
        top_k=256,
        seed=1,
    )
    expected = keras_armin.generate(text, prompt, **options, seed=1)

    assert [token for token, _ in found] == prompt + expected
    assert len(set(expected)) > 5


def test_the_demo_prints_a_right_copy_and_its_reads(capsys):
    demo.show_copy(length=5, seed=3)
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^([01]{8}) +(\d+) +(\d+)  ([01]{8})(.*)$", printed, re.MULTILINE
    )

    assert len(rows) == 5
    assert len({given for given, *_ in rows}) > 1
    for step, (given, written, _, answered, wrong) in enumerate(rows):
        assert given == answered and not wrong
        assert int(written) == step + 1  # slot 0 has the first flag
    assert len({read for _, _, read, _, _ in rows}) == 5
    assert "0 of 40 bits are wrong" in printed


def test_the_demo_asks_as_in_training():
    items = np.random.default_rng(0).integers(0, 2, (1, 4, 3, 6))
    given, *_ = sequences.recall_rows(
        items.astype("float32"), np.array([[4]]), np.array([[1]])
    )
    silence = np.zeros((1, 3, 8))

    found = demo.recall_input(items[0], asked=1)
    np.testing.assert_array_equal(found, np.concatenate([given, silence], 1))


def test_the_demo_prints_what_follows_an_item(capsys):
    assert demo.show_recall(count=4, seed=3) == 0
    printed = capsys.readouterr().out
    item = r"([01]{6} [01]{6} [01]{6})"
    items = re.findall(rf"^{item}  \d", printed, re.MULTILINE)
    asked = re.search(rf"what follows  {item}\?", printed)[1]
    answer = re.search(rf"answer +{item}  read slots \d", printed)[1]

    assert len(items) == 4
    assert answer == items[items.index(asked) + 1]


@pytest.mark.slow("jax", "tensorflow")
def test_the_demo_prints_text_above_its_reads(text, capsys):
    demo.show_text("def ", length=40, seed=1)
    _, _, shown = capsys.readouterr().out.partition("slots read:\n\n")
    lines = shown.splitlines()
    characters, slots = "".join(lines[::2]), "".join(lines[1::2])
    ids = list(b"def ") + keras_armin.generate(
        text, list(b"def "), 40, temperature=0.6, seed=1
    )
    embedded = text.get_layer("embedding")(np.array([ids]))
    trace = keras_armin.trace_memory(text.get_layer("armin"), embedded)

    assert characters == "".join(chr(x) if x != 10 else " " for x in ids)
    assert slots == "".join(map(str, trace.read_slots[0]))
    assert len(set(slots)) > 3


@pytest.mark.parametrize(
    "options, words",
    [
        (["--length", "50"], "length takes 1 to 49, not '50'"),
        (["--items", "x"], "items takes 2 to 5, not 'x'"),
        (["--prompt", ""], "takes at least one character"),
    ],
)
def test_the_demo_explains_what_it_cannot_do(options, words, capsys):
    with pytest.raises(SystemExit):
        demo.main(options)
    assert words in capsys.readouterr().err


@pytest.mark.slow("jax", "tensorflow")
def test_the_demo_continues_any_bytes(text, capsys):
    # As a shell passes what is not UTF-8.
    demo.show_text("\udcff\u00e9", length=40, seed=1)
    assert "after '\\udcff\u00e9'" in capsys.readouterr().out


def test_the_demo_counts_wrong_bits(monkeypatch, capsys):
    model = trained.load("copy")
    logits = model.get_layer("logits")
    kernel, bias = logits.get_weights()
    logits.set_weights([0 * kernel, 0 * bias - 1])  # answers zeros
    monkeypatch.setattr(trained, "load", lambda name: model)

    wrong = demo.show_copy(length=4, seed=3)

    printed = capsys.readouterr().out
    ones = sum(
        row.count("1") for row in re.findall(r"^([01]{8}) ", printed, re.M)
    )
    assert wrong == ones > 0
    assert f"{ones} of 32 bits are wrong" in printed
    assert printed.count("  wrong\n") > 0
