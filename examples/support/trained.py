"""The models in examples/trained: how their files are made and measured.

    python -m examples.support.trained ship copy runs/copy_task
    python -m examples.support.trained measure copy

`ship` takes the name of a model and the folder of the run that trained it, and
writes the model without its optimizer, uncompiled: a file should not decide how
other backends compile it. The character model is also exported, to the folder
that serve_char_lm.py serves. `measure` prints the figures of the model card.
"""

import argparse
import json
import pathlib
import zlib

import keras
import numpy as np

import keras_armin  # noqa: F401, registers the layers

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "trained"
LONGEST = 49  # vectors in the longest sequence to copy
MOST_ITEMS = 5  # in the longest list to recall from
SEED = 11  # of the sequences that are measured, others than in training
BYTES = 256
# Of bytes that the training text does not have: never generated.
UNSEEN_LOGIT = -1e4


def load(name):
    """A model of the folder, not compiled."""
    return keras.models.load_model(FOLDER / f"{name}.keras", compile=False)


# --- figures -----------------------------------------------------------------


def copy_figures(model, per_length=20):
    """Loss per bit and share of faultless copies, lengths 1 to 49."""
    from examples import copy_task

    loss, share = copy_task.check_every_length(model, LONGEST, SEED, per_length)
    return {"loss": loss, "right": share}


def recall_figures(model, per_length=500):
    """Loss per bit and share of faultless answers, lists of 2 to 5 items."""
    from examples.support.data import sequences

    task = sequences.TASKS["recall"](bounds="released")
    batches = (
        sequences.one_batch(task.with_sizes(items=items), per_length, SEED)
        for items in range(2, MOST_ITEMS + 1)
    )
    loss, share = sequences.score(
        model, ([x.numpy() for x in batch] for batch in batches)
    )
    return {"loss": loss, "right": share}


def text_figures(model, every=1, length=1000, batch_size=15):
    """Bits per character of held-out text, cut into separate pieces.

    `every=10` takes one piece in ten, from the beginning to the end.
    """
    from examples.support.data import text

    corpus = text.load("stdlib")
    codes = np.frombuffer(corpus.vocabulary, "uint8")[corpus.test]
    pieces = len(codes) // length
    rows = codes[: pieces * length].reshape(pieces, length).astype("int32")
    rows = rows[::every]
    bits = [
        _bits(model, rows[start : start + batch_size])
        for start in range(0, len(rows), batch_size)
    ]
    return {"bpc": float(np.concatenate(bits).mean())}


def _bits(model, rows):
    """Bits of each character but the first, given those before it."""
    logits = model.predict_on_batch(rows[:, :-1]).astype("float64")
    logits -= logits.max(axis=-1, keepdims=True)
    right = np.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=-1)) - right
    return nats / np.log(2)


FIGURES = {"copy": copy_figures, "recall": recall_figures, "text": text_figures}


# --- files -------------------------------------------------------------------


def copy_model(run):
    return keras.models.load_model(run / "model.keras", compile=False)


def recall_model(run):
    """With argmax reads, whatever the reads during training."""
    from examples import algorithmic

    arguments = _arguments(run)
    task = algorithmic.make_task(arguments)
    model = algorithmic.build_model(task, arguments)
    model.load_weights(run / "best.weights.h5")
    return _uncompiled(algorithmic.with_argmax_reads(model, task, arguments))


def text_model(run):
    """From byte values to logits of the next byte; carries no state."""
    from examples import char_lm
    from examples.support import networks
    from examples.support.data import text

    arguments = _arguments(run)
    corpus = text.load(arguments.data)
    if f"{zlib.crc32(corpus.train):08x}" != arguments.text:
        raise ValueError(
            f"The run in {run} was trained on another text than "
            f"{arguments.data!r} is here, so its characters are unknown. Use "
            "the Python version that trained it."
        )
    trained = char_lm.build_model(arguments, len(corpus.vocabulary), 1, 1)
    trained.load_weights(run / "best.weights.h5")
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="ids"),
            keras.layers.Embedding(
                BYTES, arguments.embedding, name="embedding"
            ),
            networks.build(arguments, return_sequences=True, name="armin"),
            keras.layers.Dense(BYTES, name="logits"),
        ]
    )
    seen = list(corpus.vocabulary)
    for ours, theirs in zip(model.layers, ("inputs_1", "layer_1", "logits")):
        weights = trained.get_layer(theirs).get_weights()
        ours.set_weights(_spread(ours, weights, seen))
    return model


def _spread(layer, weights, seen):
    """Weights of a layer over symbols as those of a layer over bytes."""
    if layer.name == "armin":
        return weights
    spread = [np.zeros(x.shape, "float32") for x in layer.weights]
    if layer.name == "embedding":
        spread[0][seen] = weights[0]
    else:
        spread[0][:, seen] = weights[0]
        spread[1][:] = UNSEEN_LOGIT
        spread[1][seen] = weights[1]
    return spread


def _arguments(run):
    """The settings of a run, as its script had them."""
    return argparse.Namespace(**json.loads((run / "settings.json").read_text()))


def _uncompiled(model):
    """A copy without optimizer; `clone_model` would compile it."""
    copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    return copy


MODELS = {"copy": copy_model, "recall": recall_model, "text": text_model}


def ship(name, run):
    """Writes the model that a run left in its folder."""
    model = MODELS[name](pathlib.Path(run))
    model.save(FOLDER / f"{name}.keras")
    if name == "text":
        from examples.support import exporting

        exporting.export(model, bytes(range(BYTES)), FOLDER / name)


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
