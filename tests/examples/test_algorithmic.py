"""The script for the algorithmic tasks, in its quickest form."""

import json

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import algorithmic
from examples.support import networks
from examples.support.cli import RunError
from examples.support.data import sequences
from tests.helpers.common import slow_except_on

TINY = [
    *("--units", "8", "--slots", "4", "--memory-dim", "4", "--bands", "1"),
    *("--batch-size", "2", "--updates", "4", "--epoch-updates", "2"),
    *("--sizes", "length=1:2"),
]


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch):
    monkeypatch.setattr(algorithmic, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(algorithmic, "TEST_BATCHES", 2)


def losses(*values):
    return [{"val_loss": value} for value in values]


def test_solved_is_the_first_good_point_that_stays_good():
    good, bad = 0.009, 0.02

    def solved_at(*values):
        return algorithmic.solved_at(losses(*values), epoch_updates=200)

    assert solved_at(*[good] * 9) is None  # too early to tell
    assert solved_at(*[good] * 10) == 200
    assert solved_at(bad, *[good] * 10) == 400
    assert solved_at(good, bad, bad, *[good] * 7) == 200
    # Three of ten are too many, and the first itself has to be good.
    assert solved_at(good, bad, bad, bad, *[good] * 6) is None
    assert solved_at(good, bad, bad, bad, *[good] * 10) == 1000
    assert solved_at(bad, bad, *[good] * 9) is None


class Oracle:
    """Answers copies from the input, but with `flaw` never a leading 1."""

    def __init__(self, flaw):
        self.flaw = flaw

    def predict_on_batch(self, inputs):
        width = inputs.shape[2] - 2
        logits = np.full((*inputs.shape[:2], width), -20.0)
        for x, y in zip(inputs, logits):
            length = int(x[:, width + 1].argmax()) - 1
            y[length + 2 : 2 * length + 2] += 40.0 * x[1 : length + 1, :width]
            if self.flaw:
                y[:, 0] = -20.0
        return logits


def test_the_test_sees_a_right_and_a_wrong_network():
    arguments = algorithmic.parse_arguments(["--bands", "1"])
    task = sequences.copy().with_sizes(length=(1, 4))

    loss, right = algorithmic.test(Oracle(False), task, arguments)
    assert loss < 1e-6 and right == 1.0
    loss, right = algorithmic.test(Oracle(True), task, arguments)
    assert 0.5 < loss < 3 and 0.1 < right < 0.6


@slow_except_on("torch")
def test_the_script_runs_and_leaves_its_files(tmp_path, capsys):
    result = algorithmic.main([*TINY, "--output", str(tmp_path)])
    printed = capsys.readouterr().out

    assert json.loads(printed.strip().splitlines()[-1]) == json.loads(
        json.dumps(result)
    )
    assert json.loads((tmp_path / "result.json").read_text())["updates"] == 4
    assert result["solved_at"] is None
    assert result["paper"] is None  # not the paper's sizes
    assert result["backend"] == keras.backend.backend()
    assert "target" in printed and "output" in printed
    for name in ("memory.png", "curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert (tmp_path / "best.weights.h5").exists()
    assert list((tmp_path / "tensorboard").rglob("events.*"))


@pytest.mark.slow("jax")
def test_a_soft_run_is_tested_with_discrete_reads(tmp_path):
    options = ["--addressing", "soft", "--output", str(tmp_path)]
    arguments = algorithmic.parse_arguments([*TINY, *options])
    task = algorithmic.make_task(arguments)
    model = algorithmic.build_model(task, arguments)
    twin = algorithmic.with_argmax_reads(model, task, arguments)
    inputs = sequences.one_batch(task, 2)[0].numpy()

    assert twin.get_layer("memory").addressing == "hard"
    for ours, theirs in zip(twin.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.allclose(
        twin.predict_on_batch(inputs), model.predict_on_batch(inputs)
    )


def test_the_paper_is_quoted_for_its_own_settings_only():
    def quoted(*argv):
        return algorithmic.paper_figure(algorithmic.parse_arguments(argv))

    assert quoted("--preset", "paper", "--task", "recall") == 0.052
    assert quoted("--preset", "paper", "--model", "lstm") == 0.359
    assert quoted("--preset", "paper", "--sizes", "length=3") is None
    assert quoted("--preset", "paper", "--units", "8") is None
    assert quoted("--preset", "quick") is None
    assert quoted("--preset", "paper", "--task", "sort") is None
    dnc = ("--preset", "paper", "--model", "dnc")
    assert quoted(*dnc) is None
    assert quoted(*dnc, "--variant", "released") == 0.429
    assert quoted(*dnc, "--variant", "released", "--reads", "2") is None


@pytest.mark.parametrize("preset", algorithmic.PRESETS)
@pytest.mark.parametrize("task", sequences.TASKS)
def test_every_preset_is_complete_for_every_task(preset, task):
    for model in networks.NETWORKS:
        arguments = algorithmic.parse_arguments(
            ["--preset", preset, "--task", task, "--model", model]
        )
        assert None not in (
            arguments.updates,
            arguments.epoch_updates,
            arguments.batch_size,
            arguments.learning_rate,
            arguments.optimizer,
        )
        assert algorithmic.make_task(arguments).name == task
    assert (
        algorithmic.parse_arguments(
            ["--preset", preset, "--task", task, "--annealing", "3"]
        ).annealing
        == 3
    )


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("ntm", {"variant": "released"}, 85_600 - 480),
        ("dnc", {}, 84_516),
        ("sam", {"variant": "released"}, 79_434),
        ("tardis", {"variant": "released"}, 92_642),
        ("awta", {}, 92_193),
    ],
)
def test_the_paper_preset_has_the_parameters_of_each_network(
    model, options, expected
):
    arguments = algorithmic.parse_arguments(
        ["--preset", "paper", "--model", model]
    )
    for name, value in options.items():
        setattr(arguments, name, value)
    task = algorithmic.make_task(arguments)

    built = algorithmic.build_model(task, arguments)

    assert networks.parameters(built) == expected


@slow_except_on("torch")
def test_a_network_is_trained_by_its_name(tmp_path):
    result = algorithmic.main(
        [
            *("--model", "sab", "--units", "6", "--slots", "4"),
            # An option of other networks, which is ignored.
            *("--addressing", "soft"),
            *("--sizes", "length=1:2", "--bands", "1"),
            *("--updates", "2", "--epoch-updates", "1"),
            *("--output", f"{tmp_path}"),
        ]
    )

    assert result["model"] == "sab" and np.isfinite(result["test_loss"])
    assert (tmp_path / "memory.png").exists()


def test_the_best_setting_for_recall_matches_contents():
    arguments = algorithmic.parse_arguments(
        ["--preset", "best", "--task", "recall"]
    )

    assert arguments.content_addressing and arguments.addressing == "soft"
    assert (arguments.temperature, arguments.final_temperature) == (1.0, 0.1)
    assert (arguments.annealing, arguments.updates) == (10_000, 14_000)


@pytest.mark.parametrize(
    "sizes,message",
    [
        (["length=a"], "takes NAME=NUMBER or NAME=LOW:HIGH, not 'length=a'"),
        (["length"], "takes NAME=NUMBER or NAME=LOW:HIGH, not 'length'"),
        (["items=3"], r"has the sizes \['length'\]"),
        (["length=0"], "at least 1"),
    ],
)
def test_wrong_sizes_are_explained(sizes, message):
    arguments = algorithmic.parse_arguments(["--sizes", *sizes])
    with pytest.raises(RunError, match=f"--sizes: .*{message}"):
        algorithmic.make_task(arguments)


def test_no_more_updates_than_asked_for():
    arguments = algorithmic.parse_arguments(["--updates", "10"])
    assert arguments.epoch_updates == 10


def test_help_names_tasks_presets_and_networks(capsys):
    with pytest.raises(SystemExit):
        algorithmic.main(["--help"])
    printed = capsys.readouterr().out

    for word in ("recall", "--preset", "paper", "ln-lstm", "--resume"):
        assert word in printed
