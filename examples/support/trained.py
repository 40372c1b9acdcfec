"""The models in examples/trained: how their files are made and measured.

    python -m examples.support.trained ship copy runs/copy_task
    python -m examples.support.trained measure copy

`ship` takes the name of a model and the folder of the run that trained it, and
writes the model without its optimizer, uncompiled: a file should not decide how
other backends compile it. `measure` prints the figures of the model card.
"""

import argparse
import json
import pathlib

import keras

import keras_armin  # noqa: F401, registers the layers

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "trained"
LONGEST = 49  # vectors in the longest sequence to copy
SEED = 11  # of the sequences that are measured, others than in training


def load(name):
    """A model of the folder, not compiled."""
    return keras.models.load_model(FOLDER / f"{name}.keras", compile=False)


# --- figures -----------------------------------------------------------------


def copy_figures(model, per_length=20):
    """Loss per bit and share of faultless copies, lengths 1 to 49."""
    from examples import copy_task

    loss, share = copy_task.check_every_length(model, LONGEST, SEED, per_length)
    return {"loss": loss, "right": share}


FIGURES = {"copy": copy_figures}


# --- files -------------------------------------------------------------------


def copy_model(folder):
    return keras.models.load_model(folder / "model.keras", compile=False)


MODELS = {"copy": copy_model}


def ship(name, run):
    """Writes the model that a run left in its folder."""
    MODELS[name](pathlib.Path(run)).save(FOLDER / f"{name}.keras")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shipping = commands.add_parser("ship", help="write a file from a run")
    shipping.add_argument("name", choices=list(MODELS))
    shipping.add_argument("run", type=pathlib.Path, help="folder of the run")
    measuring = commands.add_parser("measure", help="print the figures")
    measuring.add_argument("name", choices=list(FIGURES))
    arguments = parser.parse_args(argv)
    if arguments.command == "ship":
        ship(arguments.name, arguments.run)
    else:
        print(json.dumps(FIGURES[arguments.name](load(arguments.name))))


if __name__ == "__main__":
    main()
