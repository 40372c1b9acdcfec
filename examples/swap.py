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
interruption, and more seeds, tasks or settings add to what is there.
"""

import argparse
import bisect
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
from matplotlib import pyplot as plt

import keras_armin
from examples.support import curves
from examples.support import training
from examples.support.command_types import above_zero
from examples.support.command_types import positive
from examples.support.errors import RunError
from examples.support.swap_tasks import METRICS
from examples.support.swap_tasks import TASKS

LSTM, ARMIN = keras.layers.LSTM, keras_armin.ARMIN
# A layer and its arguments beside `units`. After the paper's cell, the default
# with one of its differences from the paper undone, and other ideas.
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
    return lambda **of_task: layer(units, **arguments, **of_task)


def parameters(task, setting, units):
    """Number of parameters of a model, without initialising them."""
    with keras.StatelessScope(initialize_variables=False):
        model = task.model(recurrent_layer(setting, units))
    # Otherwise Keras would initialise them when another model is trained.
    keras.utils.clear_session(free_memory=False)
    return training.parameters(model)


def matching_units(name, setting):
    """The units with which a model is nearest to the LSTM's in parameters."""
    task = TASKS[name]
    if setting == "lstm":
        return task.units
    wanted = parameters(task, "lstm", task.units)
    has = functools.partial(parameters, task, setting)
    units = range(1, 2 * task.units)
    more = bisect.bisect_left(units, wanted, key=has)
    near = units[max(0, more - 1) : more + 1]
    return min(near, key=lambda number: abs(has(number) - wanted))


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


def what_determines(name, setting, seed, scale):
    """Everything that a run depends on, to be saved with it."""
    task = TASKS[name]
    units = matching_units(name, setting)
    layer = recurrent_layer(setting, units)(name=setting)
    return {
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


def train(given):
    """One run: what determined it, and what came out."""
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
        "parameters": training.parameters(model),
        "points": [float(metric.of_logs(one)) for one in logs],
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"keras": keras.__version__, **_version_of_backend()},
    }


def _version_of_backend():
    name = keras.backend.backend()
    return {name: sys.modules[name].__version__}


def run_or_read(folder, name, setting, seed, scale):
    """The result of a run, from its file if there is one."""
    given = what_determines(name, setting, seed, scale)
    given = json.loads(json.dumps(given))
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
                f"then, {now!r} now. Choose another --folder, or delete it."
            )
    return result


def table(results, markdown=False):
    """A row for each task: mean and spread over the seeds, per setting."""
    rows = [["task", "updates", "parameters", *next(iter(results.values()))]]
    for name, by_setting in results.items():
        one_of_each = [runs[0] for runs in by_setting.values()]
        parameters = [f"{run['parameters']:,}" for run in one_of_each]
        rows.append(
            [
                f"{name}, {TASKS[name].metric}",
                f"{one_of_each[0]['given']['updates']:,}",
                " / ".join(parameters),
                *(mean_and_spread(name, x) for x in by_setting.values()),
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


def mean_and_spread(name, runs):
    """Mean and range of the final results."""
    last = [run["points"][-1] for run in runs]
    words = METRICS[TASKS[name].metric].words
    return f"{words(np.mean(last))} ({words(np.ptp(last))})"


def draw(results, path):
    """A panel for each task: mean over the seeds, and from low to high."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 3.8 * columns, 0.6 + 3.2 * rows),
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[len(results) :]:
        ax.set_visible(False)
    for ax, (name, by_setting) in zip(axes.flat, results.items()):
        draw_task(TASKS[name], by_setting, ax)
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2 * columns,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_task(task, by_setting, ax):
    updates = next(iter(by_setting.values()))[0]["given"]["updates"]
    curves.plot_curves(
        {
            setting: [[{"point": x} for x in run["points"]] for run in runs]
            for setting, runs in by_setting.items()
        },
        "point",
        ax,
        x="updates",
        updates_per_epoch=updates // POINTS,
        middle="mean",
        target=task.chance,
    )
    ax.set(title=task.title, ylabel=task.metric)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        type=positive,
        default=[1, 2, 3],
        help="seeds of weights, data and noise (default: 1 2 3)",
    )
    parser.add_argument(
        "--updates-scale",
        type=above_zero,
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
        words = METRICS[TASKS[name].metric].words
        print(*map(words, run["points"]), f"in {run['seconds']} s", sep="  ")
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
    with training.explained_errors(STOPPED):
        main()
