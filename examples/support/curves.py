"""Learning curves of several runs, and of several seeds as one curve.

    python -m examples.support.curves --metric val_accuracy --output x.png \\
        "ARMIN=runs/a1,runs/a2" "LSTM=runs/b1"

A curve is a label and its runs: folders of runs, or their log.csv. The line
is the median of the runs, the band is their range. Both end with the shortest
run; longer runs continue as thin lines. For several panels use

    --panel copy "ARMIN=..." "LSTM=..." --panel sort "ARMIN=..." "LSTM=..."
"""

import argparse
import csv
import pathlib
import sys

import matplotlib
import numpy as np

from examples.support.command_types import above_zero
from examples.support.command_types import positive
from examples.support.training import RunError
from examples.support.training import explained_errors

MIDDLES = {"median": np.median, "mean": np.mean}
_COLUMNS = 3
_STYLES = ("-", "--", "-.", ":")


def plot_curves(
    runs,
    metric,
    ax,
    *,
    x="epochs",
    updates_per_epoch=None,
    middle="median",
    log_scale=False,
    target=None,
    styles=None,
):
    """Draw one panel.

    Args:
        runs: dict from a label to a list of runs: each the history of a
            `training.Run`, a folder of one, or a log.csv.
        metric: Name of the column to draw.
        ax: Matplotlib axes.
        x: `"epochs"`, `"updates"` or `"seconds"`.
        updates_per_epoch: int. Needed for `"updates"`.
        middle: `"median"` or `"mean"`.
        log_scale: bool. Of the metric.
        target: float. Where to draw a level line.
        styles: dict from a label to `(colour, line style)`.
    """
    styles = styles or _styles(runs)
    for label, members in runs.items():
        curves = [_curve(run, metric, x, updates_per_epoch) for run in members]
        _plot_curve(ax, curves, MIDDLES[middle], label, *styles[label])
    if target is not None:
        ax.axhline(target, color="grey", linewidth=1, linestyle=(0, (1, 1)))
    if log_scale:
        ax.set_yscale("log")
    ax.set_xlabel(x)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel(metric.replace("val_", "validation ").replace("_", " "))
    ax.grid(alpha=0.3)


def _plot_curve(ax, curves, middle, label, colour, style):
    grid, values = _where_all_are(curves)
    # A run of one epoch has no line to show.
    marker = "o" if len(grid) == 1 else None
    line = middle(values, axis=0)
    ax.plot(grid, line, style, marker=marker, color=colour, label=label)
    if len(curves) == 1:
        return
    low, high = values.min(axis=0), values.max(axis=0)
    ax.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
    for x, y in curves:
        rest = x >= grid[-1]
        ax.plot(x[rest], y[rest], style, color=colour, linewidth=0.6)


def save_panels(panels, metric, path, titles=True, **options):
    """A picture with a panel for each entry of a dict from title to runs.

    `options` are those of `plot_curves`. A label looks the same in all panels.
    """
    from matplotlib import pyplot as plt

    labels = dict.fromkeys(label for runs in panels.values() for label in runs)
    styles = _styles(labels)
    # As few rows as will do, filled evenly: four panels are two by two.
    rows = -(-len(panels) // _COLUMNS)
    columns = -(-len(panels) // rows)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 3.8 * columns, 0.6 + 3.2 * rows),
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    handles = {}
    for ax, (title, runs) in zip(axes.flat, panels.items()):
        plot_curves(runs, metric, ax, styles=styles, **options)
        if titles:
            ax.set_title(title)
        handles.update(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 2 * columns),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _styles(labels):
    return {
        label: (f"C{i % 10}", _STYLES[i % len(_STYLES)])
        for i, label in enumerate(labels)
    }


def _curve(run, metric, x, updates_per_epoch):
    """Where the points of a run are, and the points."""
    log, name = _log(run)
    for column in (metric, "seconds") if x == "seconds" else (metric,):
        if column not in log[0]:
            raise RunError(
                f"there is no {column} in {name}, but {', '.join(log[0])}"
            )
    values = np.array([_number(row[metric]) for row in log])
    if x == "seconds":
        return np.array([_number(row["seconds"]) for row in log]), values
    epochs = np.arange(1, len(log) + 1)
    if x == "epochs":
        return epochs, values
    if updates_per_epoch is None:
        raise RunError("an axis of updates needs --updates-per-epoch")
    return epochs * updates_per_epoch, values


def _log(run):
    """The rows of a run's log, a dict for each epoch, and what it is called."""
    if not isinstance(run, str | pathlib.Path):
        log, name = run, "this history"
    else:
        path = pathlib.Path(run)
        name = path / "log.csv" if path.is_dir() else path
        try:
            with name.open(newline="") as file:
                log = list(csv.DictReader(file))
        except OSError as error:
            raise RunError(f"cannot read {name}: {error.strerror}") from error
    if not log:
        raise RunError(f"there is no complete epoch in {name}")
    return log, name


def _number(text):
    try:
        return float(text)
    except (TypeError, ValueError):  # Keras logs what was not measured as NA
        return np.nan


def _where_all_are(curves):
    """All curves at the points of all, as far as the shortest goes."""
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= first) & (grid <= max(first, last))]
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m examples.support.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("curves", nargs="*", metavar="LABEL=RUN,RUN")
    parser.add_argument(
        "--panel",
        nargs="+",
        action="append",
        default=[],
        metavar=("TITLE", "LABEL=RUN,RUN"),
        help="curves of a panel of their own",
    )
    parser.add_argument("--metric", required=True, help="column of log.csv")
    parser.add_argument("--output", required=True, help="the picture")
    parser.add_argument(
        "--x", choices=("epochs", "updates", "seconds"), default="epochs"
    )
    parser.add_argument("--updates-per-epoch", type=positive)
    parser.add_argument("--middle", choices=MIDDLES, default="median")
    parser.add_argument("--log-scale", action="store_true")
    parser.add_argument(
        "--target", type=above_zero, help="where to draw a level line"
    )
    return parser.parse_args(argv)


def _runs(texts):
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
    panels = {title: _runs(texts) for title, *texts in arguments.panel}
    if arguments.curves:
        panels[""] = _runs(arguments.curves)
    if not all(panels.values()) or not panels:
        raise RunError("there is nothing to draw: name curves as LABEL=RUN")
    save_panels(
        panels,
        arguments.metric,
        arguments.output,
        titles=len(panels) > 1 or "" not in panels,
        x=arguments.x,
        updates_per_epoch=arguments.updates_per_epoch,
        middle=arguments.middle,
        log_scale=arguments.log_scale,
        target=arguments.target,
    )


if __name__ == "__main__":
    with explained_errors():
        sys.exit(main())
