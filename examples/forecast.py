"""Forecast a time series: ARMIN, an LSTM of equal size and a naive forecast.

    python examples/forecast.py                    Mackey-Glass, a quick look
    python examples/forecast.py --preset lmu       as in the LMU paper
    python examples/forecast.py --data power.csv --target load --horizon 24

Without `--data` the series is generated: the chaotic Mackey-Glass equation with
a delay of 17 steps, to be forecast 15 steps ahead at every step. A CSV file has
a row per time step and the names of its columns in the first row. All numeric
columns are inputs; the next `--horizon` values of `--target` are forecast at
once. The first 70 % of the rows are for training, 15 % for validation, 15 % for
the test. Inputs and forecasts are scaled by mean and variance of the training
part; this scaling is part of the saved model, which takes and returns the units
of the file.

Each network has a folder with its model, its errors at each horizon and the
forecast of what follows the data. Intervals are the forecast plus quantiles of
the errors in the validation part, which also selects the best weights.
`--resume` continues after an interruption. Results are in examples/RESULTS.md.
"""

import csv
import functools
import pathlib
import sys
import zlib
from typing import NamedTuple

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np
from matplotlib import pyplot as plt

import keras_armin
from examples.support import cli
from examples.support import networks
from examples.support import plotting
from examples.support import runs
from examples.support.cli import RunError
from examples.support.cli import positive
from examples.support.data import series as series_data

PRESETS = {
    "quick": "a few minutes on two cores",
    "lmu": "Mackey-Glass as in the LMU paper, 500 updates of 5,000 steps",
}
_18K = "--layers 4 --units 25"  # parameters
_MACKEY_GLASS = f"{_18K} --sequences 128 --steps 5000 --horizon 15"
SETTINGS = {
    "quick": f"{_MACKEY_GLASS} --window 200 --stride 25 --warmup 0 "
    "--epochs 5 --epoch-updates 100 --learning-rate 3e-3 --decay cosine",
    "lmu": f"{_MACKEY_GLASS} --window 5000 --warmup 0 --epochs 50 "
    "--epoch-updates 10 --learning-rate 1e-3 --decay none",
}
CSV_SETTINGS = (
    "--layers 1 --units 32 --horizon 1 --window 100 --warmup 50 --epochs 10 "
    "--epoch-updates 50 --learning-rate 3e-3 --decay cosine"
)
LAYERS = {"armin": keras_armin.ARMIN, "lstm": keras.layers.LSTM}
LABELS = {"armin": "ARMIN", "lstm": "LSTM"}
# Layers that `keras_armin.step_model` does not know to work step by step.
STEPWISE = (keras.layers.Normalization,)
STEPS_SHOWN, MEMORY_STEPS = 300, 120


class Report(NamedTuple):
    """What a network forecasts, in the units of the data."""

    test: np.ndarray  # (sequences, steps, horizons)
    rmse: np.ndarray  # (horizons,)
    # What to add to a forecast for the ends of its interval.
    lower: np.ndarray  # (horizons,)
    upper: np.ndarray
    coverage: np.ndarray  # (horizons,): share of the test in the interval
    next: np.ndarray  # (horizons,): forecasts from the last step known


# --- models ------------------------------------------------------------------


def recurrent_network(name, units, arguments, horizons):
    """The layers between scaled inputs and scaled forecasts."""
    options = {"memory_slots": arguments.slots} if name == "armin" else {}
    return [
        *(
            LAYERS[name](
                units, return_sequences=True, name=f"layer_{n}", **options
            )
            for n in range(1, arguments.layers + 1)
        ),
        keras.layers.Dense(horizons, name="forecasts"),
    ]


def matching_units(name, arguments, columns, horizons):
    """The units with which the parameters are closest to the LSTM's."""
    if name == "lstm":
        return arguments.units

    def count(units, name=name):
        layers = recurrent_network(name, units, arguments, horizons)
        inputs = keras.Input((None, columns))
        return networks.count_parameters(
            lambda: keras.Sequential([inputs, *layers])
        )

    target = count(arguments.units, "lstm")
    return networks.nearest_units(count, target, most=2 * arguments.units)


