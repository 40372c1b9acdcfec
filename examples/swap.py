"""Replace an LSTM by ARMIN of equal parameters, and compare.

    python examples/swap.py                                six tasks, 3 seeds
    python examples/swap.py --tasks recall text --seeds 1  two tasks, one seed
    python examples/swap.py --settings lstm default paper  other networks too
    python examples/swap.py --updates-scale 0.1            a quick look

For users who replace `LSTM(128)` by `ARMIN(64)` and change nothing else. Both
networks are trained on the same data in the same order, for the same number of
updates, with Adam at 1e-3. ARMIN has the number of units at which the whole
model has as many parameters as the model with the LSTM. Each run is validated
ten times on held-out data, as `predict` runs the model. The result is the
validation after the last update; no checkpoint is selected.

Each completed run is saved in `--folder`: the same command continues after an
interruption, and further seeds, tasks or settings are added.
"""

import functools
import itertools
import json
import os
import pathlib
import platform
import shlex
import sys
import time

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
# Loops of small steps are faster without it. JAX reads it when imported.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")

import keras
import matplotlib
import numpy as np

import keras_armin
from examples.support import cli
from examples.support import networks
from examples.support import plotting
from examples.support.cli import RunError
from examples.support.data.swap_tasks import METRICS
from examples.support.data.swap_tasks import TASKS
from examples.support.runs import explained_errors

LSTM, ARMIN = keras.layers.LSTM, keras_armin.ARMIN
# A layer and its arguments except `units`. After the paper's cell come the
# defaults with one difference from the paper undone, and other ideas.
SETTINGS = {
    "lstm": (LSTM, {}),
    "default": (ARMIN, {}),
    "paper": (ARMIN, keras_armin.PAPER),
    "noise": (ARMIN, {"noise_scale": 1.0}),
    "no-recency": (ARMIN, {"recency_addressing": False}),
    "unbounded": (
        ARMIN,
        {"state_activation": None, "output_activation": "tanh"},
    ),
    "closed-gates": (ARMIN, {"unit_gate_bias": False}),
    "wide-slots": (ARMIN, {"memory_dim": None}),
    "linear-write": (ARMIN, {"write_activation": None}),
    "one-slot": (ARMIN, {"memory_slots": 1}),
    "learnt-start": (ARMIN, {"learn_initial_state": True}),
    "layer-norm": (ARMIN, {"layer_norm": True}),
}
POINTS = 10  # validations in a run
LEARNING_RATE = 1e-3
STOPPED = "stopped; the same command continues after the last complete run"


def recurrent_layer(setting, units):
    """A function that makes layers of a setting, for `Task.model`."""
    layer, arguments = SETTINGS[setting]
    return functools.partial(layer, units, **arguments)


def parameters(task, setting, units):
    return networks.count_parameters(
        lambda: task.model(recurrent_layer(setting, units))
    )


def matching_units(name, setting):
    """The units with which the parameters are closest to the LSTM's."""
    task = TASKS[name]
    if setting == "lstm":
        return task.units
    return networks.nearest_units(
        functools.partial(parameters, task, setting),
        parameters(task, "lstm", task.units),
        most=2 * task.units,
    )


def build_model(task, setting, units):
    model = task.model(recurrent_layer(setting, units))
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE, global_clipnorm=1.0),
        METRICS[task.metric].loss,
        metrics=["accuracy"] if task.metric == "accuracy" else [],
    )
    return model


def updates_of(task, scale):
    """Number of updates, a multiple of the number of validations."""
    return POINTS * max(1, round(scale * task.updates / POINTS))


def run_settings(name, setting, seed, scale):
    """Everything that determines the result of a run, as JSON has it."""
    task = TASKS[name]
    units = matching_units(name, setting)
    layer = recurrent_layer(setting, units)(name=setting)
    settings = {
        "task": name,
        "setting": setting,
        "seed": seed,
        "units": units,
        "updates": updates_of(task, scale),
        "batch_size": task.batch_size,
        "learning_rate": LEARNING_RATE,
        # With its defaults, which may change.
        "layer": layer.get_config(),
        "backend": keras.backend.backend(),
    }
    return json.loads(json.dumps(settings))


