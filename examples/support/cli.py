"""Command lines of the example scripts."""

import argparse
import math
import pathlib
import sys
import textwrap

import keras

STOPPED = (
    "stopped; the same command with --resume continues from the last complete "
    "epoch"
)
# Options that may differ when a run is resumed.
_MAY_DIFFER = (
    *("output", "resume", "overwrite", "data_dir", "minutes"),
    *("distribute", "model_devices", "virtual_devices"),
)


class RunError(Exception):
    """An error that the user can fix; the message says how."""


def _number(kind, is_valid, expected):
    """A type of argument, with an error that names the valid values."""

    def parse(text):
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not is_valid(number):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text}")
        return number

    return parse


positive = _number(int, lambda x: x >= 1, "at least 1")
at_least_zero = _number(int, lambda x: x >= 0, "at least 0")
above_zero = _number(float, lambda x: x > 0, "above 0")
not_negative = _number(float, lambda x: 0 <= x < math.inf, "at least 0")
rate = _number(float, lambda x: 0 <= x < 1, "at least 0 and below 1")


def parser(description):
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_options(parser, title, options):
    """Adds a group of options to a parser.

    Args:
        options: dict from the name of an option to `(kind, default, help)`.
            `kind` is a function that converts the value, a collection of
            choices, or `bool` for a pair such as `--cosine`, `--no-cosine`.
    """
    group = parser.add_argument_group(title)
    for name, (kind, default, text) in options.items():
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": kind} if callable(kind) else {"choices": kind}
        if default not in (None, False):
            text += " (default: %(default)s)"
        group.add_argument(
            f"--{name.replace('_', '-')}", default=default, help=text, **how
        )


def add_run_options(parser, presets):
    """Adds `--preset` and the options of a run.

    `presets` is a dict from a name to a description; the first is the default.
    """
    described = "; ".join(f"{name}: {text}" for name, text in presets.items())
    names = tuple(presets)
    options = {
        "preset": (names, names[0], f"settings to start from. {described}"),
        "seed": (int, 1, "seed of weights, data and noise"),
        "batch_size": (positive, None, "sequences per update"),
        "learning_rate": (above_zero, None, "initial learning rate"),
        "minutes": (above_zero, None, "stop after the epoch that exceeds this"),
        "deterministic": (
            bool,
            False,
            "reproduce a run bit by bit on TensorFlow too, where it is slower; "
            "JAX and torch always do on a CPU",
        ),
        "output": (pathlib.Path, None, "folder of the run (default: in runs/)"),
        "resume": (
            bool,
            False,
            "continue the run in --output; the results are those of an "
            "uninterrupted run (on TensorFlow with --deterministic)",
        ),
        "overwrite": (bool, False, "overwrite an unfinished run in --output"),
    }
    add_options(parser, "training", options)


def parse(parser, argv, preset_options):
    """Parses a command line, with the options of its preset in front.

    `preset_options(arguments)` returns them as one string; it may look at
    the preset, the model and the like. `--help` ends with them.
    """
    argv = sys.argv[1:] if argv is None else argv
    without_help = [x for x in argv if x not in ("-h", "--help")]
    arguments = parser.parse_args(without_help)
    options = preset_options(arguments)
    parser.epilog = f"--preset {arguments.preset} is short for:\n" + (
        textwrap.fill(
            options,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
    )
    return parser.parse_args([*options.split(), *argv])


def settings(arguments):
    """Everything that determines the results of a run, as a dict for JSON."""
    found = {
        name: value
        for name, value in vars(arguments).items()
        if name not in _MAY_DIFFER
    }
    return {**found, "backend": keras.backend.backend()}


def default_folder(task, arguments):
    """A separate folder for each task, network, preset and seed."""
    parts = (task, arguments.model, arguments.preset, f"seed{arguments.seed}")
    return pathlib.Path("runs", "-".join(parts))


def out_of_time(arguments):
    """A `stop_when` for `Run.train`: more than `--minutes` have passed."""
    limit = 60 * (arguments.minutes or math.inf)
    return lambda history: history[-1]["seconds"] > limit
