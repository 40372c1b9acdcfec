"""The paper's algorithmic tasks: copy, repeat copy, recall and priority sort.

    python examples/algorithmic.py                          a quick look
    python examples/algorithmic.py --task recall --preset paper
    python examples/algorithmic.py --task recall --preset best
    python examples/algorithmic.py --task copy --preset paper --model lstm

A sequence is shown, then the network has to answer. The paper calls a task
solved when the loss per bit stays below 0.01 nats; here that is measured on
held-out sequences, with argmax reads unless training uses soft reads. The final
test always uses argmax reads. The preset "paper" trains on one sequence at a
time, "best" has the settings that worked best for a task. Results, including
what did not work, are in examples/RESULTS.md.
"""

import argparse
import math
import pathlib
import sys

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np

import keras_armin
from examples.support import answers
from examples.support import command_line
from examples.support import curves
from examples.support import models
from examples.support import sequences
from examples.support import training
from examples.support.command_types import positive
from examples.support.metrics import BitsWrong

SOLVED_LOSS = 0.01
# Window of validations from the first good one on, and how many of them may
# be worse.
SOLVED_WINDOW, SOLVED_EXCEPTIONS = 10, 2
# Held-out sequences are the same for every seed and every network.
VALIDATION_SEED, TEST_SEED = 1_000_003, 2_000_003
VALIDATION_BATCHES, TEST_BATCHES = 8, 32

# The paper's table: updates until solved, or the loss after 100,000.
PAPER = {
    "copy": {
        "armin": 7_600,
        "lstm": 0.359,
        "ntm": 12_400,
        "dnc": 0.429,
        "sam": 0.321,
        "tardis": 0.451,
        "awta": 0.410,
    },
    "repeat-copy": {
        "armin": 67_800,
        "lstm": 0.016,
        "ntm": 0.014,
        "dnc": 0.053,
        "sam": 0.064,
        "tardis": 0.166,
        "awta": 0.297,
    },
    "recall": {
        "armin": 0.052,
        "lstm": 0.325,
        "ntm": 19_600,
        "dnc": 0.338,
        "sam": 0.326,
        "tardis": 0.330,
        "awta": 0.336,
    },
    "sort-columnwise": {
        "armin": 33_400,
        "lstm": 37_000,
        "ntm": 0.012,
        "dnc": 34_400,
        "sam": 78_000,
        "tardis": 62_600,
        "awta": 71_400,
    },
}

PRESETS = {
    "quick": "short sequences, a few minutes",
    "paper": "batches of 1, RMSprop, up to 100,000 updates",
    "best": "what worked best here",
}
RELEASED = {
    "units": 100,
    "slots": 50,
    "memory_dim": 32,
    "cell": "algorithmic",
    "addressing": "relaxed",
    "temperature": 2.0,
    "final_temperature": 0.3,
}
# The sizes of the other networks; SAB is not in the paper's table.
_HEADS = {
    "units": 120,
    "slots": 128,
    "memory_dim": 20,
    "learn_initial_state": True,
}
SIZES = {
    "lstm": {"units": 300},
    "ln-lstm": {"units": 300},
    "ntm": _HEADS,
    "dnc": _HEADS,
    "sam": _HEADS,
    "tardis": {"units": 120, "key_dim": 5, "learn_initial_state": True},
    "awta": {"key_dim": 5},
    "sab": {"units": 128, "slots": 100, "top_k": 5},
}
ADAM = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "cosine": True,
    "batch_size": 16,
}
# Matching by content needs reads without noise at first: noise would hide the
# match.
CONTENT = {
    "addressing": "soft",
    "content_addressing": True,
    "temperature": 1.0,
}
BEST = {
    "recall": {
        **CONTENT,
        "final_temperature": 0.1,
        "annealing": 10_000,
        "updates": 14_000,
    },
    # With a slot for each item the memory is full when the answer begins: an
    # item that is read is overwritten, and so crossed off.
    # Telling close priorities apart needs sharp reads from the start; the
    # learning rate of the other tasks would then undo what was learned.
    "sort": {
        **CONTENT,
        "temperature": 0.1,
        "final_temperature": 0.01,
        "annealing": 16_000,
        "updates": 16_000,
        "slots": 40,
        "batch_size": 32,
        "learning_rate": 5e-4,
    },
}
QUICK_SIZES = {
    "copy": ["length=1:10"],
    "repeat-copy": ["length=1:4", "repeats=1:4"],
    "recall": ["items=2:3"],
    "sort": ["items=8"],
    "sort-columnwise": ["items=8"],
}


