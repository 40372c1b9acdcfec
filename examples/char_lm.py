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
no download. The paper's presets are meant for an accelerator and have not been
run to the end here. The last tenth of `--updates` uses a tenth of the learning
rate; a run that `--minutes` ends earlier skips it. Results are in
examples/RESULTS.md.
"""

import math
import pathlib
import statistics
import sys
import zlib

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import matplotlib
import numpy as np

import keras_armin
from examples.support import cli
from examples.support import distribution
from examples.support import exporting
from examples.support import networks
from examples.support import plotting
from examples.support import runs
from examples.support.cli import positive
from examples.support.data import text

# Global norm for gradients of a loss summed over time. The loss here is a mean:
# see `build_model`.
CLIP = 1.0
TEST_STEPS = 1000
PICTURE_CHARACTERS = 120

PRESETS = {
    "quick": "three minutes on two cores",
    "library": "the model in examples/trained, 24 minutes on a core",
    "ptb-small": "Penn Treebank, 0.77 million parameters",
    "paper-ptb": "Penn Treebank, the paper's largest network",
    "paper-light": "Penn Treebank, the paper's light network and setting",
    "paper-enwik8": "enwik8, two layers, as in the paper",
}
_COMMON = "--layer-norm --learning-rate 2e-3 --layers 1"
# 200 passes, with a validation after each.
_PAPER_PTB = (
    "--data ptb --updates 53000 --epoch-updates 265 --zoneout 0.3 "
    "--zoneout-hidden 0.1"
)
_SETTINGS = {
    "quick": "--data stdlib --units 100 --slots 10 --steps 50 --batch-size 32 "
    "--updates 600 --epoch-updates 100 --validation-chars 50000 "
    "--test-chars 20000",
    # The defaults of `keras_armin.ARMIN`, and a trained initial state.
    "library": "--data stdlib --cell long --units 128 --memory-dim 64 "
    "--slots 10 --noise-scale 0 --recency-addressing --unit-gate-bias "
    "--embedding 32 --steps 50 --batch-size 32 --updates 7000 "
    "--epoch-updates 500 --validation-chars 50000 --test-chars 20000",
    "ptb-small": "--data ptb --units 200 --slots 10 --steps 150 "
    "--batch-size 32 --updates 10000 --epoch-updates 200 "
    "--validation-chars 100000 --zoneout 0.1 --zoneout-hidden 0.05",
    "paper-ptb": f"{_PAPER_PTB} --units 800 --slots 20 --steps 150 "
    "--batch-size 128",
    "paper-light": f"{_PAPER_PTB} --units 500 --slots 5 --steps 50 "
    "--batch-size 384",
    # 35 passes.
    "paper-enwik8": "--data enwik8 --layers 2 --embedding 256 --units 800 "
    "--slots 20 --steps 150 --batch-size 128 --learning-rate 1e-3 "
    "--updates 164000 --epoch-updates 1000 --zoneout 0.3 "
    "--zoneout-hidden 0.05",
}
# Settings of other networks. Except in the paper's own comparisons, they have
# as many parameters as ARMIN.
_OTHER_SETTINGS = {
    ("quick", "ln-lstm"): "--units 186",
    ("library", "ln-lstm"): "--units 198",
    ("ptb-small", "ln-lstm"): "--units 372",
    ("ptb-small", "ntm"): "--units 227",
    ("ptb-small", "dnc"): "--units 228",
    ("ptb-small", "sam"): "--units 247",
    ("ptb-small", "tardis"): "--units 248",
    ("ptb-small", "awta"): "--units 196",
    ("ptb-small", "sab"): "--units 349",
    # Without `--max-length`: the state is carried through the whole text.
    ("ptb-small", "indrnn"): "--units 372 --layers 6 --residual",
    ("ptb-small", "rhn"): "--units 261",
    ("ptb-small", "hyper-rhn"): "--units 250 --hyper-units 32",
    ("ptb-small", "nas"): "--units 248",
    ("ptb-small", "fs-lstm"): "--units 227 --slow-units 100",
    ("ptb-small", "hyper-lstm"): "--units 327 --hyper-units 64",
    ("ptb-small", "hm-lstm"): "--units 153 --annealing 5000",
    ("paper-ptb", "ln-lstm"): "--units 1024 --zoneout 0.5",
    ("paper-light", "ln-lstm"): "--units 1024 --batch-size 128 "
    "--updates 159400 --epoch-updates 797 --zoneout 0.5",
    ("paper-enwik8", "ln-lstm"): "--units 1492 --zoneout 0.3",
    ("paper-ptb", "ntm"): "--slots 50",
    ("paper-ptb", "tardis"): "--units 1000 --key-dim 100",
    ("paper-ptb", "awta"): "--key-dim 100",
    # Sizes of the publications; of NASCell there is only a number of
    # parameters, 16.28 million.
    ("paper-ptb", "hm-lstm"): "--units 512 --annealing 26500",
    ("paper-ptb", "hyper-lstm"): "--units 1000 --layers 2",
    ("paper-ptb", "nas"): "--units 1360 --no-layer-norm",
    ("paper-ptb", "rhn"): "--units 1000 --depth 7 --no-layer-norm",
    ("paper-ptb", "hyper-rhn"): "--units 1000 --depth 7 --no-layer-norm",
    # IndRNN-21; 200 passes.
    ("paper-ptb", "indrnn"): "--layers 21 --residual --units 2000 --steps 50 "
    "--learning-rate 2e-4 --updates 159400 "
    "--epoch-updates 797",
    ("paper-ptb", "fs-lstm"): "--units 700 --slow-units 400 --zoneout 0.5",
}
# Bits per character on the test text in the paper.
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
    # As the paper quotes them.
    ("paper-ptb", "hm-lstm"): 1.24,
    ("paper-ptb", "hyper-lstm"): 1.219,
    ("paper-ptb", "nas"): 1.214,
    ("paper-ptb", "hyper-rhn"): 1.19,
    ("paper-ptb", "fs-lstm"): 1.19,
    ("paper-ptb", "indrnn"): 1.21,
}
# Settings that have to be the paper's for its figure to apply.
_COMPARED = ("data", "units", "slots", "layers", "steps", "batch_size")


def preset_options(arguments):
    preset, model = arguments.preset, arguments.model
    other = _OTHER_SETTINGS.get((preset, model), "")
    return f"{_COMMON} {_SETTINGS[preset]} {other}"


def paper_bpc(arguments):
    """The paper's figure for these settings, None where it has none."""
    preset, model = arguments.preset, arguments.model
    paper = parse_arguments(["--preset", preset, "--model", model])
    same = all(getattr(arguments, x) == getattr(paper, x) for x in _COMPARED)
    if not (same and networks.is_released(arguments)):
        return None
    return _PAPER_BPC.get((preset, model))


