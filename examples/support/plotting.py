"""Pictures: learning curves, reads and writes of a memory, benchmarks.

    python -m examples.support.plotting --metric val_accuracy --output x.png \\
        "ARMIN=runs/a1,runs/a2" "LSTM=runs/b1"

draws learning curves. A curve is a label and its runs: folders of runs, or
their log.csv. The line is the median of the runs, the band is their range. Both
end with the shortest run; longer runs continue as thin lines. For several
panels use

    --panel copy "ARMIN=..." "LSTM=..." --panel sort "ARMIN=..." "LSTM=..."
"""

import csv
import pathlib

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

import keras_armin
from examples.support import cli
from examples.support.cli import RunError
from examples.support.runs import explained_errors

MIDDLES = {"median": np.median, "mean": np.mean}
_STYLES = ("-", "--", "-.", ":")
_CHARACTERS_PER_ROW = 60


def save(figure, path):
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- learning curves ---------------------------------------------------------


def plot_curves(
    runs,
    metric,
    ax,
    *,
    updates_per_epoch=None,
    middle="median",
    log_scale=False,
    target=None,
    styles=None,
):
    """Draws one panel.

    Args:
        runs: dict from a label to a list of runs, each of which is the
            history of a `runs.Run`, its folder, or a log.csv.
        metric: Name of the column to draw.
        ax: Matplotlib axes.
        updates_per_epoch: int. If given, the axis counts updates instead of
            epochs.
        middle: `"median"` or `"mean"`.
        log_scale: bool. Whether the axis of the metric is logarithmic.
        target: float. Where to draw a horizontal line.
        styles: dict from a label to `(colour, line style)`.
    """
    styles, scale = styles or _styles(runs), updates_per_epoch or 1
    for label, members in runs.items():
        curves = [_values(run, metric) for run in members]
        line = dict(zip(("color", "linestyle"), styles[label]))
        _plot_curve(ax, curves, scale, MIDDLES[middle], label, line)
    if target is not None:
        ax.axhline(target, color="grey", linewidth=1, linestyle=(0, (1, 1)))
    if log_scale:
        ax.set_yscale("log")
    ax.set_xlabel("updates" if updates_per_epoch else "epochs")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel(metric.replace("val_", "validation ").replace("_", " "))
    ax.grid(alpha=0.3)


def _plot_curve(ax, curves, scale, middle, label, line):
    shortest, longest = min(map(len, curves)), max(map(len, curves))
    values = np.stack([curve[:shortest] for curve in curves])
    x = scale * np.arange(1, longest + 1)
    marker = "o" if shortest == 1 else None  # a single point has no line
    y = middle(values, axis=0)
    ax.plot(x[:shortest], y, marker=marker, label=label, **line)
    if len(curves) == 1:
        return
    low, high = values.min(axis=0), values.max(axis=0)
    band = {"color": line["color"], "alpha": 0.2, "linewidth": 0}
    ax.fill_between(x[:shortest], low, high, **band)
    for curve in curves:
        rest = slice(shortest - 1, len(curve))
        ax.plot(x[rest], curve[rest], linewidth=0.6, **line)


def _styles(labels):
    return {
        label: (f"C{i % 10}", _STYLES[i % len(_STYLES)])
        for i, label in enumerate(labels)
    }


def _values(run, metric):
    """The metric in each epoch of a run."""
    log, name = run, "this history"
    if isinstance(run, str | pathlib.Path):
        log, name = _read_log(pathlib.Path(run))
    if not log:
        raise RunError(f"there is no complete epoch in {name}")
    if metric not in log[0]:
        raise RunError(
            f"there is no {metric} in {name}, but {', '.join(log[0])}"
        )
    return np.array([_number(row[metric]) for row in log])


def _read_log(path):
    path = path / "log.csv" if path.is_dir() else path
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file)), path
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):  # Keras logs missing values as NA
        return np.nan