def build_model(name, units, data, arguments):
    """A model from inputs in their units to scaled forecasts."""
    scale = keras.layers.Normalization(name="scale")
    scale.adapt(data.training.inputs)
    columns, horizons = len(data.columns), len(data.horizons)
    model = keras.Sequential(
        [
            keras.Input((None, columns)),
            scale,
            *recurrent_network(name, units, arguments, horizons),
        ]
    )
    model.compile(
        keras.optimizers.Adam(_learning_rate(arguments), global_clipnorm=1.0),
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    )
    return model


def _learning_rate(arguments):
    if arguments.decay == "none":
        return arguments.learning_rate
    return keras.optimizers.schedules.CosineDecay(
        arguments.learning_rate,
        decay_steps=arguments.epochs * arguments.epoch_updates,
        alpha=0.05,
    )


def target_scale(data):
    """Mean and variance of the targets of the training part."""
    targets = data.training.targets.astype("float64")
    return float(targets.mean()), float(targets.var())


def scaled(part, mean, variance):
    targets = (part.targets - mean) / np.sqrt(variance)
    return part._replace(targets=targets.astype("float32"))


def forecaster(model, mean, variance):
    """The same model with forecasts in the units of the data."""
    unscale = keras.layers.Normalization(
        axis=None, mean=mean, variance=variance, invert=True, name="unscale"
    )
    inputs = keras.Input(model.input_shape[1:])
    return keras.Sequential([inputs, *model.layers, unscale])


# --- forecasts ---------------------------------------------------------------


def forecast(model, inputs):
    """Forecasts at each step: `(sequences, steps, horizons)`."""
    return model.predict(inputs, batch_size=len(inputs), verbose=0)


def stream(model, steps):
    """Yields forecasts as the steps of one sequence arrive.

    Gives the same as `forecast`, and keeps nothing but the state of the
    network.
    """
    step = keras_armin.step_model(model, stepwise=STEPWISE)
    states = step.initial_states()
    for inputs in steps:
        found, *states = step.predict_on_batch([inputs[None], *states])
        yield found[0]


def report(model, data, arguments):
    def after_warmup(x):
        return x[:, arguments.warmup :].reshape(-1, len(data.horizons))

    errors = data.validation.targets - forecast(model, data.validation.inputs)
    outside = (1 - arguments.coverage) / 2
    lower, upper = np.quantile(
        after_warmup(errors), [outside, 1 - outside], axis=0
    )
    test = forecast(model, data.test.inputs)
    errors = after_warmup(data.test.targets - test)
    *_, following = stream(model, data.latest[0])
    return Report(
        test=test,
        rmse=series_data.rmse(errors, np.zeros_like(errors), axis=0),
        lower=lower,
        upper=upper,
        coverage=np.mean((lower <= errors) & (errors <= upper), axis=0),
        next=following,
    )


def naive_report(data, arguments):
    """Without intervals, which would need no network."""

    def naive(inputs):
        values = inputs[..., data.target]
        return series_data.naive_forecasts(
            values, data.horizons, arguments.season
        )

    test = naive(data.test.inputs)
    warm = slice(arguments.warmup, None)
    rmse = series_data.rmse(
        test[:, warm], data.test.targets[:, warm], axis=(0, 1)
    )
    none = np.full(len(data.horizons), np.nan)
    return Report(test, rmse, none, none, none, naive(data.latest)[0, -1])


# --- pictures and tables -----------------------------------------------------


def draw_forecasts(data, reports, path):
    """Saves a picture of forecasts and truth, and of the errors.

    `reports` is a dict from a label to a `Report`. The first one is drawn with
    its interval.
    """
    one = len(data.test.inputs) == 1
    figure, axes = plt.subplot_mosaic(
        [["test", "test"], ["errors", "next" if one else "errors"]],
        figsize=(10, 6.5),
        layout="constrained",
    )
    _draw_test(axes["test"], data, reports)
    if one:
        _draw_horizons(axes["errors"], data, reports)
        _draw_next(axes["next"], data, reports)
    else:
        _draw_start(axes["errors"], data, reports)
    for ax in axes.values():
        ax.grid(alpha=0.3)
        ax.margins(x=0.01)
    plotting.shared_legend(figure, axes.values())
    plotting.save(figure, path)


def _styles(reports):
    """A colour for each network, and grey for what is not one."""
    colours = {"naive": "0.6"}
    for number, label in enumerate(x for x in reports if x != "naive"):
        colours[label] = f"C{number}"
    return {
        label: {"label": label, "color": colours[label], "linewidth": 1.2}
        for label in reports
    }


