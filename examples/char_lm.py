"""Character language models: ARMIN compared with an LSTM.

    python examples/char_lm.py                          a quick look
    python examples/char_lm.py --model ln-lstm          the same, an LSTM
    python examples/char_lm.py --preset ptb-small       Penn Treebank
    python examples/char_lm.py --preset paper-ptb       the paper's network
    python examples/char_lm.py --export written         for serve_char_lm.py

The network reads a text character by character and predicts the next one. Its
state, memory included, is carried from one piece of the text to the next;
gradients are truncated after `--steps` characters. The script reports bits per
character on held-out text, generates a sample, and draws the learning curve and
the slots that were read.

The quick look trains on the source code of Python's standard library and needs
no download. The paper's presets have its sizes and are meant for an
accelerator; they have not been run to the end here. Results are in
examples/RESULTS.md.

A run ends after `--updates`, the last tenth of which use a tenth of the
learning rate. A run that `--minutes` ends earlier skips that phase.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time
import zlib

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np
from keras import ops

import keras_armin
from examples.support import command_line
from examples.support import distribution
from examples.support import exporting
from examples.support import models
from examples.support import text
from examples.support import text_plots
from examples.support import training
from examples.support.command_types import at_least_zero
from examples.support.command_types import positive
from examples.support.command_types import rate
from examples.support.command_types import zero_or_more

# Global norm for gradients of a loss summed over time. The loss here is a mean:
# see `build_model`.
CLIP = 1.0
TEST_STEPS = 1000
PICTURE_CHARACTERS = 120

PRESETS = {
    "quick": "three minutes on two cores",
    "ptb-small": "Penn Treebank, 0.77 million parameters",
    "paper-ptb": "Penn Treebank, the paper's largest network",
    "paper-light": "Penn Treebank, the paper's light network and setting",
    "paper-enwik8": "enwik8, two layers, as in the paper",
}
_COMMON = {"layer_norm": True, "learning_rate": 2e-3, "layers": 1}
_SETTINGS = {
    "quick": {
        "data": "stdlib",
        "units": 100,
        "slots": 10,
        "steps": 50,
        "batch_size": 32,
        "updates": 600,
        "epoch_updates": 100,
        "validation_chars": 50_000,
        "test_chars": 20_000,
        "zoneout": 0.0,
    },
    "ptb-small": {
        "data": "ptb",
        "units": 200,
        "slots": 10,
        "steps": 150,
        "batch_size": 32,
        "updates": 10_000,
        "epoch_updates": 200,
        "validation_chars": 100_000,
        "zoneout": 0.1,
        "zoneout_hidden": 0.05,
    },
    "paper-ptb": {
        "data": "ptb",
        "units": 800,
        "slots": 20,
        "steps": 150,
        "batch_size": 128,
        "updates": 53_000,  # 200 passes
        "epoch_updates": 265,  # a pass
        "zoneout": 0.3,
        "zoneout_hidden": 0.1,
    },
    "paper-light": {
        "data": "ptb",
        "units": 500,
        "slots": 5,
        "steps": 50,
        "batch_size": 384,
        "updates": 53_000,  # 200 passes
        "epoch_updates": 265,  # a pass
        "zoneout": 0.3,
        "zoneout_hidden": 0.1,
    },
    "paper-enwik8": {
        "data": "enwik8",
        "layers": 2,
        "embedding": 256,
        "units": 800,
        "slots": 20,
        "steps": 150,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "updates": 164_000,  # 35 passes
        "epoch_updates": 1000,
        "zoneout": 0.3,
        "zoneout_hidden": 0.05,
    },
}
# Where the LSTM has other settings. Except in the paper's own comparisons its
# units are those that give it ARMIN's number of parameters.
_LSTM_SETTINGS = {
    "quick": {"units": 186},
    "ptb-small": {"units": 372},
    "paper-ptb": {"units": 1024, "zoneout": 0.5},
    "paper-light": {
        "units": 1024,
        "batch_size": 128,
        "updates": 159_400,  # 200 passes
        "epoch_updates": 797,  # a pass
        "zoneout": 0.5,
    },
    "paper-enwik8": {"units": 1492, "zoneout": 0.3},
}
# Likewise for the paper's other networks, in its first table.
_OTHER_SETTINGS = {
    "ntm": {"slots": 50},
    "tardis": {"units": 1000, "key_dim": 100},
    "awta": {"key_dim": 100},
}
# Bits per character on the test text, as the paper has them.
_PAPER_BPC = {
    ("paper-ptb", "armin"): 1.198,
    ("paper-ptb", "ln-lstm"): 1.24,
    ("paper-ptb", "awta"): 1.223,
    ("paper-ptb", "tardis"): 1.268,
    ("paper-ptb", "dnc"): 1.390,
    ("paper-ptb", "ntm"): 1.535,
    ("paper-light", "armin"): 1.238,
    ("paper-light", "ln-lstm"): 1.39,
    ("paper-enwik8", "armin"): 1.331,
}
# Settings that have to be the paper's for its figure to apply.
_COMPARED = ("data", "units", "slots", "layers", "steps", "batch_size")
# Options that matter only after training.
_AFTERWARDS = (
    "test_chars",
    "sample",
    "sample_temperature",
    "sample_top_k",
    "prompt",
    "export",
    "export_format",
)


def preset_values(arguments):
    values = {**_COMMON, **_SETTINGS[arguments.preset]}
    if arguments.model == "ln-lstm":
        values.update(_LSTM_SETTINGS[arguments.preset])
    elif arguments.preset == "paper-ptb":
        values.update(_OTHER_SETTINGS.get(arguments.model, {}))
    return values


def paper_bpc(arguments):
    """The paper's figure for these settings, None where it has none."""
    values = preset_values(arguments)
    if any(values[name] != getattr(arguments, name) for name in _COMPARED):
        return None
    released = arguments.variant == "released"
    if arguments.model in models.WITH_VARIANTS and not released:
        return None
    return _PAPER_BPC.get((arguments.preset, arguments.model))


