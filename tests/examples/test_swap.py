"""An LSTM swapped for ARMIN: the tasks by hand, and the script in small."""

import json

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import swap
from examples.support import networks
from examples.support.cli import RunError
from examples.support.data import swap_tasks
from examples.support.data.swap_tasks import TASKS

TINY = ["--tasks", "recall", "--updates-scale", "0.02"]
LSTM_TWICE = ["--settings", "lstm", "--seeds", "1", "2"]


def drawn(name, samples=6, held_out=False):
    rng = np.random.default_rng(3)
    return TASKS[name].draw(rng, samples, held_out=held_out)


def as_text(ids):
    return "".join(swap_tasks.CHARACTERS[i] for i in ids)


@pytest.mark.parametrize("held_out", [False, True])
def test_the_sums_are_those_of_the_questions(held_out):
    inputs, targets = drawn("addition", 50, held_out)

    for question, answer in zip(inputs.argmax(-1), targets):
        a, b = as_text(question)[::-1].split("+")
        assert as_text(answer) == str(int(a) + int(b)).ljust(len(answer))


def test_a_sum_that_is_held_out_is_not_trained_with_in_any_order():
    def pairs(held_out):
        inputs, _ = drawn("addition", 5000, held_out)
        questions = (as_text(q)[::-1].split("+") for q in inputs.argmax(-1))
        return {tuple(sorted(map(int, q))) for q in questions}

    trained, held_out = pairs(False), pairs(True)

    assert len(held_out) > 300
    assert not trained & held_out


def test_a_question_and_its_answer_have_the_characters_of_keras_example():
    questions, answers = swap_tasks.spell([(35, 6), (99, 99)])

    assert [as_text(q) for q in questions.argmax(-1)] == [" 6+53", "99+99"]
    assert [as_text(a) for a in answers] == ["41 ", "198"]


def test_symbols_come_back_from_the_last_to_the_first():
    inputs, targets = drawn("reverse")

    np.testing.assert_array_equal(inputs.argmax(-1)[:, ::-1], targets)


def test_the_symbol_to_recall_is_the_first_and_no_distractor():
    inputs, targets = drawn("recall", 200)
    ids = inputs.argmax(-1)

    np.testing.assert_array_equal(ids[:, 0], targets)
    assert ids.shape[1] == 1 + 25
    assert set(targets) == {0, 1, 2, 3, 4}
    assert ids[:, 1:].min() == 5


def test_the_marked_numbers_are_to_be_added():
    inputs, targets = drawn("adding", 200)
    values, marks = inputs[..., 0], inputs[..., 1]
    of_the_first, of_the_second = np.nonzero(marks[0])[0]

    assert values.shape[1] == 50
    assert (marks[:, :25].sum(1) == 1).all()
    assert (marks[:, 25:].sum(1) == 1).all()
    assert targets[0] == values[0, of_the_first] + values[0, of_the_second]


def test_training_digits_come_once_in_every_pass_and_others_are_held_out():
    images, _ = drawn("digits", 1437)
    held_out, labels = drawn("digits", 1, held_out=True)

    assert len(np.unique(images[..., 0], axis=0)) > 1430
    assert len(held_out) == len(labels) == 360
    both = {image.tobytes() for image in images} & {
        image.tobytes() for image in held_out
    }
    assert not both


def test_the_next_character_is_the_target():
    inputs, targets = drawn("text")

    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert swap_tasks._corpus().decode(drawn("text", 50)[0].ravel()).isascii()


@pytest.mark.parametrize("name", TASKS)
def test_data_are_a_function_of_the_seed_and_not_those_held_out(name):
    task = TASKS[name]._replace(batch_size=4)
    (inputs, targets), again = task.training(1, 3), task.training(1, 3)
    other, (held_out, _) = task.training(2, 3), task.held_out()

    assert len(inputs) == len(targets) == 12
    np.testing.assert_array_equal(inputs, again[0])
    assert (inputs != other[0]).any()
    assert inputs.shape[1:] == held_out.shape[1:]
    assert not np.array_equal(inputs, held_out[:12])


@pytest.mark.parametrize("name", TASKS)
def test_both_models_have_the_same_number_of_parameters(name):
    def parameters(setting):
        units = swap.matching_units(name, setting)
        return swap.parameters(TASKS[name], setting, units)

    assert parameters("default") == pytest.approx(parameters("lstm"), rel=0.03)


@pytest.mark.slow("jax")
def test_parameters_are_those_of_a_model_that_was_built():
    model = swap.build_model(TASKS["recall"], "default", units=5)

    assert networks.parameters(model) == swap.parameters(
        TASKS["recall"], "default", units=5
    )


