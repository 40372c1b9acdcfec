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

from examples.support import cli
from examples.support import networks
from examples.support import plotting
from examples.support import runs
from examples.support.cli import positive
from examples.support.data import sequences

SOLVED_LOSS = 0.01
# A task is solved at the first good validation of a window in which at most
# so many are worse.
SOLVED_WINDOW, SOLVED_EXCEPTIONS = 10, 2
# Held-out sequences are the same for every seed and every network.
VALIDATION_SEED, TEST_SEED = 1_000_003, 2_000_003
VALIDATION_BATCHES, TEST_BATCHES = 8, 32

# The paper's table: updates until solved, or the loss after 100,000.
PAPER_MODELS = ("armin", "lstm", "ntm", "dnc", "sam", "tardis", "awta")
PAPER = {
    "copy": (7_600, 0.359, 12_400, 0.429, 0.321, 0.451, 0.410),
    "repeat-copy": (67_800, 0.016, 0.014, 0.053, 0.064, 0.166, 0.297),
    "recall": (0.052, 0.325, 19_600, 0.338, 0.326, 0.330, 0.336),
    "sort-columnwise": (33_400, 37_000, 0.012, 34_400, 78_000, 62_600, 71_400),
}
# Settings in which a run may differ from the paper's.
_UNIMPORTANT = ("seed", "deterministic")

PRESETS = {
    "quick": "short sequences, a few minutes",
    "paper": "batches of 1, RMSprop, up to 100,000 updates",
    "best": "what worked best here",
}
RELEASED = (
    "--units 100 --slots 50 --memory-dim 32 --cell algorithmic --addressing "
    "relaxed --temperature 2 --final-temperature 0.3 --annealing 8000 "
    "--epoch-updates 200 "
)
ADAM = "--optimizer adam --learning-rate 1e-3 --cosine --batch-size 16 "
# A slot for each step of the longest sequence of the copy task, 22 of them:
# with 20 slots the last of ten vectors was never learned.
QUICK = "--updates 2000 --epoch-updates 100 --annealing 1300 --slots 24 "
QUICK_SIZES = {
    "copy": "length=1:10",
    "repeat-copy": "length=1:4 repeats=1:4",
    "recall": "items=2:3",
    "sort": "items=8",
    "sort-columnwise": "items=8",
}
RMSPROP = "--optimizer rmsprop --learning-rate 1e-4 --batch-size 1 "
# The sizes of the other networks. SAB and those after it are not in the
# paper's table; they have as many parameters as ARMIN, except IndRNN, of which
# one layer has few.
HEADS = "--units 120 --slots 128 --memory-dim 20 --learn-initial-state"
PAPER_SIZES = {
    "lstm": "--units 300",
    "ln-lstm": "--units 300",
    "ntm": HEADS,
    "dnc": HEADS,
    "sam": HEADS,
    "tardis": "--units 120 --key-dim 5 --learn-initial-state",
    "awta": "--key-dim 5",
    "sab": "--units 128 --slots 100 --top-k 5",
    "indrnn": "--units 128",
    "rhn": "--units 94",
    "hyper-rhn": "--units 81 --hyper-units 32",
    "nas": "--units 102",
    "fs-lstm": "--units 77 --slow-units 50",
    "hyper-lstm": "--units 120 --hyper-units 32",
    "hm-lstm": "--units 56",
}
BEST = {
    # Matching by content starts without noise, which would hide the match.
    "recall": "--addressing soft --content-addressing --temperature 1 "
    "--final-temperature 0.1 --annealing 10000 --updates 14000",
    # With a slot for each item the memory is full when the answer begins: an
    # item that is read is overwritten, and so crossed off. Telling close
    # priorities apart needs sharp reads from the start; the learning rate of
    # the other tasks would then undo what was learned.
    "sort": "--addressing soft --content-addressing --temperature 0.1 "
    "--final-temperature 0.01 --annealing 16000 --updates 16000 --slots 40 "
    "--batch-size 32 --learning-rate 5e-4",
}


def preset_options(arguments):
    if arguments.preset == "quick":
        sizes = QUICK_SIZES[arguments.task]
        return f"{RELEASED} {ADAM} {QUICK} --bands 2 --sizes {sizes}"
    if arguments.preset == "paper":
        sizes = PAPER_SIZES.get(arguments.model, "")
        return f"{RELEASED} {RMSPROP} --updates 100000 {sizes}"
    best = BEST.get(arguments.task, "")
    return f"{RELEASED} {ADAM} --updates 20000 {best}"


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    cli.add_options(
        parser,
        "task",
        {
            "task": (tuple(sequences.TASKS), "copy", "the task"),
            "bounds": (
                ("released", "paper"),
                "released",
                "sizes of the released code, or one larger as in the paper",
            ),
            "updates": (positive, None, "at most, in whole epochs"),
            "epoch_updates": (positive, None, "updates between validations"),
            "bands": (positive, 4, "bands of sizes, which save padding"),
            "optimizer": (("adam", "rmsprop"), None, "the optimizer"),
            "cosine": (bool, False, "decay the learning rate to a twentieth"),
        },
    )
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="other sizes, such as length=1:20 repeats=5",
    )
    cli.add_run_options(parser, PRESETS)
    networks.add_options(parser)
    arguments = cli.parse(parser, argv, preset_options)
    arguments.epoch_updates = min(arguments.epoch_updates, arguments.updates)
    if arguments.output is None:
        arguments.output = cli.default_folder(arguments.task, arguments)
    return arguments