def preset_values(arguments):
    if arguments.preset == "quick":
        values = {**RELEASED, **ADAM, "updates": 2_000, "epoch_updates": 100}
        values.update(sizes=QUICK_SIZES[arguments.task], annealing=1_300)
        # A slot for each step of the longest sequence, 22 of them: with 20
        # slots the last vector of ten was never learned.
        values.update(slots=24, bands=2)
    elif arguments.preset == "paper":
        values = {
            **RELEASED,
            "optimizer": "rmsprop",
            "learning_rate": 1e-4,
            "batch_size": 1,
            "updates": 100_000,
            "epoch_updates": 200,
            "annealing": 8_000,
        }
        values.update(SIZES.get(arguments.model, {}))
    else:
        values = {
            **RELEASED,
            **ADAM,
            "updates": 20_000,
            "epoch_updates": 200,
            "annealing": 8_000,
            **BEST.get(arguments.task, {}),
        }
    return values


def parse_arguments(argv):
    parser = command_line.parser(__doc__, PRESETS)
    parser.add_argument(
        "--task", choices=sequences.TASKS, default="copy", help="(%(default)s)"
    )
    parser.add_argument(
        "--bounds",
        choices=("released", "paper"),
        default="released",
        help="sizes of the released code, or one larger as in the paper",
    )
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="other sizes, such as length=1:20 repeats=5",
    )
    parser.add_argument(
        "--test-sizes",
        nargs="*",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="after training, also try these",
    )
    parser.add_argument(
        "--updates", type=positive, help="at most, rounded up to whole epochs"
    )
    parser.add_argument(
        "--epoch-updates", type=positive, help="from validation to validation"
    )
    parser.add_argument(
        "--bands",
        type=positive,
        default=4,
        help="parts into which sizes are cut to save padding (%(default)s)",
    )
    parser.add_argument(
        "--optimizer", choices=("adam", "rmsprop"), help="what updates weights"
    )
    parser.add_argument(
        "--cosine",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the learning rate fall to a twentieth",
    )
    arguments = command_line.parse(parser, argv, preset_values)
    arguments.epoch_updates = min(arguments.epoch_updates, arguments.updates)
    if arguments.output is None:
        arguments.output = command_line.default_folder(
            arguments.task, arguments
        )
    return arguments


def paper_figure(arguments):
    """The paper's entry for these settings, None where it has none."""
    same = models.as_in_the_paper(arguments, preset_values(arguments))
    if arguments.preset != "paper" or arguments.sizes or not same:
        return None
    return PAPER.get(arguments.task, {}).get(arguments.model)


def make_task(arguments, sizes, option="--sizes"):
    try:
        task = sequences.TASKS[arguments.task](bounds=arguments.bounds)
        return task.with_sizes(**dict(map(_parse_size, sizes)))
    except ValueError as error:
        raise training.RunError(f"{option}: {error}") from None


def _parse_size(text):
    name, _, numbers = text.partition("=")
    try:
        low, _, high = numbers.partition(":")
        return name, (int(low), int(high or low))
    except ValueError:
        raise ValueError(
            f"takes NAME=NUMBER or NAME=LOW:HIGH, not {text!r}"
        ) from None


def build_model(task, arguments):
    layer = models.build(arguments, return_sequences=True, name="memory")
    model = keras.Sequential(
        [
            keras.Input((None, task.inputs)),
            layer,
            keras.layers.Dense(task.outputs, name="logits"),
        ]
    )
    model.compile(
        make_optimizer(arguments),
        keras.losses.BinaryCrossentropy(from_logits=True),
        weighted_metrics=[BitsWrong(name="bits_wrong")],
        jit_compile=training.compiled_by_xla(many_shapes=True),
    )
    return model


def make_optimizer(arguments):
    rate = arguments.learning_rate
    if arguments.cosine:
        rate = keras.optimizers.schedules.CosineDecay(
            rate, decay_steps=arguments.updates, alpha=0.05
        )
    if arguments.optimizer == "adam":
        return keras.optimizers.Adam(rate, global_clipnorm=1.0)
    # Epsilon stands under the root here, and beside it in the authors' torch.
    return keras.optimizers.RMSprop(
        rate, rho=0.95, momentum=0.9, epsilon=1e-16, clipvalue=10.0
    )


def held_out(task, arguments, seed, count):
    """Sequences that training does not see, in batches."""
    bands = arguments.bands
    return sequences.batches(task, 32, bands=bands, seed=seed).take(count)


def solved_at(history, epoch_updates):
    """The update at which the task was solved, None if it was not."""
    losses = np.array([logs["val_loss"] for logs in history])
    for start in range(len(losses) - SOLVED_WINDOW + 1):
        window = losses[start : start + SOLVED_WINDOW]
        worse = int((window >= SOLVED_LOSS).sum())
        if window[0] < SOLVED_LOSS and worse <= SOLVED_EXCEPTIONS:
            return (start + 1) * epoch_updates
    return None