def _draw_test(ax, data, reports):
    """The last steps of the first test sequence, at the farthest horizon."""
    truth = data.test.targets[0, :, -1]
    steps = np.arange(len(truth))[-STEPS_SHOWN:]
    ax.plot(steps, truth[steps], color="black", linewidth=1.2, label="truth")
    for label, style in _styles(reports).items():
        ax.plot(steps, reports[label].test[0, steps, -1], **style)
    label, first = next(iter(reports.items()))
    _fill(ax, steps, first, first.test[0, steps], label, horizon=-1)
    ahead = data.horizons[-1]
    ax.set(
        title=f"forecast {ahead} step{'s' if ahead > 1 else ''} before",
        xlabel="step of the test",
        ylabel=data.columns[data.target],
    )


def _fill(ax, x, report, forecasts, label, horizon=slice(None)):
    """The interval around forecasts, of one horizon or of all."""
    low = forecasts[..., horizon] + report.lower[horizon]
    high = forecasts[..., horizon] + report.upper[horizon]
    label = f"{label}, interval"
    ax.fill_between(
        x, low, high, color="C0", alpha=0.25, linewidth=0, label=label
    )


def _draw_horizons(ax, data, reports):
    for label, style in _styles(reports).items():
        ax.plot(data.horizons, reports[label].rmse, ".-", **style)
    ax.set(title="error", xlabel="steps ahead", ylabel="RMSE", ylim=(0, None))
    ax.xaxis.get_major_locator().set_params(integer=True)


def _draw_next(ax, data, reports):
    known = data.latest[0, -3 * len(data.horizons) :, data.target]
    ax.plot(np.arange(1 - len(known), 1), known, color="black", linewidth=1.2)
    for label, style in _styles(reports).items():
        ax.plot(data.horizons, reports[label].next, ".-", **style)
    label, first = next(iter(reports.items()))
    _fill(ax, data.horizons, first, first.next, label)
    ax.set(title="after the end of the data", xlabel="steps ahead")


def _draw_start(ax, data, reports):
    """The error of all test sequences over the steps that are known."""
    steps = 1 + np.arange(data.test.targets.shape[1])
    for label, style in _styles(reports).items():
        error = series_data.rmse(
            reports[label].test, data.test.targets, axis=(0, 2)
        )
        ax.plot(steps, error, **style)
    ax.set(
        title="error",
        xlabel="steps known",
        ylabel="RMSE",
        xscale="log",
        yscale="log",
    )