def paper_figure(arguments):
    """The paper's figure, None unless all settings are the paper's."""
    task, model, variant = arguments.task, arguments.model, arguments.variant
    command = (
        f"--preset paper --task {task} --model {model} --variant {variant}"
    )
    paper = cli.settings(parse_arguments(command.split()))
    ours = cli.settings(arguments)
    same = all(ours[x] == paper[x] for x in paper if x not in _UNIMPORTANT)
    if not (same and networks.is_released(arguments) and task in PAPER):
        return None
    return dict(zip(PAPER_MODELS, PAPER[task])).get(model)


def make_task(arguments):
    task = sequences.TASKS[arguments.task](bounds=arguments.bounds)
    try:
        return task.with_sizes(**dict(map(_parse_size, arguments.sizes)))
    except ValueError as error:
        raise cli.RunError(f"--sizes: {error}") from None


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
    layer = networks.build(arguments, return_sequences=True, name="memory")
    return networks.bit_model(task, layer, make_optimizer(arguments))


def make_optimizer(arguments):
    rate = arguments.learning_rate
    if arguments.cosine:
        rate = keras.optimizers.schedules.CosineDecay(
            rate, decay_steps=arguments.updates, alpha=0.05
        )
    if arguments.optimizer == "adam":
        return keras.optimizers.Adam(rate, global_clipnorm=1.0)
    # Keras adds epsilon under the root, the authors' torch outside it.
    return keras.optimizers.RMSprop(
        rate, rho=0.95, momentum=0.9, epsilon=1e-16, clipvalue=10.0
    )


def held_out(task, arguments, seed, count):
    """Batches of sequences that are not used for training."""
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


def with_argmax_reads(model, task, arguments):
    """The model itself, or a copy if it was trained with soft reads."""
    if arguments.addressing != "soft":
        return model
    # Soft reads have no noise, and so no weight for its scale.
    options = {**vars(arguments), "addressing": "hard", "noise_scale": 0.0}
    copy = build_model(task, argparse.Namespace(**options))
    copy.set_weights(model.get_weights())
    return copy


def test(model, task, arguments):
    """Loss per bit and share of faultless answers on new sequences."""
    batches = held_out(task, arguments, TEST_SEED, TEST_BATCHES)
    return sequences.score(model, batches.as_numpy_iterator())


def main(argv=None):
    """Returns the result line as a dict."""
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    runs.seed_everything(arguments.seed, arguments.deterministic)
    task = make_task(arguments)
    model = build_model(task, arguments)
    model.summary()
    run = runs.Run.of(arguments)

    def solved(history):
        return solved_at(history, arguments.epoch_updates)

    out_of_time = cli.out_of_time(arguments)
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
    tested = with_argmax_reads(model, task, arguments)
    loss, right = test(tested, task, arguments)
    show(tested, task, arguments, run)
    last_losses = [logs["val_loss"] for logs in history[-10:]]
    result = {
        "task": arguments.task,
        "sizes": task.sizes,
        "model": arguments.model,
        "preset": arguments.preset,
        "parameters": networks.parameters(model),
        "solved_at": solved(history),
        "paper": paper_figure(arguments),
        "updates": run.epoch * arguments.epoch_updates,
        "best_validation_loss": run.best_value("val_loss"),
        "last_validation_losses": round(float(np.mean(last_losses)), 5),
        "test_loss": round(loss, 5),
        "test_right": round(right, 4),
        "seconds": round(run.seconds),
        "backend": keras.backend.backend(),
        "seed": arguments.seed,
    }
    run.finish(result)
    return result


def show(model, task, arguments, run):
    """Prints an answer, and draws reads, writes and the learning curve."""
    batch = [x.numpy() for x in sequences.one_batch(task, 1, TEST_SEED)]
    sequences.print_answer(model, batch, rows=20)
    if arguments.model in networks.WITH_MEMORY:
        inputs, _, weights = batch
        plotting.draw_memory(
            model.get_layer("memory"),
            inputs,
            run.folder / "memory.png",
            title=arguments.task,
            answer=int((weights[0] > 0).argmax()),
        )
    plotting.draw_curves(
        {arguments.task: {arguments.model: [run.history]}},
        "val_loss",
        run.folder / "curve.png",
        updates_per_epoch=arguments.epoch_updates,
        log_scale=True,
        target=SOLVED_LOSS,
    )


if __name__ == "__main__":
    with runs.explained_errors():
        main()