def panels(count, columns=3):
    """A figure and as many axes, in rows that are filled evenly."""
    rows = -(-count // columns)
    columns = -(-count // rows)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 3.8 * columns, 0.6 + 3.2 * rows),
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return figure, axes.flat[:count]


def shared_legend(figure, axes):
    """One legend for all panels."""
    handles = {}
    for ax in axes:
        handles.update(zip(*reversed(ax.get_legend_handles_labels())))
    if len(handles) > 8:
        # Below, a long list would take more room than the panels.
        width, height = figure.get_size_inches()
        figure.set_size_inches(1.6 * width, 1.3 * height)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside right center",
            frameon=False,
        )
        return
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 2 * len(axes), 6),
        frameon=False,
    )


def draw_curves(runs, metric, path, **options):
    """Saves a picture with a panel for each entry of a dict.

    `runs` is a dict from a title to the `runs` of `plot_curves`, which takes
    the `options`. A label looks the same in all panels.
    """
    styles = _styles(dict.fromkeys(label for x in runs.values() for label in x))
    figure, axes = panels(len(runs))
    for ax, (title, some) in zip(axes, runs.items()):
        plot_curves(some, metric, ax, styles=styles, **options)
        ax.set_title(title)
    shared_legend(figure, axes)
    save(figure, path)


def draw_training(history, metric, ylabel, path, updates_per_epoch=None):
    """Saves a picture of a metric in training and in validation."""
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    x = np.arange(1, len(history) + 1) * (updates_per_epoch or 1)
    for label, name in (("training", metric), ("validation", f"val_{metric}")):
        ax.plot(x, [logs[name] for logs in history], ".-", label=label)
    ax.set(xlabel="updates" if updates_per_epoch else "epochs", ylabel=ylabel)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    save(figure, path)


# --- memory ------------------------------------------------------------------


def draw_memory(layer, inputs, path, title, answer=None, first=0):
    """Saves a picture of what a layer reads and writes.

    Args:
        layer: A layer with a memory.
        inputs: One sequence, `(1, time, features)`.
        answer: int. Step at which to draw a dashed line.
        first: int. First step to show.
    """
    trace = keras_armin.trace_memory(layer, inputs)
    trace = keras_armin.MemoryTrace(*(x[:, first:] for x in trace))
    ax = keras_armin.plot_memory(trace, title=title)
    if answer is not None:
        ax.axvline(answer - 0.5, color="black", linewidth=1, linestyle="--")
    if first:
        ax.xaxis.set_major_formatter(lambda step, _: f"{step + first:.0f}")
    save(ax.figure, path)


def draw_text_reads(traces, characters, path):
    """Saves a picture of the slots that were read at each character.

    Args:
        traces: List of `MemoryTrace`, one for each layer.
        characters: List of strings, one for each time step.
    """
    starts = range(0, len(characters), _CHARACTERS_PER_ROW)
    rows, slots = len(traces) * len(starts), traces[0].read_weights.shape[-1]
    figure, axes = plt.subplots(
        rows,
        figsize=(12, rows * (1.1 + 0.13 * slots)),
        squeeze=False,
        layout="constrained",
    )
    axes = iter(axes[:, 0])
    for number, trace in enumerate(traces, start=1):
        for start in starts:
            ax, row = next(axes), slice(start, start + _CHARACTERS_PER_ROW)
            part = keras_armin.MemoryTrace(*(x[:, row] for x in trace))
            keras_armin.plot_memory(part, ax=ax)
            labels = [visible(x) for x in characters[row]]
            ax.set_xticks(range(len(labels)), labels, family="monospace")
            ax.tick_params("x", length=0)
            ax.set(xlim=(-0.5, _CHARACTERS_PER_ROW - 0.5), xlabel="")
            if len(traces) > 1:
                ax.set_ylabel(f"layer {number}, slot")
            if start:
                ax.get_legend().remove()
    save(figure, path)


def visible(character):
    """The character, or a visible mark for whitespace."""
    return {" ": "␣", "\n": "↵", "\t": "→"}.get(character, character)


# --- benchmarks --------------------------------------------------------------

_COLOURS = {
    "ARMIN": "tab:blue",
    "RNN(ARMINCell)": "tab:orange",
    "keras.layers.LSTM": "tab:green",
    "torch.nn.LSTM": "tab:red",
}


