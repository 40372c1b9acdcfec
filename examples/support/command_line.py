"""The command line that the example scripts share."""

import argparse
import pathlib

import keras

from examples.support import models
from examples.support.command_types import above_zero
from examples.support.command_types import positive

# What may be different when a run is resumed.
_FREE = (
    "output",
    "resume",
    "overwrite",
    "data_dir",
    "minutes",
    "test_sizes",
    "distribute",
    "model_devices",
    "virtual_devices",
)


def parser(description, presets):
    """A parser with the options that all scripts have.

    `presets` is a dict from a name to what its settings are in words; the
    first is the default.
    """
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--model",
        choices=models.NETWORKS,
        default="armin",
        help="the network (default: armin)",
    )
    made.add_argument(
        "--preset",
        choices=presets,
        default=next(iter(presets)),
        help="settings to start from; other options override it. "
        + "; ".join(f"{name}: {words}" for name, words in presets.items())
        + " (default: %(default)s)",
    )
    made.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of weights, data and noise (default: %(default)s)",
    )
    _add_training(made.add_argument_group("training"))
    _add_files(made.add_argument_group("files"))
    models.add_options(made)
    return made


def _add_training(group):
    group.add_argument(
        "--batch-size", type=positive, help="sequences per update"
    )
    group.add_argument(
        "--learning-rate",
        type=above_zero,
        help="initial learning rate, if the preset decays it",
    )
    group.add_argument(
        "--minutes",
        type=above_zero,
        help="stop at the end of the epoch in which this time is exceeded",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits in every run with TensorFlow too, where it is "
        "slower; JAX and torch do that anyway on a CPU",
    )


def _add_files(group):
    group.add_argument(
        "--output",
        type=pathlib.Path,
        help="folder for logs, weights and pictures (default: below runs/)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --output, to the same numbers as if it "
        "had never stopped (with TensorFlow: if it is --deterministic)",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="overwrite an unfinished run in --output",
    )


def parse(made, argv, preset_values):
    """Parse; what is not given comes from the preset.

    `preset_values(arguments)` returns it as a dict, and may look at the
    preset, the model and the like.
    """
    made.set_defaults(**preset_values(made.parse_args(argv)))
    return made.parse_args(argv)


def settings(arguments):
    """Everything that determines the results of a run, as a dict for JSON."""
    found = {
        name: value
        for name, value in vars(arguments).items()
        if name not in _FREE
    }
    return {**found, "backend": keras.backend.backend()}


def default_folder(what, arguments):
    """A folder of its own for each task, network, preset and seed."""
    parts = (what, arguments.model, arguments.preset, f"seed{arguments.seed}")
    return pathlib.Path("runs", "-".join(parts))


def out_of_time(arguments):
    """A condition for `Run.train`: `--minutes` have passed."""

    def stop_when(history):
        return (
            arguments.minutes is not None
            and history[-1]["seconds"] > 60 * arguments.minutes
        )

    return stop_when