def build_model(arguments, symbols, batch_size, updates):
    """Predicts the next character at each character, and carries its state.

    A projection between two layers makes the inputs of the second one as
    narrow as those of the first; with `--residual` there is none, and each
    layer adds to what enters it.
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
        below = x
        if number > 1:
            x = between(arguments, name=f"inputs_{number}")(x)
        x = networks.build(
            arguments,
            # Layers with the same seed would have the same noise.
            seed=arguments.seed + 1000 * number,
            stateful=True,
            return_sequences=True,
            name=f"layer_{number}",
        )(x, reset=reset)
        if number > 1 and arguments.residual:
            x = keras.layers.Add(name=f"sum_{number}")([below, x])
    logits = keras.layers.Dense(symbols, name="logits")(x)
    model = keras.Model({"ids": ids, "reset": reset}, logits)
    learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay(
        [updates - updates // 10],
        [arguments.learning_rate, 0.1 * arguments.learning_rate],
    )
    clip = CLIP / arguments.steps
    model.compile(
        keras.optimizers.Adam(
            learning_rate, epsilon=1e-8, global_clipnorm=clip
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[networks.BitsPerCharacter()],
    )
    return model


def between(arguments, name):
    """What connects a layer with the layer below."""
    if arguments.residual:
        return keras.layers.Identity(name=name)
    return keras.layers.Dense(arguments.embedding, name=name)


def train(run, model, corpus, arguments, sections, updates):
    """Trains in sections of `updates`, each of which ends with a validation."""
    batch_size, steps = arguments.batch_size, arguments.steps
    valid = corpus.valid[: arguments.validation_chars]
    return run.train(
        model,
        lambda step: text.pipeline(corpus.train, batch_size, steps, step),
        epochs=sections,
        steps_per_epoch=updates,
        validation_data=text.one_pass(valid, batch_size, steps),
        monitor="val_bpc",
        stop_when=cli.out_of_time(arguments),
        callbacks=[
            keras_armin.callbacks.ValidationState(),
            runs.Speed(updates),
        ],
    )


def single_lane(model, arguments, symbols):
    """The same network with a batch size of 1."""
    single = build_model(arguments, symbols, batch_size=1, updates=1)
    single.set_weights(model.get_weights())
    return single


def evaluate(single, ids):
    """Bits per character of a whole text."""
    steps = min(TEST_STEPS, len(ids) - 1)
    print(f"\ntest on {len(ids) - 1:,} characters")
    found = single.evaluate(
        text.to_the_end(ids, steps),
        verbose=1 if sys.stdout.isatty() else 2,
        return_dict=True,
    )
    return found["bpc"]


def batch_of(ids, reset=False):
    return {"ids": np.array([ids], "int32"), "reset": np.array([reset])}


def draw_reads(single, corpus, path):
    """Draws the slots read in the test text, once the memory is full."""
    known = min(TEST_STEPS, len(corpus.test) // 2)
    shown = corpus.test[known : known + PICTURE_CHARACTERS]
    single.predict_on_batch(batch_of(corpus.test[:known], reset=True))
    traces = []
    # From the bottom up: computing the inputs of a layer advances the state of
    # the layer below.
    for layer in memory_layers(single):
        inputs = inputs_of(layer, single, shown)
        traces.append(keras_armin.trace_memory(layer, inputs))
    characters = [corpus.decode([i]) for i in shown]
    plotting.draw_text_reads(traces, characters, path)


def draw_boundaries(layer, single, corpus, path):
    """Draws where the segments of an HM-LSTM end in the test text."""
    known = min(TEST_STEPS, len(corpus.test) // 2)
    shown = corpus.test[known : known + PICTURE_CHARACTERS]
    single.predict_on_batch(batch_of(corpus.test[:known], reset=True))
    found = keras_armin.trace_boundaries(layer, inputs_of(layer, single, shown))
    characters = [corpus.decode([i]) for i in shown]
    ax = keras_armin.plot_boundaries(found, characters)
    ax.figure.savefig(path, dpi=120)


def inputs_of(layer, single, ids):
    below = single.get_layer(layer.name.replace("layer", "inputs"))
    return keras.Model(single.input, below.output)(batch_of(ids))


def memory_layers(model):
    return [
        layer
        for layer in model.layers
        if getattr(getattr(layer, "cell", None), "memory_slots", None)
    ]


_TEXT_OPTIONS = {
    "data": (str, None, f"{', '.join(text.CORPORA)} or a text file"),
    "data_dir": (
        pathlib.Path,
        pathlib.Path("runs/data"),
        "where ptb and enwik8 are, or are downloaded to",
    ),
    "validation_chars": (positive, None, "characters to validate on"),
    "steps": (positive, None, "characters after which to truncate gradients"),
    "updates": (positive, None, "updates in all"),
    "epoch_updates": (positive, None, "updates between validations"),
    "layers": (positive, None, "number of recurrent layers"),
    "residual": (bool, False, "add the output of a layer to its input"),
    "embedding": (positive, 128, "size of the character embedding"),
}
# Options that matter only after training.
_RESULT_OPTIONS = {
    "test_chars": (positive, None, "characters to test on"),
    "sample": (cli.at_least_zero, 300, "characters to generate, 0 for none"),
    "sample_temperature": (cli.not_negative, 0.8, "temperature, 0 for argmax"),
    "sample_top_k": (positive, None, "sample from the likeliest characters"),
    "prompt": (str, None, "text to continue (default: start of the test text)"),
    "export": (pathlib.Path, None, "export to this folder for serve_char_lm"),
    "export_format": (exporting.FORMATS, exporting.FORMATS[0], "its format"),
}


def parse_arguments(argv):
    parser = cli.parser(__doc__)
    cli.add_options(parser, "text", _TEXT_OPTIONS)
    cli.add_options(parser, "results", _RESULT_OPTIONS)
    cli.add_run_options(parser, PRESETS)
    networks.add_options(parser)
    distribution.add_options(parser)
    arguments = cli.parse(parser, argv, preset_options)
    if arguments.output is None:
        task = f"char_lm-{pathlib.Path(arguments.data).stem}"
        arguments.output = cli.default_folder(task, arguments)
    return arguments


def main(argv=None):
    arguments = parse_arguments(argv)
    if arguments.model == "lstm":
        raise cli.RunError(
            "--model lstm cannot reset its state where a text begins again. "
            "--model ln-lstm --no-layer-norm is the same network and can."
        )
    if arguments.export:
        exporting.check_tools(arguments.export_format)
    with distribution.start(arguments) as engine:
        run_on(engine, arguments)


def run_on(engine, arguments):
    matplotlib.use("Agg")
    runs.seed_everything(arguments.seed, arguments.deterministic)
    corpus = load_text(arguments)
    prompt = corpus.encode((arguments.prompt or "").encode(), "--prompt")
    updates = min(arguments.epoch_updates, arguments.updates)
    sections = math.ceil(arguments.updates / updates)
    run = runs.Run.of(arguments, engine, run_settings(arguments, corpus))

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
        exporting.export(
            model, corpus.vocabulary, arguments.export, arguments.export_format
        )
    path = run.folder / "curve.png"
    plotting.draw_training(history, "bpc", "bits per character", path, updates)
    show(run, model, corpus, prompt, arguments, updates)


def load_text(arguments):
    corpus = text.load(arguments.data, arguments.data_dir)
    sizes = arguments.batch_size, arguments.steps
    text.lanes(corpus.train, *sizes, name="The training text")
    valid = corpus.valid[: arguments.validation_chars]
    text.lanes(valid, *sizes, name="The validation text")
    print(
        f"{arguments.data}: {len(corpus.train):,} characters to train on, "
        f"{len(corpus.valid):,} to validate, {len(corpus.test):,} to test; "
        f"{len(corpus.vocabulary)} symbols; "
        f"{text.chunks(corpus.train, *sizes):,} updates per pass"
    )
    return corpus


def run_settings(arguments, corpus):
    """Everything that determines the results of a run, the text included."""
    settings = cli.settings(arguments)
    for name in _RESULT_OPTIONS:
        del settings[name]
    return {**settings, "text": f"{zlib.crc32(corpus.train):08x}"}


def show(run, model, corpus, prompt, arguments, updates):
    """Tests the network, draws its reads, and generates text."""
    single = single_lane(model, arguments, len(corpus.vocabulary))
    tested = corpus.test[: arguments.test_chars and arguments.test_chars + 1]
    test_bpc = evaluate(single, tested)
    if memory_layers(single):
        draw_reads(single, corpus, run.folder / "reads.png")
    if arguments.model == "hm-lstm":
        path = run.folder / "boundaries.png"
        draw_boundaries(single.get_layer("layer_1"), single, corpus, path)
    show_sample(single, corpus, prompt, arguments)
    ms_per_update = statistics.median(
        # The first includes compilation.
        [logs["ms_per_update"] for logs in run.history[1:] or run.history]
    )
    characters = arguments.batch_size * arguments.steps
    run.finish(
        {
            "task": "character language model",
            "data": arguments.data,
            "preset": arguments.preset,
            "model": arguments.model,
            "parameters": networks.parameters(model),
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
            "characters_per_second": round(1000 * characters / ms_per_update),
            "backend": keras.backend.backend(),
            "seed": arguments.seed,
        }
    )


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
    print("\ngenerated by the network, after the bar:\n")
    print(f"{corpus.decode(prompt)}|{corpus.decode(written)}")


if __name__ == "__main__":
    with runs.explained_errors():
        main()
