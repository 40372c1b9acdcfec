"""Time series to forecast: Mackey-Glass or the columns of a CSV file.

At each step of a sequence a network forecasts the target some steps later,
from that step and all before it. A series has three parts, which do not
overlap: what is forecast in one of them is never seen in an earlier one. The
first steps of a sequence, the warm-up, only give the network something to
remember; forecasts made there do not count.
"""

import csv
import datetime
import itertools
import math
import statistics
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from examples.support.cli import RunError

# Mackey-Glass: steps of the delay, steps of Euler's method in a time step, and
# time steps to leave out, in which the start is forgotten.
TAU, SUBSTEPS, WASHOUT = 17, 10, 100
# Shares of the rows of a CSV file; the rest is for the test.
TRAINING, VALIDATION = 0.7, 0.15
# Rows are as far apart as most, to this factor. Months are, weekends are not.
UNEVEN = 1.5
SHUFFLED = 10_000  # windows in memory


class Part(NamedTuple):
    inputs: np.ndarray  # (sequences, steps, columns) float32
    targets: np.ndarray  # (sequences, steps, horizons) float32


class Series(NamedTuple):
    """A series in three parts.

    `horizons` says how many steps ahead each target is, and `target` which of
    the `columns` is forecast. `latest` are inputs up to the last step that is
    known.
    """

    training: Part
    validation: Part
    test: Part
    columns: tuple[str, ...]
    target: int
    horizons: np.ndarray
    latest: np.ndarray  # (1, steps, columns)


# --- Mackey-Glass ------------------------------------------------------------


def mackey_glass(history, steps):
    """Integrates dx/dt = 0.2 y / (1 + y^10) - 0.1 x, where y = x(t - TAU).

    Args:
        history: Array of shape `(sequences, TAU * substeps + 1)`: x in the
            past, which sets the step of Euler's method, and now.
        steps: int. Number of time steps.

    Returns:
        Array of shape `(sequences, steps)`: x after each time step.
    """
    delay = history.shape[1] - 1
    substeps = delay // TAU
    x = np.empty((delay + 1 + steps * substeps, len(history)))
    x[: delay + 1] = history.T
    for now in range(delay, len(x) - 1):
        past = x[now - delay]
        change = 0.2 * past / (1 + past**10) - 0.1 * x[now]
        x[now + 1] = x[now] + change / substeps
    return x[delay + substeps :: substeps].T