def write_table(path, rows):
    """Writes a list of dicts as a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _rounded(**columns):
    """A dict for each row of arrays, with six digits."""
    return [
        {name: f"{x:.6g}" for name, x in zip(columns, row)}
        for row in zip(*columns.values())
    ]


def table(results):
    """A line for each network, and one for the naive forecast."""
    rows = [["network", "parameters", "RMSE", "NRMSE", "within interval"]]
    for name, result in results.items():
        rows.append(
            [
                LABELS[name],
                f"{result['parameters']:,}",
                f"{result['test_rmse']:.4g}",
                f"{result['test_nrmse']:.2%}",
                f"{result['within_interval']:.1%}",
            ]
        )
    naive = f"{result['naive_rmse']:.4g}", f"{result['naive_nrmse']:.2%}"
    rows.append(["naive", "", *naive, ""])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        for row in rows
    )


# --- command line ------------------------------------------------------------

_DATA_OPTIONS = {
    "data": (pathlib.Path, None, "a CSV file (default: Mackey-Glass)"),
    "target": (str, None, "the column to forecast"),
    "horizon": (
        positive,
        None,
        "how many steps to forecast; of Mackey-Glass, how many steps ahead",
    ),
    "sequences": (positive, 4, "sequences of Mackey-Glass, at least 4"),
    "steps": (positive, 1000, "their length"),
    "window": (positive, None, "steps of a sequence in training"),
    "stride": (positive, 1, "steps from one such sequence to the next"),
    "warmup": (
        cli.at_least_zero,
        None,
        "steps at the start of a sequence whose forecasts do not count",
    ),
    "epochs": (positive, None, "number of epochs"),
    "epoch_updates": (positive, None, "updates in an epoch"),
    "decay": (("none", "cosine"), None, "of the learning rate"),
}
_NETWORK_OPTIONS = {
    "layers": (positive, None, "number of recurrent layers"),
    "units": (
        positive,
        None,
        "of the LSTM; ARMIN has the number that makes it equally large",
    ),
    "slots": (positive, 20, "memory slots of ARMIN"),
}
# Options that matter only after training.
_RESULT_OPTIONS = {
    "season": (positive, 1, "steps of a season, for the naive forecast"),
    "coverage": (cli.rate, 0.9, "share of values in the intervals"),
    "export": (
        pathlib.Path,
        None,
        "export the first network to this file (.onnx, .xml, .pt2, .tflite) "
        "or, as a SavedModel, folder",
    ),
}


def preset_options(arguments):
    settings = SETTINGS[arguments.preset]
    if arguments.data:
        settings = CSV_SETTINGS
    return f"--batch-size 32 {settings}"


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    cli.add_options(parser, "series", _DATA_OPTIONS)
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns to leave out",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=LAYERS,
        default=list(LAYERS),
        help=f"the networks (default: {' '.join(LAYERS)})",
    )
    cli.add_options(parser, "networks", _NETWORK_OPTIONS)
    cli.add_options(parser, "results", _RESULT_OPTIONS)
    cli.add_run_options(parser, PRESETS)
    arguments = cli.parse(parser, argv, preset_options)
    _check(parser, arguments)
    if arguments.output is None:
        data = arguments.data.stem if arguments.data else "mackey_glass"
        parts = "forecast", data, arguments.preset, f"seed{arguments.seed}"
        arguments.output = pathlib.Path("runs", "-".join(parts))
    return arguments


def _check(parser, arguments):
    if arguments.data and not arguments.target:
        parser.error("--data needs --target, the column to forecast")
    if arguments.target and not arguments.data:
        parser.error("--target needs --data, a CSV file")
    if arguments.data and arguments.preset != "quick":
        parser.error(f"--preset {arguments.preset} is for Mackey-Glass")
    if arguments.season > arguments.window:
        parser.error(
            f"--season {arguments.season} needs a --window of at least as many "
            "steps"
        )
    if arguments.warmup >= arguments.window:
        parser.error(
            f"--warmup {arguments.warmup} has to be less than --window "
            f"{arguments.window}"
        )
    if arguments.stride > arguments.window:
        parser.error(
            f"--stride {arguments.stride} is more than --window "
            f"{arguments.window}: some steps would be left out"
        )
    if arguments.season > arguments.warmup + 1:
        parser.error(
            f"--season {arguments.season} needs a --warmup of at least "
            f"{arguments.season - 1}"
        )
    if arguments.sequences < 4:
        parser.error("--sequences must be at least 4")
    if not arguments.data and arguments.window > arguments.steps:
        parser.error(
            f"--window {arguments.window} is more than --steps "
            f"{arguments.steps}"
        )


def load_data(arguments):
    if not arguments.data:
        data = series_data.load_mackey_glass(
            arguments.sequences,
            arguments.steps,
            arguments.horizon,
            arguments.seed,
        )
        return data._replace(latest=data.latest[:, -arguments.window :])
    return series_data.load_csv(
        arguments.data,
        arguments.target,
        arguments.horizon,
        arguments.window,
        arguments.warmup,
        arguments.ignore,
    )


def run_settings(name, arguments, data):
    """Everything that determines the results of a run, the data included."""
    settings = cli.settings(arguments)
    for other in (*_RESULT_OPTIONS, "models", "data"):
        del settings[other]
    inputs = np.ascontiguousarray(data.training.inputs)
    return {**settings, "model": name, "series": f"{zlib.crc32(inputs):08x}"}


def check_export(path):
    """Raises a `RunError` if this backend cannot write such a file."""
    if path is None:
        return
    endings = keras_armin.export_lib.ENDINGS
    formats = {ending: format for format, ending in endings.items()}
    try:
        if path.suffix not in formats:
            files = ", ".join(filter(None, formats))
            raise ValueError(
                f"the name must end in one of {files}; without a dot, it is "
                "the folder of a SavedModel"
            )
        keras_armin.export_lib.check_format(formats[path.suffix])
    except (ValueError, ImportError) as error:
        raise RunError(f"--export {path}: {error}") from error


def main(argv=None):
    """Returns the result lines by network."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    check_export(arguments.export)
    data = load_data(arguments)
    # All of them before one is trained: then all can be resumed.
    of_networks = {
        name: runs.Run(
            arguments.output / name,
            run_settings(name, arguments, data),
            resume=arguments.resume,
            overwrite=arguments.overwrite,
        )
        for name in arguments.models
    }
    models, results, reports = {}, {}, {}
    naive = naive_report(data, arguments)
    for name, run in of_networks.items():
        models[name] = train(run, name, data, arguments)
        found = report(models[name], data, arguments)
        write_files(run, models[name], data, found, naive)
        results[name] = result_line(
            run, name, models[name], data, found, naive, arguments
        )
        run.finish(results[name])
        reports[LABELS[name]] = found
    picture = arguments.output / "forecasts.png"
    draw_forecasts(data, {**reports, "naive": naive}, picture)
    print(f"\n{table(results)}\n\nforecasts and errors are in {picture}")
    if arguments.export:
        model = models[arguments.models[0]]
        keras_armin.export(model, arguments.export)
        print(f"{arguments.models[0]} is exported to {arguments.export}")
    return results


