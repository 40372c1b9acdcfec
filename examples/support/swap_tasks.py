"""Six small tasks for a recurrent network, generated or bundled.

A task draws its samples from a NumPy generator: `draw(rng, samples,
held_out)` gives inputs and targets. What is held out comes from another part
of the task than the training data, if a task has so few samples that
they would overlap. Its model is a `keras.Sequential` around
`recurrent(**arguments)`, which makes one recurrent layer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from examples.support import pixels
from examples.support import text

HELD_OUT_SAMPLES = 500
_HELD_OUT_SEED = 10_000


class Task(NamedTuple):
    """A task, with the size of the LSTM and the length of the training."""

    title: str
    draw: Callable  # (rng, samples, held_out) -> inputs, targets
    layers: Callable  # recurrent -> the layers after the input
    metric: str  # a key of METRICS
    chance: float | None  # metric of a constant answer, if known
    units: int
    updates: int
    batch_size: int

    def training(self, seed, updates):
        """As many samples as so many updates take, in their order."""
        rng = np.random.default_rng(seed)
        return self.draw(rng, updates * self.batch_size, held_out=False)

    def held_out(self):
        """The same for all seeds."""
        rng = np.random.default_rng(_HELD_OUT_SEED)
        return self.draw(rng, HELD_OUT_SAMPLES, held_out=True)

    def model(self, recurrent):
        """Not compiled."""
        inputs, _ = self.draw(np.random.default_rng(0), 1, held_out=False)
        return keras.Sequential(
            [
                keras.Input(inputs.shape[1:], dtype=inputs.dtype.name),
                *self.layers(recurrent),
            ]
        )


class Metric(NamedTuple):
    """How the answers to a task are judged."""

    loss: str
    of_logs: Callable  # the logs of an epoch -> the metric
    words: Callable  # the metric -> text


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
    """As in Keras' example of addition: one vector between two layers."""

    def layers(recurrent):
        return [
            recurrent(),
            keras.layers.RepeatVector(steps),
            recurrent(return_sequences=True),
            keras.layers.Dense(symbols, activation="softmax"),
        ]

    return layers


def _at_the_end(outputs, activation=None):
    def layers(recurrent):
        return [
            recurrent(),
            keras.layers.Dense(outputs, activation=activation),
        ]

    return layers


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

REVERSED_STEPS = 10
REVERSED_SYMBOLS = 8


def draw_reverse(rng, samples, held_out):
    """Random symbols, to be repeated from the last to the first."""
    ids = rng.integers(REVERSED_SYMBOLS, size=(samples, REVERSED_STEPS))
    return _one_hot(ids, REVERSED_SYMBOLS), ids[:, ::-1].astype("int32")


# --- recall ------------------------------------------------------------------

RECALLED_SYMBOLS = 5
DISTRACTORS = 25
_DISTRACTING_SYMBOLS = 5


def draw_recall(rng, samples, held_out):
    """One of five symbols first, 25 others after it, and then: which one?"""
    first = rng.integers(RECALLED_SYMBOLS, size=(samples, 1))
    others = RECALLED_SYMBOLS + rng.integers(
        _DISTRACTING_SYMBOLS, size=(samples, DISTRACTORS)
    )
    ids = np.concatenate([first, others], axis=1)
    symbols = RECALLED_SYMBOLS + _DISTRACTING_SYMBOLS
    return _one_hot(ids, symbols), first[:, 0].astype("int32")


# --- adding ------------------------------------------------------------------

# At 100 an LSTM of 64 or 128 units is still at chance after 2,000 updates, at
# 200 after 4,000.
ADDING_STEPS = 50


def draw_adding(rng, samples, held_out):
    """Numbers from 0 to 1, of which one in each half is marked to be added."""
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
    """Images of 8 x 8 pixels in a scrambled order, and their digits.

    What is held out is drawn once. What is trained with is all there is in
    one random order after another.
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
    """Pieces of the source text of Python's library, and what comes next."""
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
        metric="accuracy",
        chance=None,
        units=128,
        updates=2500,
        batch_size=64,
    ),
    "reverse": Task(
        f"reversing {REVERSED_STEPS} symbols",
        draw_reverse,
        _encoder_decoder(REVERSED_STEPS, REVERSED_SYMBOLS),
        metric="accuracy",
        chance=1 / REVERSED_SYMBOLS,
        units=128,
        updates=1200,
        batch_size=64,
    ),
    "recall": Task(
        f"recalling a symbol after {DISTRACTORS} others",
        draw_recall,
        _at_the_end(RECALLED_SYMBOLS, "softmax"),
        metric="accuracy",
        chance=1 / RECALLED_SYMBOLS,
        units=64,
        updates=600,
        batch_size=32,
    ),
    "adding": Task(
        f"the adding problem, {ADDING_STEPS} steps",
        draw_adding,
        _at_the_end(1),
        metric="mean squared error",
        chance=1 / 6,
        units=64,
        updates=2000,
        batch_size=32,
    ),
    "digits": Task(
        "digits, pixel by scrambled pixel",
        draw_digits,
        _at_the_end(pixels.CLASSES, "softmax"),
        metric="accuracy",
        chance=1 / pixels.CLASSES,
        units=64,
        updates=1000,
        batch_size=32,
    ),
    "text": Task(
        "the next character of Python's library",
        draw_text,
        _text_layers,
        metric="bits per character",
        chance=None,
        units=128,
        updates=600,
        batch_size=32,
    ),
}
