"""Train ARMIN to copy bit sequences, and draw how it uses its memory.

    python examples/copy_task.py                    the released code's task
    python examples/copy_task.py --max-length 50    the paper's, one longer
    python examples/copy_task.py --max-length 10    a quick look

The network sees a sequence of 1 to 49 random 8-bit vectors and then has to
repeat it from memory. Training ends when new sequences of every length are
repeated without a wrong bit, with discrete argmax reads. Results are in
examples/RESULTS.md.
"""

import json
import math
import pathlib
import sys

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np

import keras_armin
from examples.support import cli
from examples.support import networks
from examples.support import plotting
from examples.support import runs
from examples.support.data import sequences

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
    layer = keras_armin.ARMIN(
        units,
        memory_slots=max_length + 2,
        memory_dim=memory_dim,
        addressing="relaxed",
        # From two thirds of the updates on, reads are almost discrete.
        temperature=networks.annealed(2.0, 0.3, max(1, updates * 2 // 3)),
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
    )
    learning_rate = keras.optimizers.schedules.CosineDecay(
        1e-3, decay_steps=updates, alpha=0.05
    )
    optimizer = keras.optimizers.Adam(learning_rate, global_clipnorm=1.0)
    return networks.bit_model(sequences.copy(width=WIDTH), layer, optimizer)


def one_length(batch_size, length, seed):
    """A batch of sequences of one length, as NumPy arrays."""
    task = sequences.copy(width=WIDTH).with_sizes(length=length)
    batch = sequences.one_batch(task, batch_size, seed, step=length)
    return [array.numpy() for array in batch]


def batches(max_length, batch_size, seed, bands=5, first_step=0):
    """An endless dataset of sequences of all lengths, more often long ones."""
    return sequences.batches(
        sequences.copy(width=WIDTH).with_sizes(length=(1, max_length)),
        batch_size,
        bands=bands,
        favour_long=True,
        seed=seed,
        first_step=first_step,
    )


def check_every_length(
    model, max_length, seed, per_length=SEQUENCES_PER_LENGTH
):
    """Tests new sequences of each length with argmax reads.

    Returns the mean loss per bit and the share of sequences without a wrong
    bit. All lengths have equal weight.
    """
    longest = one_length(1, max_length, seed)[0].shape[1]

    def padded(batch):
        # One shape for all lengths, so that one graph is compiled.
        steps = batch[0].shape[1]
        inputs, targets, weights = (
            np.pad(x, [(0, 0), (0, longest - steps), (0, 0)][: x.ndim])
            for x in batch
        )
        return inputs, targets, weights * (longest / steps)

    return sequences.score(
        model,
        (
            padded(one_length(per_length, length, seed))
            for length in range(1, max_length + 1)
        ),
    )


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
    """Prints a target and the network's output side by side, as bits."""
    sequences.print_answer(model, one_length(1, length, seed))


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    cli.add_options(
        parser,
        "settings",
        {
            "max_length": (cli.positive, 49, "vectors in the longest sequence"),
            "units": (cli.positive, 100, "hidden units"),
            "memory_dim": (cli.positive, 32, "width of a memory slot"),
            "batch_size": (cli.positive, 16, "sequences per update"),
            "updates": (cli.positive, 4500, "at most, in steps of 100"),
            "seed": (int, 1, "seed of weights, data and noise"),
            "output": (
                pathlib.Path,
                pathlib.Path("runs/copy_task"),
                "folder for the model, the log and the picture",
            ),
        },
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Returns whether the task was solved."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    max_length, seed = arguments.max_length, arguments.seed
    updates = arguments.updates
    runs.seed_everything(seed)

    model = build_model(
        max_length, arguments.units, arguments.memory_dim, updates, seed
    )
    model.summary()
    run = runs.Run(arguments.output, cli.settings(arguments), overwrite=True)
    steps = min(UPDATES_PER_EPOCH, updates)
    run.train(
        model,
        lambda first_step: batches(
            max_length, arguments.batch_size, seed, first_step=first_step
        ),
        epochs=math.ceil(updates / steps),
        steps_per_epoch=steps,
        validation_data=batches(max_length, 32, seed + 1).take(10),
        monitor="val_loss",
        callbacks=[StopWhenSolved(max_length, seed)],
    )

    loss, share = check_every_length(model, max_length, seed=seed + 10)
    solved = loss < SOLVED_LOSS and share >= SOLVED_SHARE
    length = min(20, max_length)
    show_answer(model, length, seed + 10)
    plotting.draw_memory(
        model.get_layer("armin"),
        one_length(1, length, seed + 10)[0],
        arguments.output / "memory.png",
        title=f"copying {length} vectors, answer from the dashed line",
        answer=length + 2,
    )
    model.save(arguments.output / "model.keras")
    result = {
        "task": f"copy 1..{max_length}",
        "solved": solved,
        "argmax_loss": round(loss, 5),
        "sequences_right": round(share, 4),
        "updates": run.epoch * steps,
        "seconds": round(run.seconds),
        "parameters": networks.parameters(model),
        "backend": keras.backend.backend(),
        "seed": seed,
    }
    print(f"\nmodel, log and picture are in {arguments.output}")
    print(json.dumps(result))
    return solved


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
