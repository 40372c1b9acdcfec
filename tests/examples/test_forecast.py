"""Forecasts: the series and their errors by hand, and the script in small."""

import csv
import json

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

import keras_armin
from examples import forecast
from examples.support import networks
from examples.support import plotting
from examples.support.cli import RunError
from examples.support.data import series
from tests.helpers.common import slow_except_on

NETWORK = ["--layers", "1", "--units", "4", "--slots", "3"]
TRAINING = [
    *("--window", "8", "--stride", "1", "--warmup", "2", "--batch-size", "4"),
    *("--epochs", "2", "--epoch-updates", "3"),
]
TINY = [*NETWORK, *TRAINING, "--sequences", "4", "--steps", "20"]


# --- Mackey-Glass ------------------------------------------------------------


def fine_mackey_glass(start, steps, substeps=200):
    """By the classical Runge-Kutta method, from a constant past."""
    delay, h = 17 * substeps, 1 / substeps
    x = [start] * (delay + 1)

    def slope(now, past):
        return 0.2 * past / (1 + past**10) - 0.1 * now

    for n in range(delay, delay + steps * substeps):
        first, last = x[n - delay], x[n - delay + 1]
        middle = (first + last) / 2
        k1 = slope(x[n], first)
        k2 = slope(x[n] + h / 2 * k1, middle)
        k3 = slope(x[n] + h / 2 * k2, middle)
        k4 = slope(x[n] + h * k3, last)
        x.append(x[n] + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return np.array(x[delay + substeps :: substeps])


def test_mackey_glass_solves_its_equation():
    expected = fine_mackey_glass(start=0.9, steps=60)
    coarse, fine = (
        np.abs(
            series.mackey_glass(np.full((1, 17 * n + 1), 0.9), 60)[0] - expected
        ).max()
        for n in (10, 100)
    )

    assert np.ptp(expected) > 0.5
    assert coarse < 0.03
    assert 5 < coarse / fine < 20  # a method of the first order


def test_mackey_glass_is_as_hard_for_the_naive_forecast_as_published():
    """The corrected notebook of the LMU paper has 162.4 %."""
    data = series.load_mackey_glass(16, 3000, 15, seed=1)
    naive = series.naive_forecasts(data.test.inputs[..., 0], data.horizons)

    assert series.nrmse(naive, data.test.targets) == pytest.approx(
        1.624, abs=0.02
    )


def test_the_target_is_the_value_15_steps_later():
    data = series.load_mackey_glass(8, 100, 15, seed=1)

    for part, sequences in zip(data[:3], (2, 2, 4)):
        assert part.inputs.shape == part.targets.shape == (sequences, 100, 1)
        np.testing.assert_array_equal(
            part.inputs[:, 15:], part.targets[:, :-15]
        )
    np.testing.assert_array_equal(data.latest[0, -1], data.test.targets[-1, -1])


def test_sequences_are_a_function_of_the_seed_and_differ():
    first, again, other = (
        series.load_mackey_glass(8, 100, 15, seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.test.inputs, again.test.inputs)
    assert np.abs(first.test.inputs - other.test.inputs).max() > 0.1
    sequences = np.concatenate([part.inputs for part in first[:3]])[..., 0]
    distances = np.abs(sequences[:, None] - sequences).max(axis=-1)
    assert distances[~np.eye(8, dtype=bool)].min() > 0.01


# --- CSV files ---------------------------------------------------------------

ROWS = 100


@pytest.fixture
def numbers(tmp_path):
    """A file with a date, a wave to forecast and another column."""
    path = tmp_path / "numbers.csv"
    lines = ["day,wave,other"]
    for day in range(ROWS):
        date = np.datetime64("2024-01-01") + day
        lines.append(f"{date},{10 * np.sin(day / 3) + 50},{day % 7}")
    path.write_text("\n".join([*lines, ""]))
    return path


def change(path, row, column, cell):
    """Rows and columns are counted as in the errors, from 1 and 0."""
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines[row - 1][column] = cell
    path.write_text("\n".join(map(",".join, lines)))


def load(path, horizon=3, window=10, warmup=4, **options):
    return series.load_csv(path, "wave", horizon, window, warmup, **options)


def test_what_is_forecast_in_a_part_is_not_seen_in_an_earlier_one(numbers):
    data = load(numbers)
    wave = np.array([10 * np.sin(day / 3) + 50 for day in range(ROWS)])
    ends = [0, 70, 85, 100]

    assert data.columns == ("wave", "other") and data.target == 0
    for part, start, end in zip(data[:3], ends, ends[1:]):
        first = start - 5 if start else 0  # a step, and the warm-up
        steps = np.arange(first, end - 3)
        np.testing.assert_allclose(part.inputs[0, :, 0], wave[steps], rtol=1e-6)
        np.testing.assert_array_equal(part.inputs[0, :, 1], steps % 7)
        for ahead in (1, 2, 3):
            np.testing.assert_allclose(
                part.targets[0, :, ahead - 1], wave[steps + ahead], rtol=1e-6
            )
    np.testing.assert_allclose(data.latest[0, :, 0], wave[-10:], rtol=1e-6)


def test_scaling_is_learnt_from_the_training_part_alone(numbers):
    arguments = forecast.parse_arguments(
        ["--data", str(numbers), "--target", "wave", *NETWORK, *TRAINING]
    )

    def scales():
        data = forecast.load_data(arguments)
        model = forecast.build_model("lstm", 2, data, arguments)
        scale = model.get_layer("scale")
        arrays = map(keras.ops.convert_to_numpy, (scale.mean, scale.variance))
        return data, [*arrays, *forecast.target_scale(data)]

    data, before = scales()
    for row in range(72, ROWS + 2):  # all of validation and test
        change(numbers, row, 1, "1000")
    _, after = scales()

    inputs = data.training.inputs
    np.testing.assert_allclose(before[0].ravel(), inputs.mean(axis=(0, 1)))
    np.testing.assert_allclose(
        before[1].ravel(), inputs.var(axis=(0, 1)), rtol=1e-5
    )
    assert before[2] == pytest.approx(data.training.targets.mean())
    for then, now in zip(before, after):
        np.testing.assert_array_equal(then, now)


def test_a_column_of_dates_is_left_out_and_said_so(numbers, capsys):
    assert load(numbers).columns == ("wave", "other")
    printed = capsys.readouterr().out
    assert "column 'day' has no numbers, such as '2024-01-01'" in printed

    assert load(numbers, ignored=["day", "other"]).columns == ("wave",)
    assert "day" not in capsys.readouterr().out


def test_months_are_even_and_unknown_dates_are_not_checked(tmp_path):
    path = tmp_path / "months.csv"
    for spelling in ("{:04}-{:02}-01", "1. {1}. {0}"):
        months = [divmod(month, 12) for month in range(24_000, 24_048)]
        rows = [
            f"{spelling.format(year, month + 1)};{month}"
            for year, month in months
        ]
        path.write_text("\n".join(["month;wave", *rows]))
        assert series.read_csv(path, "wave")[1].shape == (48, 1)


@pytest.mark.parametrize(
    ("row", "column", "cell", "explanation"),
    [
        (7, 1, "", r"row 7, column 'wave': the cell is empty\. Correct it\."),
        (3, 2, "", "row 3, column 'other': the cell is empty.*--ignore other"),
        (101, 1, "a lot", "row 101, column 'wave': 'a lot' is not a finite"),
        (5, 2, "NaN", "row 5, column 'other': 'NaN' is not a finite number"),
        (5, 1, "-inf", "row 5, column 'wave': '-inf' is not a finite number"),
        (5, 1, "1e39", "row 5, column 'wave': '1e39' is not a finite number"),
        (5, 1, "3,5", "row 5: 4 cells, but there are 3 columns: 'day', 'wave'"),
        (1, 2, "wave", "row 1, column 3: the name 'wave' comes twice"),
        (1, 2, " ", "row 1, column 3: no name"),
        (1, 2, "4.5", "row 1: a number in place of the name of a column"),
        (1, 1, "sine", "no column 'wave' in .*, but 'day', 'sine', 'other'"),
        (
            *(9, 0, "2024-02-08"),
            "row 9, column 'day': 2024-02-08 is 32 days, .*--ignore day",
        ),
        (
            *(9, 0, "2024-01-07"),
            "row 9, column 'day': 2024-01-07 is 0:00:00 after the row before",
        ),
    ],
)
def test_a_wrong_cell_is_named_by_row_and_column(
    numbers, row, column, cell, explanation
):
    change(numbers, row, column, cell)
    with pytest.raises(RunError, match=explanation):
        load(numbers)


def test_the_first_of_several_gaps_is_named_and_the_others_are_counted(numbers):
    for row, column in ((40, 1), (20, 2), (30, 1)):
        change(numbers, row, column, "")
    with pytest.raises(RunError, match="row 20, .* for 2 more cells"):
        load(numbers)


def test_decimal_commas_are_explained(numbers):
    text = numbers.read_text().replace(",", ";").replace(".", ",")
    numbers.write_text(text)
    with pytest.raises(RunError, match="row 2, .* decimal point"):
        load(numbers)


def test_a_column_of_decimal_commas_is_not_left_out_as_if_it_were_text(numbers):
    header, *rows = numbers.read_text().splitlines()
    rows = [f'{row.rpartition(",")[0]},"1,{n}"' for n, row in enumerate(rows)]
    numbers.write_text("\n".join([header, *rows]))
    with pytest.raises(RunError, match="'other'.* decimal point.*--ignore"):
        load(numbers)


def test_the_target_cannot_be_ignored(numbers):
    with pytest.raises(RunError, match="leaves out 'wave', which is the"):
        load(numbers, ignored=["wave"])


def test_rows_that_are_missing_are_a_gap(numbers):
    lines = numbers.read_text().splitlines()
    numbers.write_text("\n".join([*lines[:50], *lines[53:]]))

    with pytest.raises(RunError, match="row 51, .*2024-02-22 is 4 days"):
        load(numbers)
    assert load(numbers, ignored=["day"]).columns == ("wave", "other")


def test_a_column_that_is_constant_in_training_is_refused(numbers):
    for row in range(2, ROWS + 2):
        change(numbers, row, 2, "3" if row < 72 else "4")
    with pytest.raises(RunError, match="rows 2 to 71, column 'other': all"):
        load(numbers)


def test_too_few_rows_are_counted(numbers):
    with pytest.raises(RunError, match="rows of data, 100\\..*at least 103"):
        load(numbers, horizon=12, window=60)
    # What is said to be enough is enough.
    assert series._are_enough(103, 12, 60, 4)
    assert not series._are_enough(102, 12, 60, 4)


@pytest.mark.parametrize(
    ("content", "explanation"),
    [
        (None, "cannot read .*: No such file"),
        (b"", "no rows below"),
        (b"day,wave,other\n\n", "no rows below"),
        (b"wave\n\xff\xfe\n", "not text in UTF-8"),
    ],
)
def test_a_file_that_is_no_csv_is_explained(tmp_path, content, explanation):
    path = tmp_path / "file.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=explanation):
        load(path)


# --- batches, forecasts and errors -------------------------------------------


def counting_part(sequences=3, steps=20):
    """Sequences that count, by hundreds and by steps."""
    inputs = 100 * np.arange(sequences)[:, None] + np.arange(steps)
    inputs = inputs[..., None].astype("float32")
    return series.Part(inputs, np.concatenate([inputs + 1, inputs + 2], -1))


def take(count, seed=1, first_step=0, stride=1):
    dataset = series.training_batches(
        counting_part(), 6, stride, 2, 4, seed, first_step
    )
    for _ in dataset.take(1):  # as Keras may look at the first batch
        pass
    return list(dataset.take(count).as_numpy_iterator())


def test_windows_are_pieces_of_sequences_with_their_targets():
    starts = []
    for inputs, targets, weights in take(12):  # a pass has 45 windows
        assert inputs.shape == (4, 6, 1) and targets.shape == (4, 6, 2)
        np.testing.assert_array_equal(np.diff(inputs, axis=1), 1)
        np.testing.assert_array_equal(targets, inputs + [1, 2])
        np.testing.assert_array_equal(weights, [[0, 0, 1, 1, 1, 1]] * 4)
        starts += inputs[:, 0, 0].tolist()

    every = {100 * n + step for n in range(3) for step in range(15)}
    assert set(starts[:45]) == every
    assert set(starts[45:]) <= every
    apart = np.concatenate([batch[0][:, 0, 0] for batch in take(3, stride=5)])
    assert set(apart[:9]) == {0, 5, 10, 100, 105, 110, 200, 205, 210}


def test_batches_are_a_function_of_seed_and_step():
    def inputs(*arguments):
        return np.stack([batch[0] for batch in take(*arguments)])

    whole = inputs(30)
    np.testing.assert_array_equal(whole, inputs(30))
    np.testing.assert_array_equal(whole[13:], inputs(17, 1, 13))
    assert (whole != inputs(30, 2)).any()


def test_the_naive_forecast_is_the_present_or_the_last_season():
    values = np.array([[1.0, 5.0, 2.0, 7.0]])

    np.testing.assert_array_equal(
        series.naive_forecasts(values, np.array([1, 4])),
        [[[1, 1], [5, 5], [2, 2], [7, 7]]],
    )
    nan = np.nan
    np.testing.assert_array_equal(
        series.naive_forecasts(values, np.array([1, 2, 3, 4]), season=3),
        [
            [
                [nan, nan, 1, nan],
                [nan, 1, 5, nan],
                [1, 5, 2, 1],
                [5, 2, 7, 5],
            ]
        ],
    )


def test_errors_are_relative_to_the_standard_deviation():
    targets = np.array([[[1.0], [5.0]]])  # standard deviation 2

    assert series.rmse(targets + 3, targets) == 3
    assert series.nrmse(targets + 3, targets) == 1.5
    np.testing.assert_array_equal(
        series.rmse(np.array([[1.0, 2.0], [1.0, 4.0]]), np.zeros((2, 2)), 0),
        [1, np.sqrt(10)],
    )


def arguments_of(path, *more):
    return forecast.parse_arguments(
        [
            *("--data", str(path), "--target", "wave", "--horizon", "3"),
            *(*NETWORK, *TRAINING, *more),
        ]
    )


def test_forecasts_are_in_the_units_of_the_file(numbers):
    arguments = arguments_of(numbers)
    data = forecast.load_data(arguments)
    trained = forecast.build_model("lstm", 2, data, arguments)
    model = forecast.forecaster(trained, *forecast.target_scale(data))
    kernel, bias = model.get_layer("forecasts").get_weights()
    model.get_layer("forecasts").set_weights([0 * kernel, bias + [0, 1, -2]])

    found = forecast.forecast(model, data.test.inputs)
    targets = data.training.targets
    expected = targets.mean() + targets.std() * np.array([0, 1, -2])
    np.testing.assert_allclose(found, np.tile(expected, (1, 15, 1)), rtol=1e-5)
    parts = forecast.scaled(data.training, *forecast.target_scale(data))
    assert parts.targets.std() == pytest.approx(1, rel=1e-5)


class Offset:
    """Forecasts what is right, less `by`."""

    def __init__(self, data, by):
        self.answers = {
            part.inputs.tobytes(): part.targets - wrong
            for part, wrong in zip(data[1:3], by)
        }

    def predict(self, inputs, **_):
        return self.answers[inputs.tobytes()]


def test_intervals_are_quantiles_of_the_errors_in_validation(
    numbers, monkeypatch
):
    arguments = arguments_of(numbers, "--coverage", "0.5")
    data = forecast.load_data(arguments)
    steps = data.validation.targets.shape[1] - 2
    # 0, 1, 2, ... at one horizon, twice that at the next; none counts before.
    errors = np.arange(steps)[:, None] * np.array([1, 2, 0])
    errors = np.concatenate([np.full((2, 3), 1e6), errors])
    model = Offset(data, (errors, np.array([4.0, -1.0, 0.0])))
    monkeypatch.setattr(forecast, "stream", lambda *_: iter([np.zeros(3)]))
    found = forecast.report(model, data, arguments)

    middle = (steps - 1) / 2
    np.testing.assert_allclose(found.lower, [middle / 2, middle, 0], atol=1e-5)
    np.testing.assert_allclose(
        found.upper, [middle * 1.5, middle * 3, 0], atol=1e-5
    )
    np.testing.assert_allclose(found.rmse, [4, 1, 0], atol=1e-5)
    np.testing.assert_allclose(found.coverage[:2], [1, 0])


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.slow_after(1, "torch")
@pytest.mark.parametrize("name", ["armin", "lstm"])
def test_a_stream_gives_the_forecasts_of_the_whole_sequence(numbers, name):
    arguments = arguments_of(numbers, "--layers", "2")
    data = forecast.load_data(arguments)
    trained = forecast.build_model(name, 3, data, arguments)
    model = forecast.forecaster(trained, *forecast.target_scale(data))
    inputs = data.test.inputs
    streamed = np.stack(list(forecast.stream(model, inputs[0])))

    whole = forecast.forecast(model, inputs)[0]
    assert np.ptp(whole) > 1e-3
    np.testing.assert_allclose(streamed, whole, rtol=1e-5)
    stateful = keras_armin.streaming_model(model, stepwise=forecast.STEPWISE)
    for step in range(4):
        found = keras.ops.convert_to_numpy(stateful(inputs[:, step]))
        np.testing.assert_allclose(found[0], whole[step], rtol=1e-5)


# --- the script --------------------------------------------------------------


def test_the_networks_are_of_the_published_size():
    arguments = forecast.parse_arguments(["--preset", "lmu"])

    def parameters(name):
        units = forecast.matching_units(name, arguments, 1, 1)
        layers = forecast.recurrent_network(name, units, arguments, 1)
        return networks.count_parameters(
            lambda: keras.Sequential([keras.Input((None, 1)), *layers])
        )

    assert parameters("lstm") == 18_026
    assert parameters("armin") == pytest.approx(18_026, rel=0.03)


@pytest.mark.parametrize(
    "command",
    [[], ["--preset", "lmu"], ["--data", "a.csv", "--target", "b"]],
    ids=["quick", "lmu", "csv"],
)
def test_every_preset_is_complete(command):
    arguments = forecast.parse_arguments(command)
    for name in (
        *("horizon", "window", "warmup", "epochs", "epoch_updates", "decay"),
        *("layers", "units", "batch_size", "learning_rate"),
    ):
        assert getattr(arguments, name) is not None, name


@pytest.mark.parametrize(
    ("command", "explanation"),
    [
        (["--data", "a.csv"], "--data needs --target"),
        (["--target", "a"], "--target needs --data"),
        (
            ["--data", "a.csv", "--target", "a", "--preset", "lmu"],
            "--preset lmu is for Mackey-Glass",
        ),
        (["--warmup", "200"], "--warmup 200 has to be less than --window 200"),
        (["--stride", "201"], "--stride 201 is more than --window 200"),
        (["--season", "60"], "--season 60 needs a --warmup of at least 59"),
        (["--season", "500"], "--season 500 needs a --window of at least as"),
        (["--window", "6000"], "--window 6000 is more than --steps 5000"),
        (["--sequences", "3"], "--sequences must be at least 4"),
        (["--coverage", "1"], "must be at least 0 and below 1"),
        (["--horizon", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_command_is_explained(command, explanation, capsys):
    with pytest.raises(SystemExit):
        forecast.parse_arguments(command)
    assert explanation in capsys.readouterr().err


def test_help_ends_with_the_settings_of_the_preset(capsys):
    for command, settings in (
        ([], "--preset quick is short for:"),
        (["--data", "a.csv", "--target", "a"], "--warmup 50 --epochs 10"),
    ):
        with pytest.raises(SystemExit) as stopped:
            forecast.parse_arguments([*command, "--help"])
        assert stopped.value.code == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert settings in printed[-400:]


def test_an_export_that_cannot_be_written_is_refused_before_training(tmp_path):
    with pytest.raises(RunError, match="--export model.h5: the name must end"):
        forecast.main(["--export", "model.h5", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_script_forecasts_a_csv_file(numbers, tmp_path, capsys):
    folder, exported = tmp_path / "run", tmp_path / "model.onnx"
    results = forecast.main(
        [
            *("--data", str(numbers), "--target", "wave", "--horizon", "3"),
            *(*NETWORK, *TRAINING, "--season", "3"),
            *("--output", str(folder), "--export", str(exported)),
        ]
    )
    printed = capsys.readouterr().out

    assert list(results) == ["armin", "lstm"]
    sizes = [result["parameters"] for result in results.values()]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)  # of tiny networks
    assert "'day' has no numbers" in printed and "NRMSE" in printed
    assert (folder / "forecasts.png").stat().st_size > 10_000
    data = load(numbers, window=8, warmup=2)
    for name, result in results.items():
        saved = json.loads((folder / name / "result.json").read_text())
        assert saved == result and result["backend"] == keras.backend.backend()
        assert result["updates"] == 6 and result["steps_ahead"] == 3
        for picture in ("curve.png", *["memory.png"] * (name == "armin")):
            assert (folder / name / picture).stat().st_size > 5_000
        errors = rows(folder / name / "errors.csv")
        assert [float(x["steps_ahead"]) for x in errors] == [1, 2, 3]
        mean = np.mean([float(x["rmse"]) ** 2 for x in errors]) ** 0.5
        assert mean == pytest.approx(result["test_rmse"], rel=1e-4)
        # The saved model gives the forecast after the end of the file.
        model = keras.models.load_model(folder / name / "model.keras")
        expected = forecast.forecast(model, data.latest)[0, -1]
        following = rows(folder / name / "forecast.csv")
        np.testing.assert_allclose(
            [float(x["forecast"]) for x in following], expected, rtol=1e-4
        )
        assert all(float(x["lower"]) < float(x["upper"]) for x in following)
    check_exported(exported, folder / "armin" / "model.keras", data.test.inputs)


def check_exported(path, saved, inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    found = session.run(None, {session.get_inputs()[0].name: inputs})[0]
    model = keras.models.load_model(saved)
    np.testing.assert_allclose(
        found, forecast.forecast(model, inputs), rtol=1e-4
    )


@slow_except_on("torch")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch):
    # Pictures have tests of their own, and take most of the time.
    monkeypatch.setattr(plotting, "save", lambda figure, path: None)
    command = [*TINY, "--models", "armin", "--output"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    expected = forecast.main([*command, str(whole)])["armin"]
    first = forecast.main([*command, str(stopped), "--minutes", "1e-9"])
    assert first["armin"]["updates"] == 3
    found = forecast.main([*command, str(stopped), "--resume"])["armin"]

    assert found["updates"] == expected["updates"] == 6
    assert found["test_nrmse"] == pytest.approx(
        expected["test_nrmse"], rel=1e-4
    )
    losses = [
        [float(row["loss"]) for row in rows(folder / "armin" / "log.csv")]
        for folder in (whole, stopped)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][0] != losses[0][1]
    ends = [
        np.load(folder / "armin" / "resume.npz") for folder in (whole, stopped)
    ]
    weights = [x for x in ends[0].files if ends[0][x].dtype == "float32"]
    assert len(weights) > 10
    for name in weights:
        np.testing.assert_allclose(
            *(x[name] for x in ends), rtol=1e-4, atol=1e-6
        )
    with pytest.raises(RunError, match="units: 4 then, 5 now"):
        forecast.main([*command, str(stopped), "--resume", "--units", "5"])
