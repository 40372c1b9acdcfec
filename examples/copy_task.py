"""Train ARMIN to copy bit sequences, and draw how it uses its memory.

    python examples/copy_task.py                    the released code's task
    python examples/copy_task.py --max-length 50    the paper's, one longer
    python examples/copy_task.py --max-length 10    a quick look

The network sees a sequence of 1 to 49 random 8-bit vectors and then has to
repeat it from memory. Training ends when new sequences of every length are
repeated without a wrong bit, with discrete argmax reads. Results are in
examples/RESULTS.md.
"""

import argparse
import json
import math
import pathlib
import sys
import time

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np

import keras_armin
from examples.support import answers
from examples.support import sequences
from examples.support import training
from examples.support.command_types import positive
from examples.support.metrics import BitsWrong

WIDTH = 8
SOLVED_LOSS = 0.01
SOLVED_SHARE = 0.99
SEQUENCES_PER_LENGTH = 20
CHECK_BITS_WRONG = 0.25
UPDATES_PER_EPOCH = 100


def build_model(max_length, units, memory_dim, updates, seed):
    """The authors' released cell with annealed relaxed reads: it learns best.

    The memory holds the whole input with both flags, `max_length + 2` rows.
    """
    # From two thirds of the updates on, reads are almost discrete.
    temperature = keras.optimizers.schedules.PolynomialDecay(
        2.0, decay_steps=max(1, updates * 2 // 3), end_learning_rate=0.3
    )
    model = keras.Sequential(
        [
            keras.Input((None, WIDTH + 2)),
            keras_armin.ARMIN(
                units,
                memory_slots=max_length + 2,
                memory_dim=memory_dim,
                addressing="relaxed",
                temperature=temperature,
                state_activation="tanh",
                output_activation=None,
                write_inputs=True,
                write_activation=None,
                noise_scale=1.0,
                recency_addressing=False,
                unit_gate_bias=False,
                learn_initial_state=True,
                return_sequences=True,
                seed=seed,
                name="armin",
            ),
            keras.layers.Dense(WIDTH, name="logits"),
        ]
    )
    learning_rate = keras.optimizers.schedules.CosineDecay(
        1e-3, decay_steps=updates, alpha=0.05
    )
    model.compile(
        keras.optimizers.Adam(learning_rate, global_clipnorm=1.0),
        keras.losses.BinaryCrossentropy(from_logits=True),
        weighted_metrics=[BitsWrong(name="bits_wrong")],
        # XLA takes seconds to compile for each of the many shapes.
        jit_compile=False
        if keras.backend.backend() == "tensorflow"
        else "auto",
    )
    return model


def one_length(batch_size, length, seed):
    """A batch of sequences of one length, as NumPy arrays."""
    task = sequences.copy(width=WIDTH).with_sizes(length=length)
    batch = sequences.one_batch(task, batch_size, seed, step=length)
    return [array.numpy() for array in batch]


def check_every_length(model, max_length, seed):
    """Test new sequences of each length with argmax reads.

    Returns the mean loss per bit and the share of sequences without a wrong
    bit, each length weighted equally.
    """
    losses, right = [], []
    longest = one_length(1, max_length, seed)[0].shape[1]
    for length in range(1, max_length + 1):
        inputs, targets, weights = one_length(
            SEQUENCES_PER_LENGTH, length, seed
        )
        # One shape for all lengths, so that one graph is compiled. The zeros
        # at the end come too late to matter.
        padding = ((0, 0), (0, longest - inputs.shape[1]), (0, 0))
        logits = model.predict_on_batch(np.pad(inputs, padding))
        logits = logits[:, : inputs.shape[1]]
        loss, share = answers.judge(logits, targets, weights)
        losses.append(loss)
        right.append(share)
    return float(np.mean(losses)), float(np.mean(right))


class StopWhenSolved(keras.callbacks.Callback):
    """Checks every length once validation looks good, and stops on success."""

    def __init__(self, max_length, seed):
        super().__init__()
        self.max_length, self.seed = max_length, seed

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_bits_wrong"] > CHECK_BITS_WRONG:
            return
        loss, share = check_every_length(
            self.model, self.max_length, seed=self.seed + 1000 + epoch
        )
        print(f" - argmax loss {loss:.4f}, {share:.1%} of sequences right")
        # Stricter than required, so that other sequences pass too.
        if loss < SOLVED_LOSS / 2 and share > 1 - (1 - SOLVED_SHARE) / 5:
            self.model.stop_training = True


def show_answer(model, length, seed):
    """Print a target and the network's output side by side, as bits."""
    inputs, targets, weights = one_length(1, length, seed)
    logits = model.predict(inputs, verbose=0)
    answers.print_answer(logits, targets, weights)


def draw_memory(model, length, seed, path):
    """Draw what is read and written while one sequence is copied."""
    inputs, _, _ = one_length(1, length, seed)
    trace = keras_armin.trace_memory(model.get_layer("armin"), inputs)
    ax = keras_armin.plot_memory(
        trace, title=f"copying {length} vectors, answer from the dashed line"
    )
    ax.axvline(length + 1.5, color="black", linewidth=1, linestyle="--")
    ax.figure.savefig(path, dpi=120)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sizes = (
        ("--max-length", 49, "vectors in the longest sequence"),
        ("--units", 100, "hidden units"),
        ("--memory-dim", 32, "width of a memory slot"),
        ("--batch-size", 16, "sequences per update"),
    )
    for name, default, meaning in sizes:
        parser.add_argument(
            name,
            type=positive,
            default=default,
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--updates",
        type=positive,
        default=4500,
        help="maximum updates, in steps of 100 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of weights, data and noise (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("runs/copy_task"),
        help="folder for the model, the log and the picture",
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Returns whether the task was solved."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(arguments.seed)
    max_length, seed = arguments.max_length, arguments.seed

    task = sequences.copy(width=WIDTH).with_sizes(length=(1, max_length))
    bands = {"bands": 5, "favour_long": True}
    batches = sequences.batches(task, arguments.batch_size, seed=seed, **bands)
    validation = sequences.batches(task, 32, seed=seed + 1, **bands).take(10)
    model = build_model(
        max_length,
        arguments.units,
        arguments.memory_dim,
        arguments.updates,
        seed,
    )
    model.summary()

    steps = min(UPDATES_PER_EPOCH, arguments.updates)
    started = time.monotonic()
    history = model.fit(
        batches,
        epochs=math.ceil(arguments.updates / steps),
        steps_per_epoch=steps,
        validation_data=validation,
        callbacks=[
            StopWhenSolved(max_length, seed),
            keras.callbacks.CSVLogger(str(arguments.output / "log.csv")),
        ],
        shuffle=False,
        verbose=1 if sys.stdout.isatty() else 2,
    )
    seconds = time.monotonic() - started

    loss, share = check_every_length(model, max_length, seed=seed + 10)
    solved = loss < SOLVED_LOSS and share >= SOLVED_SHARE
    length = min(20, max_length)
    show_answer(model, length, seed + 10)
    draw_memory(model, length, seed + 10, arguments.output / "memory.png")
    model.save(arguments.output / "model.keras")
    result = {
        "task": f"copy 1..{max_length}",
        "solved": solved,
        "argmax_loss": round(loss, 5),
        "sequences_right": round(share, 4),
        "updates": len(history.epoch) * steps,
        "seconds": round(seconds),
        "parameters": training.parameters(model),
        "backend": keras.backend.backend(),
        "seed": seed,
    }
    print(f"\nmodel, log and picture are in {arguments.output}")
    print(json.dumps(result))
    return solved


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
