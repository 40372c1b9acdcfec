"""Show what a trained network stores and reads back, in the terminal.

    python examples/demo.py
    python examples/demo.py --length 20 --seed 3

Loads the model in examples/trained that copies bit vectors, gives it a new
sequence, and prints what it repeats, with the slot that was written while each
vector was shown and the slot that was read while it was repeated. Nothing is
trained or downloaded.
"""

import argparse
import pathlib
import sys

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

import keras_armin
from examples.support import trained


def copy_input(bits):
    """The vectors between two flags, then silence for the answer."""
    length, width = bits.shape
    rows = np.zeros((1, 2 * length + 2, width + 2), "float32")
    rows[0, 1 : length + 1, :width] = bits
    rows[0, 0, width] = rows[0, length + 1, width + 1] = 1
    return rows


def show_copy(length, seed):
    """Prints a copy with its writes and reads; returns the wrong bits."""
    model = trained.load("copy")
    bits = np.random.default_rng(seed).integers(0, 2, (length, 8))
    inputs = copy_input(bits)
    answer = (model.predict_on_batch(inputs)[0, length + 2 :] > 0).astype(int)
    trace = keras_armin.trace_memory(model.get_layer("armin"), inputs)
    written = trace.write_slots[0, 1 : length + 1]
    read = trace.read_slots[0, length + 2 :]

    print(f"A sequence of {length} vectors, copied from memory:\n")
    print("given     wrote slot   read slot  answer")
    for given, to, source, answered in zip(bits, written, read, answer):
        wrong = "" if (given == answered).all() else "  wrong"
        given, answered = ("".join(map(str, x)) for x in (given, answered))
        print(f"{given}  {to:10}   {source:9}  {answered}{wrong}")
    wrong = int((bits != answer).sum())
    print(f"\n{wrong} of {bits.size} bits are wrong.")
    return wrong


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--length",
        type=int,
        choices=range(1, trained.LONGEST + 1),
        metavar=f"1..{trained.LONGEST}",
        default=12,
        help="vectors to copy (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the sequence (default: 1)"
    )
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    show_copy(arguments.length, arguments.seed)


if __name__ == "__main__":
    main()
