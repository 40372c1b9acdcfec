"""Six small tasks for a recurrent network, without a download.

A task draws its samples from a NumPy generator: `draw(rng, samples, held_out)`
returns inputs and targets. Where there are so few samples that training and
validation would overlap, some are held out. The model of a task is a
`keras.Sequential` around `recurrent(**arguments)`, a recurrent layer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from examples.support.data import pixels
from examples.support.data import text

HELD_OUT_SAMPLES = 500
_HELD_OUT_SEED = 10_000


class Task(NamedTuple):
    """A task, with the size of the LSTM and the length of the training."""

    title: str
    draw: Callable  # (rng, samples, held_out) -> inputs, targets
    layers: Callable  # recurrent -> the layers after the input
    chance: float | None = None  # metric of a constant answer, if known
    units: int = 64
    updates: int = 1000
    batch_size: int = 32
    metric: str = "accuracy"  # a key of METRICS

    def training(self, seed, updates):
        """The samples of so many updates, in their order."""
        rng = np.random.default_rng(seed)
        return self.draw(rng, updates * self.batch_size, held_out=False)

    def held_out(self):
        """Samples for validation, the same for all seeds."""
        rng = np.random.default_rng(_HELD_OUT_SEED)
        return self.draw(rng, HELD_OUT_SAMPLES, held_out=True)

    def model(self, recurrent):
        """The model, not compiled."""
        inputs, _ = self.draw(np.random.default_rng(0), 1, held_out=False)
        return keras.Sequential(
            [
                keras.Input(inputs.shape[1:], dtype=inputs.dtype.name),
                *self.layers(recurrent),
            ]
        )


class Metric(NamedTuple):
    loss: str
    of_logs: Callable  # logs of an epoch -> value
    format: Callable  # value -> text


METRICS = {
    "accuracy": Metric(
        "sparse_categorical_crossentropy",
        lambda logs: logs["val_accuracy"],
        lambda value: f"{100 * value:.1f} %",
    ),
    "mean squared error": Metric(
        "mean_squared_error",
        lambda logs: logs["val_loss"],
        lambda value: f"{value:.4f}",
    ),
    "bits per character": Metric(
        "sparse_categorical_crossentropy",
        lambda logs: logs["val_loss"] / np.log(2),
        lambda value: f"{value:.3f}",
    ),
}


def _encoder_decoder(steps, symbols):
    """One vector between two layers, as in the Keras example of addition."""
    return lambda recurrent: [
        recurrent(),
        keras.layers.RepeatVector(steps),
        recurrent(return_sequences=True),
        keras.layers.Dense(symbols, activation="softmax"),
    ]


def _at_the_end(outputs, activation=None):
    return lambda recurrent: [
        recurrent(),
        keras.layers.Dense(outputs, activation=activation),
    ]


def _one_hot(ids, symbols):
    return np.eye(symbols, dtype="float32")[ids]


# --- addition ----------------------------------------------------------------

CHARACTERS = "0123456789+ "
DIGITS = 2
QUESTION_STEPS = 2 * DIGITS + 1
ANSWER_STEPS = DIGITS + 1


def draw_addition(rng, samples, held_out):
    """Sums of two numbers as characters: "35+6 ", reversed, and "41 ".

    A tenth of all pairs of numbers is held out, in both orders.
    """
    numbers = 10**DIGITS
    left_out = np.random.default_rng(0).random((numbers, numbers)) < 0.1
    pairs = rng.integers(numbers, size=(20 * samples + 200, 2))
    which = left_out[pairs.min(axis=1), pairs.max(axis=1)] == held_out
    return spell(pairs[which][:samples])


def spell(pairs):
    """Questions, one-hot, and their answers as indices of characters."""
    questions = [f"{a}+{b}".ljust(QUESTION_STEPS)[::-1] for a, b in pairs]
    answers = [str(a + b).ljust(ANSWER_STEPS) for a, b in pairs]
    inputs = _one_hot(_as_ids(questions), len(CHARACTERS))
    return inputs, _as_ids(answers)


def _as_ids(texts):
    return np.array([[CHARACTERS.index(c) for c in t] for t in texts], "int32")


# --- reverse -----------------------------------------------------------------

REVERSED_STEPS, REVERSED_SYMBOLS = 10, 8


def draw_reverse(rng, samples, held_out):
    """Random symbols, to be repeated in reverse order."""
    ids = rng.integers(REVERSED_SYMBOLS, size=(samples, REVERSED_STEPS))
    return _one_hot(ids, REVERSED_SYMBOLS), ids[:, ::-1].astype("int32")


# --- recall ------------------------------------------------------------------

RECALLED_SYMBOLS, OTHER_SYMBOLS = 5, 5
DISTRACTORS = 25


def draw_recall(rng, samples, held_out):
    """One of five symbols, then 25 others. The first one is the answer."""
    first = rng.integers(RECALLED_SYMBOLS, size=(samples, 1))
    others = rng.integers(OTHER_SYMBOLS, size=(samples, DISTRACTORS))
    ids = np.concatenate([first, RECALLED_SYMBOLS + others], axis=1)
    inputs = _one_hot(ids, RECALLED_SYMBOLS + OTHER_SYMBOLS)
    return inputs, first[:, 0].astype("int32")


# --- adding ------------------------------------------------------------------

# At 100 an LSTM of 64 or 128 units is still at chance after 2,000 updates, at
# 200 after 4,000.
ADDING_STEPS = 50


def draw_adding(rng, samples, held_out):
    """Numbers from 0 to 1, and the sum of two marked ones, one in each half."""
    values = rng.random((samples, ADDING_STEPS), dtype="float32")
    marks = np.zeros_like(values)
    half, rows = ADDING_STEPS // 2, np.arange(samples)
    for start in (0, half):
        marks[rows, start + rng.integers(half, size=samples)] = 1
    targets = (values * marks).sum(axis=1, keepdims=True)
    return np.stack([values, marks], axis=-1), targets


# --- digits ------------------------------------------------------------------


@functools.cache
def _digits():
    splits = pixels.load("digits")
    held_out = [np.concatenate(x) for x in zip(splits.validation, splits.test)]
    return splits.training, pixels.Samples(*held_out)


def draw_digits(rng, samples, held_out):
    """Images of 8 x 8 pixels in a fixed random order, and their digits.

    Held out are the validation and test images. Training passes over the
    others, each time in another order.
    """
    training, others = _digits()
    if held_out:
        return others.images, others.labels
    passes = -(-samples // len(training))
    order = [rng.permutation(len(training)) for _ in range(passes)]
    return training.part(np.concatenate(order)[:samples])


# --- text --------------------------------------------------------------------

TEXT_STEPS = 64


@functools.cache
def _corpus():
    return text.load("stdlib")


def draw_text(rng, samples, held_out):
    """Pieces of the source code of Python's library, and what follows."""
    ids = _corpus().valid if held_out else _corpus().train
    starts = rng.integers(len(ids) - TEXT_STEPS, size=(samples, 1))
    pieces = ids[starts + np.arange(TEXT_STEPS + 1)].astype("int32")
    return pieces[:, :-1], pieces[:, 1:]


