"""The character language model in its quickest form."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import char_lm
from examples.support import exporting
from examples.support import networks
from examples.support import runs
from examples.support.cli import RunError
from examples.support.data import text

BACKEND = keras.backend.backend()
SIZES = (
    *("--units", "4", "--slots", "3", "--embedding", "4"),
    *("--batch-size", "2", "--steps", "5"),
)


@pytest.fixture
def corpus():
    ids = np.random.default_rng(1).integers(0, 6, 200).astype("uint8")
    return text.Corpus(ids[:23], ids[23:60], ids[60:], b"abc de")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some text.txt"
    path.write_bytes(b"one fish, two fish, red fish \xc3\xa4\n" * 16)
    return path


def untouched(corpus, *options):
    """A model that training does not change, and its arguments."""
    arguments = char_lm.parse_arguments(
        [*SIZES, "--learning-rate", "1e-30", *options]
    )
    size = arguments.batch_size
    return char_lm.build_model(arguments, 6, size, updates=10), arguments


@pytest.mark.slow("jax", "tensorflow")
def test_training_carries_state_and_validation_leaves_it(
    corpus, tmp_path, monkeypatch
):
    # 11 characters in a lane: two chunks a pass. No noise: zoneout is 0.
    model, arguments = untouched(corpus, "--model", "ln-lstm")
    run = runs.Run(tmp_path, {})
    saved = []  # the state at the end of each section
    monkeypatch.setattr(
        run.resume,
        "write_file",
        lambda _: saved.append(model.get_layer("layer_1").get_state()),
    )
    char_lm.train(run, model, corpus, arguments, sections=3, updates=1)
    lanes = text.lanes(corpus.train, 2, 5)

    first, second = lanes[:, :5], lanes[:, 5:10]
    for states, (ids, reset) in zip(
        saved, ((first, True), (second, False), (first, True)), strict=True
    ):
        model.predict_on_batch({"ids": ids, "reset": np.full(2, reset)})
        expected = model.get_layer("layer_1").get_state()
        for name in ("output", "c"):
            np.testing.assert_allclose(
                states[name], expected[name], rtol=1e-4, atol=1e-6
            )
    assert not np.allclose(saved[0]["c"], saved[1]["c"], atol=1e-3)


@pytest.mark.slow("jax", "tensorflow")
def test_a_test_in_pieces_is_that_of_the_whole_text(corpus, monkeypatch):
    model, arguments = untouched(corpus, "--zoneout", "0.5")
    single = char_lm.single_lane(model, arguments, 6)
    ids = corpus.test[:12]  # 11 targets: the last piece is not full
    logits = single.predict_on_batch(char_lm.batch_of(ids[:-1], reset=True))[0]
    logits = np.asarray(logits, "float64")
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log2(chances[np.arange(11), ids[1:]]).mean()

    monkeypatch.setattr(char_lm, "TEST_STEPS", 4)
    assert char_lm.evaluate(single, ids) == pytest.approx(expected, rel=1e-5)
    # The batch's second lane gives what the single one does.
    both = np.stack([corpus.test[50:61], ids[:-1]])
    batch = model.predict_on_batch({"ids": both, "reset": np.ones(2, bool)})
    np.testing.assert_allclose(batch[1], logits, rtol=1e-4, atol=1e-5)


def test_bits_per_character_by_hand():
    metric = networks.BitsPerCharacter()
    logits = np.log([[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]])
    metric.update_state([[0, 1]], logits)
    assert float(metric.result()) == pytest.approx(1.5)
    metric.update_state([[0, 1]], logits, [[0.0, 1.0]])
    assert float(metric.result()) == pytest.approx(5 / 3)


def train_in_three_ways(text_file, folder):
    """To the end; until a Ctrl-C; and from there to the end."""
    arguments = [
        *("--data", str(text_file), *SIZES, "--deterministic"),
        *("--updates", "7", "--epoch-updates", "2", "--annealing", "6"),
        *("--zoneout", "0.2"),
        *("--prompt", "two ", "--sample", "6", "--test-chars", "9"),
    ]

    def interrupt(speed, batch, logs=None):
        if batch == 1 and speed.model.optimizer.iterations > 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(char_lm, "show", lambda *_: None)
        char_lm.main([*arguments, "--output", str(folder / "whole")])
        arguments += ["--output", str(folder / "parts")]
        patch.setattr(runs.Speed, "on_train_batch_begin", interrupt)
        with pytest.raises(SystemExit, match="130"):
            with runs.explained_errors():
                char_lm.main(arguments)
    with np.load(folder / "parts" / runs.RESUME_FILE) as stopped:
        assert len(json.loads(str(stopped["history"]))) == 2
    with pytest.MonkeyPatch.context() as patch:
        # What it does with a model is for tests/examples/test_generation.py.
        patch.setattr(
            exporting, "export", lambda model, text, to, _: to.write_bytes(text)
        )
        to = folder / "exported"
        char_lm.main([*arguments, "--resume", "--export", str(to)])


@pytest.mark.slow("jax", "tensorflow")
def test_a_resumed_run_ends_with_the_same_bits(text_file, tmp_path, capfd):
    if BACKEND == "tensorflow":
        # Determinism cannot be taken back: it would reach other tests.
        command = (
            "import pathlib, sys\n"
            "from tests.examples import test_char_lm as t\n"
            "t.train_in_three_ways(*map(pathlib.Path, sys.argv[1:]))"
        )
        subprocess.run(
            [sys.executable, "-c", command, str(text_file), str(tmp_path)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=True,
        )
    else:
        train_in_three_ways(text_file, tmp_path)

    with (
        np.load(tmp_path / "whole" / runs.RESUME_FILE) as whole,
        np.load(tmp_path / "parts" / runs.RESUME_FILE) as parts,
    ):
        assert set(whole.files) == set(parts.files)
        for name in set(whole.files) - {"history", "generator"}:
            np.testing.assert_array_equal(whole[name], parts[name], name)
        histories = [json.loads(str(x["history"])) for x in (whole, parts)]
    for name in ("bpc", "val_bpc"):
        first, second = ([h[name] for h in history] for history in histories)
        assert first == second and len(first) == 4
    check_what_is_left(tmp_path / "parts", capfd.readouterr().out)
    vocabulary = set(text_file.read_bytes())
    assert set((tmp_path / "exported").read_bytes()) == vocabulary


def check_what_is_left(folder, printed):
    result = json.loads(printed.splitlines()[-1])
    assert result["updates"] == 8 and result["test_characters"] == 9
    assert result["backend"] == BACKEND and result["paper_bpc"] is None
    assert 2 < result["test_bpc"] < 6
    assert "\ntwo |" in printed
    for name in ("curve.png", "reads.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert len((folder / "log.csv").read_text().splitlines()) == 5


def test_a_run_is_resumed_with_its_own_text_only(text_file, tmp_path):
    arguments = char_lm.parse_arguments(["--data", str(text_file), *SIZES])

    def settings():
        corpus = text.load(arguments.data, arguments.data_dir)
        return char_lm.run_settings(arguments, corpus)

    before = settings()
    assert "sample" not in before and before["steps"] == 5
    runs.Run(tmp_path / "run", before)
    text_file.write_bytes(text_file.read_bytes().replace(b"fish", b"birds"))
    with pytest.raises(RunError, match="text: "):
        runs.Run(tmp_path / "run", settings(), resume=True)


@pytest.mark.parametrize("preset", char_lm.PRESETS)
def test_presets_give_what_options_do_not(preset):
    armin = char_lm.parse_arguments(["--preset", preset])
    lstm = char_lm.parse_arguments(["--preset", preset, "--model", "ln-lstm"])
    other = char_lm.parse_arguments(["--preset", preset, "--units", "7"])

    assert armin.layer_norm and lstm.units > armin.units
    assert other.units == 7 and other.steps == armin.steps
    assert char_lm.paper_bpc(other) is None
    assert (char_lm.paper_bpc(armin) is None) == ("paper" not in preset)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    "preset, model, symbols, expected",
    [
        ("ptb-small", "armin", 50, 773_540),
        ("ptb-small", "ln-lstm", 50, 774_258),
        ("ptb-small", "ntm", 50, 770_544),
        ("ptb-small", "dnc", 50, 775_730),
        ("ptb-small", "sam", 50, 772_400),
        ("ptb-small", "tardis", 50, 773_880),
        ("ptb-small", "awta", 50, 771_030),
        ("ptb-small", "sab", 50, 773_028),
        ("ptb-small", "indrnn", 50, 773_514),
        ("ptb-small", "rhn", 50, 775_356),
        ("ptb-small", "hyper-rhn", 50, 776_092),
        ("ptb-small", "nas", 50, 774_754),
        ("ptb-small", "fs-lstm", 50, 775_612),
        ("ptb-small", "hyper-lstm", 50, 775_078),
        ("ptb-small", "hm-lstm", 50, 770_509),
        # 7.2, 15.5 and 16.28 million in the publications.
        ("paper-ptb", "fs-lstm", 50, 7_225_050),
        ("paper-ptb", "hyper-rhn", 50, 15_493_386),
        ("paper-ptb", "nas", 50, 16_274_770),
        ("paper-enwik8", "armin", 205, 21_656_821),
    ],
)
def test_numbers_of_parameters(preset, model, symbols, expected, monkeypatch):
    # As many numbers, without the time it takes to make them orthogonal.
    monkeypatch.setattr(
        keras.initializers.Orthogonal,
        "__call__",
        lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype),
    )
    arguments = char_lm.parse_arguments(["--preset", preset, "--model", model])
    built = char_lm.build_model(arguments, symbols, batch_size=1, updates=1)
    assert networks.parameters(built) == expected


@pytest.mark.slow("jax", "tensorflow")
def test_the_preset_of_indrnn_has_21_layers_that_add_to_their_inputs(corpus):
    paper = char_lm.parse_arguments(
        ["--preset", "paper-ptb", "--model", "indrnn"]
    )
    assert (paper.layers, paper.units, paper.steps) == (21, 2000, 50)
    # The state is carried: a bound of 1.
    assert paper.residual and paper.layer_norm and paper.max_length is None
    model, _ = untouched(
        corpus, "--preset", "paper-ptb", "--model", "indrnn", *SIZES
    )
    ids = np.arange(10).reshape(2, 5) % 6
    names = [f"layer_{k}" for k in (1, 2)] + ["sum_2"]
    outputs = [model.get_layer(name).output for name in names]
    first, second, both = keras.Model(model.input, outputs).predict_on_batch(
        {"ids": ids, "reset": np.ones(2, bool)}
    )

    assert sum("layer_" in layer.name for layer in model.layers) == 21
    np.testing.assert_allclose(first + second, both, atol=1e-6)


@pytest.mark.slow("jax", "tensorflow")
def test_boundaries_of_hm_lstm_are_drawn_over_the_text(corpus, tmp_path):
    _, arguments = untouched(corpus, "--model", "hm-lstm")
    single = char_lm.build_model(arguments, 6, batch_size=1, updates=1)
    path = tmp_path / "boundaries.png"
    layer = single.get_layer("layer_1")
    char_lm.draw_boundaries(layer, single, corpus, path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_explained(text_file):
    with pytest.raises(RunError, match="ln-lstm --no-layer-norm"):
        char_lm.main(["--model", "lstm"])
    with pytest.raises(RunError, match="which --prompt has"):
        char_lm.main(["--data", str(text_file), *SIZES, "--prompt", "X"])
    with pytest.raises(RunError, match="The validation text of 25 "):
        char_lm.main(["--data", str(text_file), *SIZES, "--steps", "12"])