def draw_benchmark(results, path):
    """Saves a picture of results of `benchmark.py`.

    It has a column for each result, and a row for each size that varies and
    each unit.
    """
    rows = _benchmark_rows(results[0])
    if any(_benchmark_rows(result) != rows for result in results):
        raise SystemExit("These files do not vary the same sizes.")
    figure, axes = plt.subplots(
        len(rows),
        len(results),
        figsize=(4.6 * len(results), 3.4 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    for result, column in zip(results, axes.T):
        for ax, (size, unit) in zip(column, rows):
            points = [p for p in result["points"] if p["varied"] == size]
            bars = result["question"] in ("memory", "networks")
            _plot_benchmark(ax, points, size, unit, bars)
            ax.set(title=result["backend"], ylabel=unit or result["unit"])
    save(figure, path)


def _benchmark_rows(result):
    sizes = dict.fromkeys(p["varied"] for p in result["points"])
    scaling = result["question"] == "scaling"
    units = ("us a time step", "s longer the first time") if scaling else ("",)
    return [(size, unit) for size in sizes for unit in units]


def _plot_benchmark(ax, points, size, unit, bars):
    labels = dict.fromkeys(k for p in points for k in p["found"])
    labels = [label for label in labels if label.endswith(unit)]
    x, width = np.arange(len(points)), 0.8 / len(labels)
    for i, label in enumerate(labels):
        y = [p["found"][label] for p in points]
        # Others get the next colour of the cycle.
        name, is_compiled = _without_compiler(label.split(",")[0])
        style = {"label": label, "color": _COLOURS.get(name)}
        if bars:
            ax.bar(x + (i - (len(labels) - 1) / 2) * width, y, width, **style)
        else:
            line = ["-", "--", ":"][("generating" in label) + is_compiled]
            ax.plot(x, y, f"o{line}", markersize=3, **style)
    ax.set_xticks(x, [p[size] for p in points])
    highest = max(p["found"][label] for p in points for label in labels)
    # Room for the legend above the lines.
    ax.set(xlabel=size, ylim=(0, (1.05 + 0.1 * len(labels)) * highest))
    ax.grid(axis="y", alpha=0.3)
    ax.legend(fontsize=7, loc="upper left")


def _without_compiler(name):
    """The name without what compiled it, and whether anything did."""
    short = name.removesuffix(" with XLA").removesuffix(" compiled")
    return short, short != name


# --- command line ------------------------------------------------------------


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    parser.prog = "python -m examples.support.plotting"
    parser.add_argument("curves", nargs="*", metavar="LABEL=RUN,RUN")
    parser.add_argument(
        "--panel",
        nargs="+",
        action="append",
        default=[],
        metavar=("TITLE", "LABEL=RUN,RUN"),
        help="curves of a separate panel",
    )
    parser.add_argument("--metric", required=True, help="column of log.csv")
    parser.add_argument("--output", required=True, help="the picture")
    parser.add_argument("--x", choices=("epochs", "updates"), default="epochs")
    parser.add_argument("--updates-per-epoch", type=cli.positive)
    parser.add_argument("--log-scale", action="store_true")
    parser.add_argument(
        "--target", type=cli.above_zero, help="where to draw a horizontal line"
    )
    arguments = parser.parse_args(argv)
    if (arguments.x == "updates") != bool(arguments.updates_per_epoch):
        parser.error("--x updates and --updates-per-epoch need each other")
    return arguments


def _parse_runs(texts):
    runs = {}
    for text in texts:
        label, equals, paths = text.partition("=")
        if not (label and equals and paths):
            raise RunError(f"a curve is LABEL=RUN,RUN, not {text!r}")
        runs.setdefault(label, []).extend(paths.split(","))
    return runs


def main(argv=None):
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    runs = {title: _parse_runs(texts) for title, *texts in arguments.panel}
    if arguments.curves:
        runs[""] = _parse_runs(arguments.curves)
    if not all(runs.values()) or not runs:
        raise RunError("there is nothing to draw: name curves as LABEL=RUN")
    draw_curves(
        runs,
        arguments.metric,
        arguments.output,
        updates_per_epoch=arguments.updates_per_epoch,
        log_scale=arguments.log_scale,
        target=arguments.target,
    )


if __name__ == "__main__":
    with explained_errors():
        main()