def test_what_was_counted_is_never_filled(monkeypatch):
    """On JAX that would take minutes, within the time of the next run."""
    filled = []

    def spy(self, shape, dtype=None):
        filled.append(tuple(shape))
        return zeros(self, shape, dtype)

    zeros = keras.initializers.Zeros.__call__
    monkeypatch.setattr(keras.initializers.Orthogonal, "__call__", spy)
    swap.parameters(TASKS["recall"], "lstm", units=7)
    of_tracing = list(filled)
    with keras.StatelessScope():
        pass

    assert filled == of_tracing


def test_the_units_are_the_nearest():
    task, units = TASKS["digits"], swap.matching_units("digits", "default")
    wanted = swap.parameters(task, "lstm", task.units)
    misses = [
        abs(swap.parameters(task, "default", n) - wanted)
        for n in (units - 1, units, units + 1)
    ]

    assert min(misses) == misses[1]


def test_keras_goes_on_in_an_epoch_where_the_one_before_it_ended():
    """Or the same tenth of the data would be trained with again and again."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.0), "mean_absolute_error")
    numbers = np.arange(12, dtype="float32")[:, None]
    history = model.fit(
        numbers,
        np.zeros_like(numbers),
        batch_size=2,
        epochs=3,
        steps_per_epoch=2,
        shuffle=False,
        validation_data=(numbers, numbers),
        verbose=0,
    ).history

    # Means of 0 to 3, 4 to 7 and 8 to 11.
    np.testing.assert_allclose(history["loss"], [1.5, 5.5, 9.5])


@pytest.mark.slow("jax", "tensorflow")
def test_a_tiny_run_end_to_end(tmp_path, capsys, monkeypatch):
    small = TASKS["recall"]._replace(units=8, batch_size=4, updates=200)
    monkeypatch.setitem(TASKS, "recall", small)
    monkeypatch.setattr(swap_tasks, "HELD_OUT_SAMPLES", 20)
    monkeypatch.setattr(swap, "POINTS", 2)
    folder = tmp_path / "swap"
    results = swap.main(
        [*TINY, "--seeds", "4", "--folder", str(folder), "--markdown"]
    )

    printed = capsys.readouterr().out
    assert list(results["recall"]) == ["lstm", "default"]
    assert "| task | updates | parameters | lstm | default |" in printed
    assert "seeds 4;" in printed
    assert "python examples/swap.py --tasks recall" in printed
    assert (folder / "curves.png").stat().st_size > 10_000
    assert len(list(folder.glob("*.json"))) == 2
    for runs in results["recall"].values():
        assert [len(run["points"]) for run in runs] == [2]
        assert runs[0]["given"]["seed"] == 4


def test_an_interrupted_command_goes_on(tmp_path, monkeypatch):
    trained = []

    def train(given):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(given["seed"])
        return result_of(given, [0.5] * swap.POINTS)

    command = [*TINY, *LSTM_TWICE, "--folder", str(tmp_path)]
    monkeypatch.setattr(swap, "train", train)
    with pytest.raises(KeyboardInterrupt):
        swap.main(command)
    monkeypatch.setattr(
        swap, "train", lambda given: result_of(given, [0.7] * swap.POINTS)
    )
    results = swap.main(command)["recall"]["lstm"]

    assert [run["points"][-1] for run in results] == [0.5, 0.7]


def test_a_result_of_another_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        swap, "train", lambda given: result_of(given, [0.5] * swap.POINTS)
    )
    command = [*TINY, *LSTM_TWICE, "--folder", str(tmp_path)]
    swap.main(command)

    with pytest.raises(RunError, match="another updates: 10 then, 20 now"):
        swap.main([*command, "--updates-scale", "0.03"])
    (tmp_path / "recall-lstm-seed1.json").write_text("{")
    with pytest.raises(RunError, match="seed1.json is damaged"):
        swap.main(command)


def result_of(given, points):
    """A run that was not made."""
    result = {"given": given, "points": points, "parameters": 12_345}
    return json.loads(
        json.dumps({**result, "seconds": 1.0, "machine": "a test"})
    )


def test_the_table_has_mean_and_spread():
    def runs(*last):
        return [result_of({"updates": 1200}, [0.0, x]) for x in last]

    table = swap.table(
        {
            "recall": {
                "lstm": runs(0.5, 0.6, 0.7),
                "paper": runs(0.25, 0.25, 0.25),
            },
            "adding": {
                "lstm": runs(0.01, 0.03, 0.02),
                "paper": runs(0.1, 0.2, 0.3),
            },
        },
        markdown=True,
    )

    assert table.splitlines() == [
        "| task | updates | parameters | lstm | paper |",
        "| --- | --- | --- | --- | --- |",
        "| recall, accuracy | 1,200 | 12,345 / 12,345 | 60.0 % (20.0 %) | "
        "25.0 % (0.0 %) |",
        "| adding, mean squared error | 1,200 | 12,345 / 12,345 | "
        "0.0200 (0.0200) | 0.2000 (0.2000) |",
    ]


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        swap.parse_arguments(["--tasks", "counting"])
    assert "invalid choice: 'counting'" in capsys.readouterr().err