def train(given):
    """One run: its settings, and the result."""
    task, metric = TASKS[given["task"]], METRICS[TASKS[given["task"]].metric]
    keras.utils.set_random_seed(given["seed"])
    model = build_model(task, given["setting"], given["units"])
    held_out = task.held_out()
    inputs, targets = task.training(given["seed"], given["updates"])
    started = time.monotonic()
    history = model.fit(
        inputs,
        targets,
        batch_size=task.batch_size,
        epochs=POINTS,
        # Each epoch continues where the previous one ended.
        steps_per_epoch=given["updates"] // POINTS,
        shuffle=False,
        validation_data=held_out,
        validation_batch_size=len(held_out[0]),
        verbose=0,
    ).history
    logs = [dict(zip(history, values)) for values in zip(*history.values())]
    return {
        "given": given,
        "parameters": networks.parameters(model),
        "points": [float(metric.of_logs(one)) for one in logs],
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            name: sys.modules[name].__version__
            for name in ("keras", keras.backend.backend())
        },
    }


def run_or_read(folder, name, setting, seed, scale):
    """The result of a run, from its file if it exists."""
    given = run_settings(name, setting, seed, scale)
    path = folder / f"{name}-{setting}-seed{seed}.json"
    if path.exists():
        return _read(path, given)
    result = train(given)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)  # atomic: a kill leaves no partial file
    return result


def _read(path, given):
    try:
        result = json.loads(path.read_text())
        then = result["given"]
    except (ValueError, KeyError) as error:
        raise RunError(f"{path} is damaged ({error}): delete it.") from error
    for key, now in given.items():
        if then.get(key) != now:
            raise RunError(
                f"{path} holds a run with another {key}: {then.get(key)!r} "
                f"then, {now!r} now. Delete it, or choose another --folder."
            )
    return result


def table(results, markdown=False):
    """A row for each task: mean and range over the seeds, per setting."""
    rows = [["task", "updates", "parameters", *next(iter(results.values()))]]
    for name, by_setting in results.items():
        one_of_each = [runs[0] for runs in by_setting.values()]
        parameters = [f"{run['parameters']:,}" for run in one_of_each]
        rows.append(
            [
                f"{name}, {TASKS[name].metric}",
                f"{one_of_each[0]['given']['updates']:,}",
                " / ".join(parameters),
                *(mean_and_range(name, x) for x in by_setting.values()),
            ]
        )
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        for row in rows
    )


def mean_and_range(name, runs):
    """Mean and range of the final results."""
    last = [run["points"][-1] for run in runs]
    format = METRICS[TASKS[name].metric].format
    return f"{format(np.mean(last))} ({format(np.ptp(last))})"


def draw(results, path):
    """A panel for each task: mean and range over the seeds."""
    figure, axes = plotting.panels(len(results))
    for ax, (name, by_setting) in zip(axes, results.items()):
        updates = next(iter(by_setting.values()))[0]["given"]["updates"]
        plotting.plot_curves(
            {
                setting: [[{"point": x} for x in run["points"]] for run in runs]
                for setting, runs in by_setting.items()
            },
            "point",
            ax,
            updates_per_epoch=updates // POINTS,
            middle="mean",
            target=TASKS[name].chance,
        )
        ax.set(title=TASKS[name].title, ylabel=TASKS[name].metric)
    plotting.shared_legend(figure, axes)
    plotting.save(figure, path)


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS)
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=["lstm", "default"],
        help="the networks (default: lstm default)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=cli.positive,
        default=[1, 2, 3],
        help="seeds of weights, data and noise (default: 1 2 3)",
    )
    parser.add_argument(
        "--updates-scale",
        type=cli.above_zero,
        default=1.0,
        help="factor on the number of updates (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path("runs/swap"),
        help="folder for results and picture (default: %(default)s)",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table as Markdown"
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Returns the runs by task and setting: a list, seed by seed."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = {name: {} for name in arguments.tasks}
    for name, setting, seed in itertools.product(
        arguments.tasks, arguments.settings, arguments.seeds
    ):
        print(f"{name} {setting} seed {seed}:", end=" ", flush=True)
        run = run_or_read(
            arguments.folder, name, setting, seed, arguments.updates_scale
        )
        points = map(METRICS[TASKS[name].metric].format, run["points"])
        print(*points, f"in {run['seconds']} s", sep="  ")
        results[name].setdefault(setting, []).append(run)
    draw(results, arguments.folder / "curves.png")
    print(f"\n{table(results, arguments.markdown)}\n")
    words = sys.argv[1:] if argv is None else argv
    print(
        f"{shlex.join(['python', 'examples/swap.py', *words])}\n"
        "mean (highest minus lowest) of seeds "
        f"{', '.join(map(str, arguments.seeds))}; "
        f"{keras.backend.backend()}, {run['machine']}\n"
        f"results and picture are in {arguments.folder}"
    )
    return results


if __name__ == "__main__":
    with explained_errors(STOPPED):
        main()