def train(run, name, data, arguments):
    """The trained network, with forecasts in the units of the data."""
    units = matching_units(
        name, arguments, len(data.columns), len(data.horizons)
    )
    runs.seed_everything(arguments.seed, arguments.deterministic)
    model = build_model(name, units, data, arguments)
    model.summary()
    scale = target_scale(data)
    run.train(
        model,
        functools.partial(
            series_data.training_batches,
            scaled(data.training, *scale),
            arguments.window,
            arguments.stride,
            arguments.warmup,
            arguments.batch_size,
            arguments.seed,
        ),
        epochs=arguments.epochs,
        steps_per_epoch=arguments.epoch_updates,
        validation_data=series_data.evaluation_batch(
            scaled(data.validation, *scale), arguments.warmup
        ),
        monitor="val_loss",
        stop_when=cli.out_of_time(arguments),
    )
    run.restore_best(model)
    return forecaster(model, *scale)


def write_files(run, model, data, found, naive):
    model.save(run.folder / "model.keras")
    write_table(
        run.folder / "errors.csv",
        _rounded(
            steps_ahead=data.horizons,
            rmse=found.rmse,
            naive_rmse=naive.rmse,
            interval_lower=found.lower,
            interval_upper=found.upper,
            within_interval=found.coverage,
        ),
    )
    write_table(
        run.folder / "forecast.csv",
        _rounded(
            steps_ahead=data.horizons,
            forecast=found.next,
            lower=found.next + found.lower,
            upper=found.next + found.upper,
        ),
    )
    plotting.draw_training(
        run.history,
        "loss",
        "mean squared error, scaled",
        run.folder / "curve.png",
    )
    layer = model.get_layer("layer_1")
    if isinstance(layer, keras_armin.ARMIN):
        steps = data.latest.shape[1]
        plotting.draw_memory(
            layer,
            model.get_layer("scale")(data.latest),
            run.folder / "memory.png",
            title="the first layer, on the last steps known",
            first=max(0, steps - MEMORY_STEPS),
        )


def result_line(run, name, model, data, found, naive, arguments):
    def scores(forecasts, first):
        pair = forecasts[:, first:], data.test.targets[:, first:]
        rmse, nrmse = series_data.rmse(*pair), series_data.nrmse(*pair)
        return float(f"{rmse:.6g}"), round(float(nrmse), 5)

    steps = data.test.targets.shape[1]
    rmse, nrmse = scores(found.test, arguments.warmup)
    naive_rmse, naive_nrmse = scores(naive.test, arguments.warmup)
    return {
        "data": str(arguments.data or "mackey-glass"),
        "model": name,
        "preset": arguments.preset,
        "parameters": networks.parameters(model),
        "units": model.get_layer("layer_1").units,
        "layers": arguments.layers,
        "steps_ahead": int(data.horizons[-1]),
        "updates": run.epoch * arguments.epoch_updates,
        "validation_loss": run.best_value("val_loss"),
        "test_rmse": rmse,
        "test_nrmse": nrmse,
        # Of what is forecast without the start of a sequence.
        "test_nrmse_second_half": scores(found.test, steps // 2)[1],
        "naive_rmse": naive_rmse,
        "naive_nrmse": naive_nrmse,
        "coverage": arguments.coverage,
        "within_interval": round(float(found.coverage.mean()), 4),
        "seconds": round(run.seconds),
        "backend": keras.backend.backend(),
        "seed": arguments.seed,
    }


if __name__ == "__main__":
    with runs.explained_errors():
        main()
