"""Show what trained networks store and read back, in the terminal.

    python examples/demo.py
    python examples/demo.py --length 20 --seed 3
    python examples/demo.py --prompt "class Reader"

Loads the models in examples/trained: one copies bit vectors, one recalls which
item followed another, one writes Python. For each it prints the answer and the
slots of the memory that were read on the way. Nothing is trained or downloaded.
"""

import argparse
import os
import pathlib
import sys

if __name__ == "__main__" and os.environ.get("KERAS_BACKEND") == "jax":
    # JAX would spend most of the time on optimising what runs once.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 "
        "--xla_cpu_use_fusion_emitters=false",
    )

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

import keras_armin
from examples.support import trained

ITEM_LENGTH = 3  # vectors in an item of the recall task


# --- copy --------------------------------------------------------------------


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
        print(f"{_text(given)}  {to:10}   {source:9}  {_text(answered)}{wrong}")
    wrong = int((bits != answer).sum())
    print(f"\n{wrong} of {bits.size} bits are wrong.")
    print("What slots hold is learned: here, the vector before the one shown.")
    return wrong


def _text(bits):
    return "".join(map(str, bits))


# --- associative recall ------------------------------------------------------


def recall_input(items, asked):
    """The items, each after a flag, the one asked for, then silence."""
    count, length, width = items.shape
    block = length + 1
    rows = np.zeros((1, (count + 2) * block, width + 2), "float32")
    for number, item in enumerate([*items, items[asked]]):
        start = number * block
        rows[0, start + 1 : start + block, :width] = item
        rows[0, start, width + (number == count)] = 1
    rows[0, (count + 1) * block, width + 1] = 1
    return rows


def show_recall(count, seed):
    """Prints a question about a list with its reads; returns wrong bits."""
    model = trained.load("recall")
    rng = np.random.default_rng(seed)
    items = rng.integers(0, 2, (count, ITEM_LENGTH, 6))
    asked = int(rng.integers(count - 1))
    inputs = recall_input(items, asked)
    answer = model.predict_on_batch(inputs)[0, -ITEM_LENGTH:] > 0
    trace = keras_armin.trace_memory(model.get_layer("memory"), inputs)
    written = trace.write_slots[0, : count * (ITEM_LENGTH + 1)]
    wrong = int((answer != items[asked + 1]).sum())

    print(f"\n{count} items of {ITEM_LENGTH} vectors, one of them asked for:\n")
    print("item                  wrote slots, one at the flag before the item")
    for item, slots in zip(items, written.reshape(count, -1)):
        print(f"{_item(item)}  {_numbers(slots)}")
    read = _numbers(trace.read_slots[0, -ITEM_LENGTH:])
    print(f"\nwhat follows  {_item(items[asked])}?")
    print(f"answer        {_item(answer.astype(int))}  read slots {read}")
    print(f"\n{wrong} of {answer.size} bits are wrong.")
    return wrong


def _item(vectors):
    return " ".join(map(_text, vectors))


def _numbers(slots):
    return " ".join(map(str, slots))


# --- text --------------------------------------------------------------------


def show_text(prompt, length, seed):
    """Prints generated text, below each character the slot read at it."""
    model = trained.load("text")
    given = list(prompt.encode(errors="surrogateescape"))
    ids = given + keras_armin.generate(
        model, given, length, temperature=0.6, seed=seed
    )

    print(f"\n{length} characters after {prompt!r}, and the slots read:\n")
    characters, slots = "", ""
    for code, slot in zip(ids, slots_read(model, ids)):
        characters += chr(code) if 32 <= code < 127 else " "
        slots += str(slot)
        if code == ord("\n"):
            print(f"{characters}\n{slots}")
            characters, slots = "", ""
    print(f"{characters}\n{slots}")


def slots_read(model, ids):
    """The slot read at each token.

    `keras_armin.trace_memory` returns the same. A step model compiles a single
    step, which takes less time than the loop of a long text.
    """
    step = keras_armin.step_model(model, reads=True)
    states, slots = step.initial_states(), []
    for token in ids:
        inputs = [np.array([token], "int32"), *states]
        _, *states, slot = step.predict_on_batch(inputs)
        slots.append(int(slot[0]))
    return slots


# --- command line ------------------------------------------------------------


def _number(name, low, high):
    def convert(text):
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{name} takes {low} to {high}, not {text!r}"
            )
        return int(text)

    return convert


def _prompt(text):
    if not text:
        raise argparse.ArgumentTypeError("takes at least one character")
    return text


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, low, high, default, meaning in (
        ("length", 1, trained.LONGEST, 12, "vectors to copy"),
        ("items", 2, trained.MOST_ITEMS, 4, "items to recall from"),
        ("characters", 1, 5000, 200, "characters to write"),
        ("seed", 0, 2**31 - 1, 1, "seed of what is given and written"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_number(name, low, high),
            metavar=f"{low}..{high}",
            default=default,
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--prompt",
        type=_prompt,
        default="def read(self",
        help="text to continue (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    show_copy(arguments.length, arguments.seed)
    show_recall(arguments.items, arguments.seed)
    show_text(arguments.prompt, arguments.characters, arguments.seed)


if __name__ == "__main__":
    main()