def load_mackey_glass(sequences, steps, horizon, seed):
    """The data of the LMU paper: a quarter, a quarter and half of them.

    The values are squashed by a tanh, as they are there. Sequences start at
    random points, so that they have different phases.
    """
    rng = np.random.default_rng(seed)
    history = rng.uniform(1.1, 1.3, (sequences, TAU * SUBSTEPS + 1))
    history[:, -1] = rng.uniform(0.5, 1.3, sequences)
    x = mackey_glass(history, WASHOUT + steps + horizon)[:, WASHOUT:]
    x = np.tanh(x - 1).astype("float32")[..., None]
    whole = Part(x[:, :-horizon], x[:, horizon:])
    cuts = [sequences // 4, sequences // 2]
    inputs, targets = (np.split(array, cuts) for array in whole)
    return Series(
        *map(Part, inputs, targets),
        columns=("x",),
        target=0,
        horizons=np.array([horizon]),
        latest=x[-1:],
    )


# --- CSV files ---------------------------------------------------------------


def load_csv(path, target, horizon, window, warmup, ignored=()):
    """All numeric columns of a file, to forecast one of them.

    Args:
        path: A CSV file whose first row has the names of the columns.
        target: Name of the column to forecast.
        horizon: int. Number of steps to forecast.
        window: int. Steps of a sequence in training.
        warmup: int. Steps of a sequence whose forecasts do not count.
        ignored: Names of columns to leave out.
    """
    columns, values = read_csv(path, target, ignored)
    ends = _ends(len(values))
    if not _are_enough(len(values), horizon, window, warmup):
        needed = next(
            rows
            for rows in itertools.count(1)
            if _are_enough(rows, horizon, window, warmup)
        )
        raise RunError(
            f"{path} has too few rows of data, {len(values)}. --window "
            f"{window} and --horizon {horizon} need at least {needed}."
        )
    index = columns.index(target)
    _check_variance(path, columns, values[: ends[0]], index)
    targets = np.lib.stride_tricks.sliding_window_view(
        values[1:, index], horizon
    )

    def part(start, end):
        """Forecasts made from row `start` on, of rows before `end`."""
        steps = slice(start, end - horizon)
        return Part(values[None, steps], targets[None, steps])

    return Series(
        part(0, ends[0]),
        part(ends[0] - 1 - warmup, ends[1]),
        part(ends[1] - 1 - warmup, ends[2]),
        columns=columns,
        target=index,
        horizons=np.arange(1, horizon + 1),
        latest=values[None, -window:],
    )


def _ends(rows):
    """Where training, validation and test end."""
    return int(TRAINING * rows), int((TRAINING + VALIDATION) * rows), rows


def _are_enough(rows, horizon, window, warmup):
    training, validation, test = _ends(rows)
    return (
        training - horizon >= max(window, warmup + 1)
        and validation - training >= horizon
        and test - validation >= horizon
    )


def _check_variance(path, columns, training, target):
    for index, name in enumerate(columns):
        if np.ptp(training[:, index]) == 0:
            remedy = f"leave it out with --ignore {name}"
            if index == target:
                remedy = "there is nothing to learn from"
            raise RunError(
                f"{path}, rows 2 to {len(training) + 1}, column {name!r}: all "
                f"of the training part is {training[0, index]:g}; {remedy}."
            )


def read_csv(path, target, ignored=()):
    """Names and values, `(rows, columns)`, of the numeric columns.

    A column without any number, such as a date, is left out and printed. If
    it has dates in ISO format, they must be evenly spaced. Anything else that
    is not a finite number is an error. Row 1 has the names.
    """
    if target in ignored:
        raise RunError(
            f"--ignore leaves out {target!r}, which is the --target. Name "
            "another column."
        )
    names, rows = _read_rows(path)
    for name in (target, *ignored):
        if name not in names:
            raise RunError(
                f"there is no column {name!r} in {path}, but "
                f"{', '.join(map(repr, names))}"
            )
    columns, wrong = {}, []
    for index, name in enumerate(names):
        cells = [row[index].strip() for row in rows]
        if name in ignored:
            continue
        numbers = [_number(cell) for cell in cells]
        if name != target and all(cells) and not any(map(_is_real, numbers)):
            if not all(map(_has_decimal_comma, cells)):
                _leave_out(path, name, cells)
                continue
        columns[name] = numbers
        wrong += [
            (row, name, cell)
            for row, (cell, number) in enumerate(zip(cells, numbers), start=2)
            if not _is_real(number)
        ]
    if wrong:
        raise RunError(_describe(path, target, wrong))
    return tuple(columns), np.array(list(columns.values()), "float32").T


def _read_rows(path):
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            names, *rows = list(csv.reader(file, delimiter=delimiter)) or [[]]
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not text in UTF-8: {error}") from error
    except csv.Error as error:
        raise RunError(f"{path} is not a CSV file: {error}") from error
    names = [name.strip() for name in names]
    while rows and not rows[-1]:  # empty lines at the end
        rows.pop()
    if not rows:
        raise RunError(f"{path} has no rows below the names of its columns.")
    _check_names(path, names)
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise RunError(
                f"{path}, row {number}: {len(row)} cells, but there are "
                f"{len(names)} columns: {', '.join(map(repr, names))}"
            )
    return names, rows


def _check_names(path, names):
    for number, name in enumerate(names, start=1):
        if not name or names.index(name) != number - 1:
            problem = f"the name {name!r} comes twice" if name else "no name"
            raise RunError(f"{path}, row 1, column {number}: {problem}")
    if any(_is_real(_number(name)) for name in names):
        raise RunError(
            f"{path}, row 1: a number in place of the name of a column: "
            f"{', '.join(names)}"
        )


def _number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


def _has_decimal_comma(cell):
    return "," in cell and _is_real(_number(cell.replace(",", ".")))


def _is_real(number):
    largest = float(np.finfo("float32").max)
    return number is not None and abs(number) <= largest  # False for NaN


def _describe(path, target, wrong):
    row, name, cell = min(wrong, key=lambda one: one[0])
    found = f"{cell!r} is not a finite number" if cell else "the cell is empty"
    others = ""
    if wrong[1:]:
        others = f" The same holds for {len(wrong) - 1:,} more cells."
    if "," in cell:
        others += " Numbers take a decimal point."
    remedy = "Correct it"
    if name != target:
        remedy += f", or leave the column out with --ignore {name}"
    return f"{path}, row {row}, column {name!r}: {found}.{others} {remedy}."


def _leave_out(path, name, cells):
    dates = _dates(cells)
    checked = ", except to check that its dates are evenly spaced"
    print(
        f"{path}: column {name!r} has no numbers, such as {cells[0]!r}, and is "
        f"not used{checked if dates else ''}"
    )
    steps = [after - before for before, after in zip(dates, dates[1:])]
    usual = statistics.median(steps) if steps else None
    for row, step in enumerate(steps, start=3):
        if not usual / UNEVEN <= step <= usual * UNEVEN or not step:
            raise RunError(
                f"{path}, row {row}, column {name!r}: {cells[row - 2]} is "
                f"{step} after the row before it, the others are {usual} "
                "apart. Sort the rows and fill the gaps, or use the rows as "
                f"they are with --ignore {name}."
            )


def _dates(cells):
    """The dates that the cells hold, none if there are others."""
    try:
        dates = [datetime.datetime.fromisoformat(cell) for cell in cells]
    except ValueError:
        return []
    alike = len({date.tzinfo is None for date in dates}) == 1
    return dates if alike else []


# --- batches -----------------------------------------------------------------


def training_batches(
    part, window, stride, warmup, batch_size, seed, first_step=0
):
    """Endless batches of windows, a function of seed and step.

    They are `(inputs, targets, weights)`. Windows start every `stride` steps,
    in another order in each pass. The weights leave out the warm-up.
    """
    features = part.inputs.shape[-1]
    columns = np.concatenate(part, axis=-1).swapaxes(0, 1)
    weights = _weights(window, warmup)
    windows = keras.utils.timeseries_dataset_from_array(
        columns,
        None,
        sequence_length=window,
        sequence_stride=stride,
        batch_size=None,
    )

    def one_pass(number):
        # Not by `shuffle=True` above, which would be another order for each
        # iterator: Keras makes several.
        return windows.shuffle(
            SHUFFLED, 1000 * seed + number, reshuffle_each_iteration=False
        )

    def split(windows):
        """Those of all sequences that start at the same step."""
        windows = tf.transpose(windows, (1, 0, 2))
        return windows[..., :features], windows[..., features:]

    return (
        tf.data.Dataset.range(np.iinfo("int64").max)
        .flat_map(one_pass)
        .map(split)
        .unbatch()
        .map(lambda inputs, targets: (inputs, targets, weights))
        .batch(batch_size)
        .skip(first_step)
        .prefetch(4)
    )


def evaluation_batch(part, warmup):
    """All sequences of a part, from beginning to end."""
    sequences, steps, _ = part.inputs.shape
    weights = np.tile(_weights(steps, warmup), (sequences, 1))
    return tf.data.Dataset.from_tensors((*part, weights))


def _weights(steps, warmup):
    return (np.arange(steps) >= warmup).astype("float32")


# --- forecasts and errors ----------------------------------------------------


def naive_forecasts(values, horizons, season=1):
    """What was last seen at the same point of a season.

    With a season of one step that is the present value.

    Args:
        values: Array of shape `(sequences, steps)`: the target until now.
        horizons: Array of int: how many steps ahead to forecast.
        season: int. Steps of a season.

    Returns:
        Array of shape `(sequences, steps, horizons)`, NaN where the series is
        shorter than a season.
    """
    found = np.full((*values.shape, len(horizons)), np.nan, values.dtype)
    for index, horizon in enumerate(horizons):
        back = season * math.ceil(horizon / season) - horizon
        found[:, back:, index] = values[:, : values.shape[1] - back]
    return found


def rmse(forecasts, targets, axis=None):
    """Root of the mean squared error, in float64."""
    errors = forecasts - targets.astype("float64")
    return np.sqrt(np.mean(errors**2, axis=axis))


def nrmse(forecasts, targets):
    """The same, relative to the standard deviation of the targets."""
    return rmse(forecasts, targets) / np.std(targets, dtype="float64")