@keras.saving.register_keras_serializable(package="keras_armin_examples")
class BitsPerCharacter(keras.metrics.Mean):
    """Mean cross-entropy of the next character, in bits."""

    def __init__(self, name="bpc", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, targets, logits, sample_weight=None):
        nats = ops.sparse_categorical_crossentropy(
            targets, logits, from_logits=True
        )
        return super().update_state(nats / math.log(2), sample_weight)


def build_model(arguments, symbols, batch_size, updates):
    """Logits of the next character at each character, state carried.

    Between two layers a projection keeps the second one's inputs as narrow as
    the first one's.
    """
    ids = keras.Input(batch_shape=(batch_size, None), dtype="int32", name="ids")
    reset = keras.Input(batch_shape=(batch_size,), dtype="bool", name="reset")
    x = keras.layers.Embedding(
        symbols,
        arguments.embedding,
        embeddings_initializer="orthogonal",
        name="inputs_1",
    )(ids)
    for number in range(1, arguments.layers + 1):
        if number > 1:
            x = keras.layers.Dense(
                arguments.embedding, name=f"inputs_{number}"
            )(x)
        x = _dropout(arguments, number)(x)
        x = _recurrent_layer(arguments, number)(x, reset=reset)
    x = _dropout(arguments, arguments.layers + 1)(x)
    logits = keras.layers.Dense(symbols, name="logits")(x)
    model = keras.Model({"ids": ids, "reset": reset}, logits)
    model.compile(
        keras.optimizers.Adam(
            _learning_rate(arguments, updates),
            epsilon=1e-8,
            global_clipnorm=CLIP / arguments.steps,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[BitsPerCharacter()],
    )
    return model


def _learning_rate(arguments, updates):
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [updates - updates // 10],
        [arguments.learning_rate, 0.1 * arguments.learning_rate],
    )


def _recurrent_layer(arguments, number):
    # Layers with one seed would have the same noise.
    options = argparse.Namespace(**vars(arguments))
    options.seed += 1000 * number
    return models.build(
        options, stateful=True, return_sequences=True, name=f"layer_{number}"
    )


def _dropout(arguments, number):
    return keras.layers.Dropout(
        arguments.dropout, seed=arguments.seed + 1000 * number + 500
    )


class Speed(keras.callbacks.Callback):
    """Logs the milliseconds an update took, validation not counted."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates
        self._started = self._ended = None

    def on_epoch_begin(self, epoch, logs=None):
        self._started, self._ended = time.perf_counter(), None

    def on_test_begin(self, logs=None):
        self._ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = (self._ended or time.perf_counter()) - self._started
        logs["ms_per_update"] = 1000 * seconds / self.updates


def train(run, model, corpus, arguments, sections, updates):
    """Train in sections of `updates`, each of which ends with a validation."""
    batch_size, steps = arguments.batch_size, arguments.steps
    valid = corpus.valid[: arguments.validation_chars]
    return run.train(
        model,
        lambda step: text.pipeline(corpus.train, batch_size, steps, step),
        epochs=sections,
        steps_per_epoch=updates,
        validation_data=text.one_pass(valid, batch_size, steps),
        monitor="val_bpc",
        stop_when=command_line.out_of_time(arguments),
        callbacks=[keras_armin.callbacks.ValidationState(), Speed(updates)],
    )


def single_lane(model, arguments, symbols):
    """The same network with a batch size of 1."""
    single = build_model(arguments, symbols, batch_size=1, updates=1)
    single.set_weights(model.get_weights())
    return single


def evaluate(single, ids):
    """Bits per character of a whole text, read from its beginning."""
    steps = min(TEST_STEPS, len(ids) - 1)
    print(f"\ntest on {len(ids) - 1:,} characters")
    found = single.evaluate(
        text.to_the_end(ids, steps),
        verbose=1 if sys.stdout.isatty() else 2,
        return_dict=True,
    )
    return found["bpc"]


def feed(single, ids, reset=False):
    """Logits after each of these characters."""
    logits = single.predict_on_batch(
        {"ids": np.array([ids], "int32"), "reset": np.array([reset])}
    )
    return np.asarray(logits[0], "float64")


def export(model, corpus, arguments):
    exporting.export(
        model, corpus.vocabulary, arguments.export, arguments.export_format
    )
    print(
        f"\nexported; to try it, run: python "
        f"examples/serve_char_lm.py --model {arguments.export}"
    )


def draw_reads(single, corpus, path):
    """Draw the slots read in the test text, once the memory is full."""
    known = min(TEST_STEPS, len(corpus.test) // 2)
    shown = corpus.test[known : known + PICTURE_CHARACTERS]
    feed(single, corpus.test[:known], reset=True)
    inputs = {"ids": np.array([shown], "int32"), "reset": np.array([False])}
    traces = []
    # In this order: a layer's inputs come from the layer below, which moves
    # on while it makes them.
    for layer in memory_layers(single):
        below = single.get_layer(layer.name.replace("layer", "inputs"))
        sequences = keras.Model(single.input, below.output)(inputs)
        traces.append(keras_armin.trace_memory(layer, sequences))
    text_plots.draw_reads(traces, [corpus.decode([i]) for i in shown], path)


def memory_layers(model):
    return [
        layer
        for layer in model.layers
        if getattr(getattr(layer, "cell", None), "memory_slots", None)
    ]


def parse_arguments(argv):
    parser = command_line.parser(__doc__, PRESETS)
    data = parser.add_argument_group("text")
    data.add_argument(
        "--data",
        help=f"{', '.join(text.CORPORA)} or the path of a text file",
    )
    data.add_argument(
        "--data-dir",
        type=pathlib.Path,
        default=pathlib.Path("runs/data"),
        help="where ptb and enwik8 are, or are downloaded to (default: "
        "%(default)s)",
    )
    data.add_argument(
        "--validation-chars",
        type=positive,
        help="number of characters to validate on (default: all)",
    )
    data.add_argument(
        "--test-chars",
        type=positive,
        help="number of characters to test on (default: all)",
    )
    training_options = parser.add_argument_group("training on text")
    training_options.add_argument(
        "--steps",
        type=positive,
        help="characters after which gradients are truncated",
    )
    training_options.add_argument(
        "--updates", type=positive, help="updates in all"
    )
    training_options.add_argument(
        "--epoch-updates",
        type=positive,
        help="updates between validations; the run is saved after each",
    )
    network = parser.add_argument_group("network for text")
    network.add_argument(
        "--layers",
        type=int,
        choices=(1, 2),
        help="number of stacked recurrent layers",
    )
    network.add_argument(
        "--embedding",
        type=positive,
        default=128,
        help="size of the character embedding (default: %(default)s)",
    )
    network.add_argument(
        "--dropout",
        type=rate,
        default=0.0,
        help="dropout rate before and after each recurrent layer "
        "(default: %(default)s)",
    )
    sample = parser.add_argument_group("generated text")
    sample.add_argument(
        "--sample",
        type=at_least_zero,
        default=300,
        help="characters to generate, 0 for none (default: %(default)s)",
    )
    sample.add_argument(
        "--sample-temperature",
        type=zero_or_more,
        default=0.8,
        help="sampling temperature; 0 takes the likeliest (default: "
        "%(default)s)",
    )
    sample.add_argument(
        "--sample-top-k",
        type=positive,
        help="sample from this many likeliest characters (default: all)",
    )
    sample.add_argument(
        "--prompt",
        help="text to continue (default: the start of the test text)",
    )
    _add_export(parser.add_argument_group("export"))
    distribution.add_options(parser)
    return command_line.parse(parser, argv, preset_values)


def _add_export(group):
    group.add_argument(
        "--export",
        type=pathlib.Path,
        metavar="FOLDER",
        help="export the trained network for examples/serve_char_lm.py; with "
        "--resume also that of a complete run",
    )
    group.add_argument(
        "--export-format",
        choices=exporting.FORMATS,
        default=exporting.FORMATS[0],
        help="(default: %(default)s)",
    )


def main(argv=None):
    arguments = parse_arguments(argv)
    if arguments.model == "lstm":
        raise training.RunError(
            "--model lstm cannot be told when a text restarts. The same "
            "network that can is --model ln-lstm --no-layer-norm."
        )
    if arguments.export:
        exporting.check_tools(arguments.export_format)
    with distribution.start(arguments) as engine:
        run_on(engine, arguments)


def run_on(engine, arguments):
    matplotlib.use("Agg")
    training.seed_everything(arguments.seed, arguments.deterministic)
    corpus = load_text(arguments)
    prompt = corpus.encode((arguments.prompt or "").encode(), "--prompt")
    updates = min(arguments.epoch_updates, arguments.updates)
    sections = math.ceil(arguments.updates / updates)
    run = training.Run(
        arguments.output
        or command_line.default_folder(
            f"char_lm-{pathlib.Path(arguments.data).stem}", arguments
        ),
        run_settings(arguments, corpus),
        resume=arguments.resume,
        overwrite=arguments.overwrite,
        engine=engine,
    )

    def build(batch_size):
        symbols = len(corpus.vocabulary)
        return build_model(arguments, symbols, batch_size, sections * updates)

    with engine.scope():
        model = build(engine.samples(arguments.batch_size))
    engine.prepare(model)
    model.summary()
    history = train(run, model, corpus, arguments, sections, updates)
    model = engine.alone(model, lambda: build(arguments.batch_size))
    if model is None:  # only the chief continues
        return
    run.restore_best(model)
    if arguments.export:
        export(model, corpus, arguments)
    text_plots.draw_curve(history, updates, run.folder / "curve.png")
    show(run, model, corpus, prompt, arguments, updates)


def load_text(arguments):
    corpus = text.load(arguments.data, arguments.data_dir)
    sizes = arguments.batch_size, arguments.steps
    text.lanes(corpus.train, *sizes, what="The training text")
    valid = corpus.valid[: arguments.validation_chars]
    text.lanes(valid, *sizes, what="The validation text")
    print(
        f"{arguments.data}: {len(corpus.train):,} characters to train on, "
        f"{len(corpus.valid):,} to validate, {len(corpus.test):,} to test; "
        f"{len(corpus.vocabulary)} symbols; "
        f"{text.chunks(corpus.train, *sizes):,} updates a pass"
    )
    return corpus


def show(run, model, corpus, prompt, arguments, updates):
    """Test the network, and let it generate text."""
    single = single_lane(model, arguments, len(corpus.vocabulary))
    tested = corpus.test[: arguments.test_chars and arguments.test_chars + 1]
    test_bpc = evaluate(single, tested)
    if memory_layers(single):
        draw_reads(single, corpus, run.folder / "reads.png")
    show_sample(single, corpus, prompt, arguments)
    ms_per_update = statistics.median(
        # The first includes compilation.
        [logs["ms_per_update"] for logs in run.history[1:] or run.history]
    )
    run.finish(
        {
            "task": "character language model",
            "data": arguments.data,
            "preset": arguments.preset,
            "model": arguments.model,
            "parameters": training.parameters(model),
            "units": arguments.units,
            "slots": arguments.slots if memory_layers(model) else None,
            "layers": arguments.layers,
            "steps": arguments.steps,
            "batch": arguments.batch_size,
            "updates": run.epoch * updates,
            "valid_bpc": run.best_value("val_bpc"),
            "test_bpc": round(test_bpc, 4),
            "paper_bpc": paper_bpc(arguments),
            "test_characters": len(tested) - 1,
            "seconds": round(run.seconds),
            "ms_per_update": round(ms_per_update, 1),
            "characters_per_second": round(
                1000 * arguments.batch_size * arguments.steps / ms_per_update
            ),
            "backend": keras.backend.backend(),
            "seed": arguments.seed,
        }
    )


def run_settings(arguments, corpus):
    """Everything that determines the results of a run, the text included."""
    settings = command_line.settings(arguments)
    for name in _AFTERWARDS:
        del settings[name]
    return {**settings, "text": f"{zlib.crc32(corpus.train):08x}"}


def show_sample(single, corpus, prompt, arguments):
    if not arguments.sample:
        return
    if len(prompt) == 0:
        prompt = corpus.test[:100]
    written = keras_armin.generate(
        single,
        prompt,
        arguments.sample,
        arguments.sample_temperature,
        arguments.sample_top_k,
        arguments.seed,
    )
    print("\nwritten by the network, from the bar on:\n")
    print(f"{corpus.decode(prompt)}|{corpus.decode(written)}")


if __name__ == "__main__":
    with training.explained_errors():
        main()
