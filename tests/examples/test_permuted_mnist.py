"""The script for permuted pixels in its quickest form, and its curves."""

import json

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from matplotlib import pyplot as plt

from examples import permuted_mnist
from examples.support import networks
from examples.support import plotting
from examples.support.cli import RunError
from examples.support.data import pixels


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("armin", 80_138), ("lstm", 67_850)],
)
def test_the_paper_preset_has_the_parameters_that_the_paper_uses(
    name, parameters
):
    """Of the released code's, those that take part."""
    arguments = permuted_mnist.parse_arguments(
        ["--preset", "paper", "--model", name]
    )
    model = permuted_mnist.build_model(arguments, 784, updates_per_epoch=10)

    assert networks.parameters(model) == parameters
    assert arguments.data == "mnist" and arguments.batch_size == 128


def test_presets_depend_on_the_model_and_options_come_first():
    parse = permuted_mnist.parse_arguments

    assert parse(["--preset", "paper", "--model", "lstm"]).units == 128
    assert parse(["--preset", "paper"]).units == 100
    assert parse(["--preset", "paper", "--units", "7"]).units == 7
    assert parse([]).data == "digits"
    assert parse(["--data", "mnist"]).data == "mnist"


@pytest.mark.parametrize("preset", permuted_mnist.PRESETS)
def test_every_preset_is_complete(preset):
    arguments = permuted_mnist.parse_arguments(["--preset", preset])
    for name in ("data", "epochs", "batch_size", "learning_rate", "decay"):
        assert getattr(arguments, name) is not None, name


def test_the_learning_rate_falls_as_the_released_one_does():
    arguments = permuted_mnist.parse_arguments(["--preset", "paper"])
    rate = permuted_mnist._learning_rate(arguments, updates_per_epoch=1)

    np.testing.assert_allclose(
        [float(rate(step)) for step in (0, 119, 121, 149)],
        [1e-3, 1e-3, 1e-4, 1e-4],
        rtol=1e-5,
    )


def test_the_temperature_falls_as_the_released_one_does():
    parse = permuted_mnist.parse_arguments
    (callback,) = permuted_mnist.callbacks(parse(["--preset", "paper"]))

    assert [callback.schedule(epoch) for epoch in (0, 1, 26, 149)] == [
        *(1.0, 1 / 2, 1 / 27, 1 / 27)
    ]
    lstm = parse(["--preset", "paper", "--model", "lstm"])
    assert permuted_mnist.callbacks(lstm) == []


def test_two_rules_for_the_temperature_are_refused(capsys):
    with pytest.raises(SystemExit):
        permuted_mnist.parse_arguments(
            ["--preset", "paper", "--annealing", "10"]
        )
    assert "--released-temperature" in capsys.readouterr().err


@pytest.fixture
def few_digits(monkeypatch):
    """Nine steps and few images: the script itself is what is tested."""
    whole = pixels.load("digits")
    few = pixels.Splits(
        *(
            pixels.Samples(part.images[:count, :9], part.labels[:count])
            for part, count in zip(whole, (12, 6, 6))
        )
    )
    monkeypatch.setattr(pixels, "load", lambda name, data_dir: few)


@pytest.mark.slow("jax", "tensorflow")
def test_the_script_runs_and_leaves_its_files(few_digits, tmp_path, capsys):
    result = permuted_mnist.main(
        [
            *("--units", "4", "--slots", "3", "--memory-dim", "4"),
            *("--batch-size", "5", "--epochs", "2"),
            *("--training-images", "7", "--output", str(tmp_path)),
        ]
    )
    printed = capsys.readouterr().out.strip().splitlines()[-1]

    assert json.loads(printed) == result
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["updates"] == 2 and result["epochs"] == 2
    assert result["paper_accuracy"] is None
    assert result["backend"] == keras.backend.backend()
    assert 0 <= result["test_accuracy"] <= 1
    for name in ("curve.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_papers_figures_are_beside_those_of_mnist():
    for name, accuracy in (
        ("armin", 0.943),
        ("lstm", 0.927),
        ("ln-lstm", None),
    ):
        arguments = permuted_mnist.parse_arguments(
            ["--data", "mnist", "--model", name]
        )
        assert permuted_mnist.paper_accuracy(arguments) == accuracy


def history(*values):
    return [{"loss": value} for value in values]


def drawn(runs, **options):
    """The axes after drawing, and the points of each line."""
    ax = plt.figure().gca()
    plotting.plot_curves(runs, "loss", ax, **options)
    lines = [np.transpose(line.get_data()).tolist() for line in ax.lines]
    plt.close(ax.figure)
    return ax, lines


def test_a_curve_is_the_middle_of_its_runs():
    runs = {"ARMIN": [history(1, 2), history(3, 2), history(8, 5)]}

    ax, lines = drawn(runs)
    assert lines[0] == [[1, 3], [2, 2]]
    (band,) = ax.collections
    edges = band.get_paths()[0].vertices
    assert edges[:, 1].min() == 1 and edges[:, 1].max() == 8
    _, lines = drawn(runs, middle="mean")
    assert lines[0] == [[1, 4], [2, 3]]


def test_the_middle_ends_with_the_shortest_run_and_the_others_go_on():
    _, lines = drawn({"ARMIN": [history(1, 2), history(3, 4, 5, 6)]})

    assert lines[0] == [[1, 2], [2, 3]]
    assert [[2, 4], [3, 5], [4, 6]] in lines


def test_the_axis_may_count_updates(capsys):
    _, lines = drawn({"a": [history(5, 6)]}, updates_per_epoch=200)
    assert lines == [[[200, 5], [400, 6]]]
    with pytest.raises(SystemExit):
        plotting.main(
            ["--metric", "loss", "--output", "x.png", "--x", "updates", "a=b"]
        )
    assert "--updates-per-epoch" in capsys.readouterr().err


def write_log(folder, *values):
    folder.mkdir()
    rows = [f"{i},{value}" for i, value in enumerate(values)]
    (folder / "log.csv").write_text("\n".join(["epoch,val_loss", *rows, ""]))
    return folder


def test_pictures_are_drawn_from_the_command_line(tmp_path):
    a, b = write_log(tmp_path / "a", 3, "NA", 1), write_log(tmp_path / "b", 2)
    path = tmp_path / "x.png"
    command = ["--metric", "val_loss", "--output", str(path)]
    for more in (
        [f"ARMIN={a},{b}", f"LSTM={b}/log.csv", "--target", "0.01"],
        ["--log-scale", "--panel", "copy", f"A={a}", "--panel", "s", f"B={b}"],
    ):
        plotting.main([*command, *more])
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


@pytest.mark.parametrize(
    ("curve", "explanation"),
    [
        ("ARMIN", "LABEL=RUN,RUN, not 'ARMIN'"),
        ("ARMIN=missing", "cannot read missing: No such file"),
        ("ARMIN=empty", "no complete epoch in empty/log.csv"),
        ("ARMIN=full", "no accuracy in full/log.csv, but epoch, val_loss"),
        (None, "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_explained(
    curve, explanation, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "empty")
    write_log(tmp_path / "full", 1)
    named = [curve] if curve else []
    with pytest.raises(RunError, match=explanation):
        plotting.main(["--metric", "accuracy", "--output", "x.png", *named])
