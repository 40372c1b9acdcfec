"""The trained models in the repository reach the figures of their card."""

import re

import keras
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import demo
from examples.support import trained

LARGEST_FILE = 1_500_000


@pytest.fixture(scope="module")
def copy():
    return trained.load("copy")


def test_files_are_small_and_on_the_card():
    card = (trained.FOLDER / "README.md").read_text()
    files = sorted(trained.FOLDER.glob("*.keras"))

    assert {file.stem for file in files} == set(trained.FIGURES)
    for file in files:
        assert file.stat().st_size <= LARGEST_FILE
        assert f"`{file.name}`" in card


@pytest.mark.parametrize("name", trained.FIGURES)
def test_files_leave_compilation_to_the_user(name):
    model = keras.models.load_model(trained.FOLDER / f"{name}.keras")

    assert not model.compiled


def test_the_copy_model_reaches_its_figures(copy):
    found = trained.copy_figures(copy, per_length=2)

    assert found["right"] >= 0.99
    assert found["loss"] < 0.005


def test_the_demo_prints_a_right_copy_and_its_reads(capsys):
    demo.main(["--length", "5", "--seed", "3"])
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