def _text_layers(recurrent):
    characters = len(_corpus().vocabulary)
    return [
        keras.layers.Embedding(characters, 32),
        recurrent(return_sequences=True),
        keras.layers.Dense(characters, activation="softmax"),
    ]


TASKS = {
    "addition": Task(
        f"adding numbers of {DIGITS} digits",
        draw_addition,
        _encoder_decoder(ANSWER_STEPS, len(CHARACTERS)),
        units=128,
        updates=2500,
        batch_size=64,
    ),
    "reverse": Task(
        f"reversing {REVERSED_STEPS} symbols",
        draw_reverse,
        _encoder_decoder(REVERSED_STEPS, REVERSED_SYMBOLS),
        chance=1 / REVERSED_SYMBOLS,
        units=128,
        updates=1200,
        batch_size=64,
    ),
    "recall": Task(
        f"recalling a symbol after {DISTRACTORS} others",
        draw_recall,
        _at_the_end(RECALLED_SYMBOLS, "softmax"),
        chance=1 / RECALLED_SYMBOLS,
        updates=600,
    ),
    "adding": Task(
        f"the adding problem, {ADDING_STEPS} steps",
        draw_adding,
        _at_the_end(1),
        chance=1 / 6,
        updates=2000,
        metric="mean squared error",
    ),
    "digits": Task(
        "digits, pixel by scrambled pixel",
        draw_digits,
        _at_the_end(pixels.CLASSES, "softmax"),
        chance=1 / pixels.CLASSES,
    ),
    "text": Task(
        "the next character of Python's library",
        draw_text,
        _text_layers,
        units=128,
        updates=600,
        metric="bits per character",
    ),
}