def discrete(model, task, arguments):
    """The model with argmax reads; differs from one trained with soft reads."""
    if getattr(arguments, "addressing", None) != "soft":
        return model
    # Soft reads have no noise, and so no weight for its scale.
    discrete_reads = {"addressing": "hard", "noise_scale": 0.0}
    twin = build_model(
        task, argparse.Namespace(**{**vars(arguments), **discrete_reads})
    )
    twin.set_weights(model.get_weights())
    return twin


def test(model, task, arguments):
    """Loss per bit and share of faultless answers on new sequences."""
    losses, right = [], []
    batches = held_out(task, arguments, TEST_SEED, TEST_BATCHES)
    for inputs, targets, weights in batches.as_numpy_iterator():
        logits = model.predict_on_batch(inputs)
        loss, share = answers.judge(logits, targets, weights)
        losses.append(loss)
        right.append(share)
    return float(np.mean(losses)), float(np.mean(right))


def draw_memory(model, inputs, weights, title, path):
    """What is read and written during a sequence; a line at the answer."""
    trace = keras_armin.trace_memory(model.get_layer("memory"), inputs)
    ax = keras_armin.plot_memory(trace, title=title)
    start = int((weights[0] > 0).argmax())
    ax.axvline(start - 0.5, color="black", linewidth=1, linestyle="--")
    ax.figure.savefig(path, dpi=100)


def main(argv=None):
    """Returns the result line as a dict."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    training.seed_everything(arguments.seed, arguments.deterministic)
    task = make_task(arguments, arguments.sizes)
    others = other_tasks(arguments)
    model = build_model(task, arguments)
    model.summary()
    run = training.Run.of(arguments)

    def solved(history):
        return solved_at(history, arguments.epoch_updates) is not None

    out_of_time = command_line.out_of_time(arguments)
    history = run.train(
        model,
        lambda first_step: sequences.batches(
            task,
            arguments.batch_size,
            bands=arguments.bands,
            seed=arguments.seed,
            first_step=first_step,
        ),
        epochs=math.ceil(arguments.updates / arguments.epoch_updates),
        steps_per_epoch=arguments.epoch_updates,
        validation_data=held_out(
            task, arguments, VALIDATION_SEED, VALIDATION_BATCHES
        ),
        monitor="val_loss",
        stop_when=lambda history: solved(history) or out_of_time(history),
    )
    run.restore_best(model)
    reader = discrete(model, task, arguments)
    loss, right = test(reader, task, arguments)
    show(reader, task, arguments, run)
    result = {
        "task": arguments.task,
        "sizes": task.sizes,
        "model": arguments.model,
        "preset": arguments.preset,
        "parameters": training.parameters(model),
        "solved_at": solved_at(history, arguments.epoch_updates),
        "paper": paper_figure(arguments),
        "updates": run.epoch * arguments.epoch_updates,
        "best_validation_loss": run.best_value("val_loss"),
        "last_validation_losses": round(
            float(np.mean([logs["val_loss"] for logs in history[-10:]])), 5
        ),
        "test_loss": round(loss, 5),
        "test_right": round(right, 4),
        **test_others(reader, others, arguments),
        "seconds": round(run.seconds),
        "backend": keras.backend.backend(),
        "seed": arguments.seed,
    }
    run.finish(result)
    return result


def other_tasks(arguments):
    """The task at each of `--test-sizes`."""
    return {
        size: make_task(arguments, [*arguments.sizes, size], "--test-sizes")
        for size in arguments.test_sizes
    }


def test_others(model, tasks, arguments):
    found = {}
    for size, task in tasks.items():
        loss, right = test(model, task, arguments)
        found[size] = {"loss": round(loss, 5), "right": round(right, 4)}
    return {"other_sizes": found} if found else {}


def show(model, task, arguments, run):
    """Show an answer in bits, the reads and writes, and the learning curve."""
    batch = sequences.one_batch(task, 1, TEST_SEED)
    inputs, targets, weights = (array.numpy() for array in batch)
    logits = model.predict_on_batch(inputs)
    answers.print_answer(logits, targets, weights, rows=20)
    if arguments.model in models.WITH_MEMORY:
        path = run.folder / "memory.png"
        draw_memory(model, inputs, weights, arguments.task, path)
    curves.save_panels(
        {arguments.task: {arguments.model: [run.history]}},
        "val_loss",
        run.folder / "curve.png",
        x="updates",
        updates_per_epoch=arguments.epoch_updates,
        log_scale=True,
        target=SOLVED_LOSS,
    )


if __name__ == "__main__":
    with training.explained_errors():
        main()
