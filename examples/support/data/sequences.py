"""The algorithmic tasks as tf.data pipelines, a function of seed and step.

Every task shows a sequence and then expects an answer, while the input is
zero. A batch is `(inputs, targets, weights)` of shapes `(batch, time,
inputs)`, `(batch, time, outputs)` and `(batch, time)`:

    time      0 .. given - 1     given .. given + answer - 1    padding
    inputs    what is given      zeros                          zeros
    targets   zeros              the answer                     zeros
    weights   zeros              time / answer                  zeros

The weights select the answer and make all sequences count equally: with them,
the mean over batch and time is the loss per bit, averaged over sequences.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# The streams of random numbers of one batch.
_SIZES, _BITS, _BANDS = 0, 1, 2
_STREAMS = 3


class Task(NamedTuple):
    """A task: its widths, its sizes, and a function that draws a batch.

    `sizes` is a dict from the name of a size to its smallest and largest value.
    `draw(sizes, longest, seed)` gets a dict with the sizes of all sequences,
    each `(batch, 1)`, and a dict with the largest possible ones. It returns
    what is given, its length, the answer, and its length: `(batch, time,
    inputs)`, `(batch, 1)`, `(batch, time, outputs)`, `(batch, 1)`.
    """

    name: str
    inputs: int
    outputs: int
    sizes: dict[str, tuple[int, int]]
    draw: Callable
    smallest: int = 1  # that a size may be

    def with_sizes(self, **sizes):
        """The same task with other sizes, each a number or a range."""
        unknown = set(sizes) - set(self.sizes)
        if unknown:
            raise ValueError(
                f"The task '{self.name}' has the sizes {list(self.sizes)}. "
                f"Received: {sorted(unknown)}"
            )
        changed = {
            name: _as_range(name, size, self.smallest)
            for name, size in sizes.items()
        }
        return self._replace(sizes={**self.sizes, **changed})


def _as_range(name, size, smallest):
    low, high = (size, size) if isinstance(size, int) else size
    if not smallest <= low <= high:
        raise ValueError(
            f"Size `{name}` must be a number of at least {smallest}, or a pair "
            f"of them in ascending order. Received: {size}"
        )
    return low, high


# --- pipelines ---------------------------------------------------------------


def batches(task, batch_size, bands=1, favour_long=False, seed=0, first_step=0):
    """Endless batches of a task.

    The range of each size is divided into `bands`. The sizes of a batch come
    from one band, drawn at random, and its sequences are padded to the longest
    possible one. This saves padding, and there are few shapes to compile for.
    All sizes are equally likely; with `favour_long` all bands are, and the
    bands of larger sizes are narrower, since what only the longest sequences
    teach would otherwise be seen too rarely.
    """
    edges = {
        name: band_edges(low, high, bands, favour_long)
        for name, (low, high) in task.sizes.items()
    }
    spec_shape = (batch_size, None, task.inputs)

    def make(step):
        seeds = _seeds(seed, step)
        ranges = {
            name: _draw_band(edge, favour_long, index, seeds[_BANDS])
            for index, (name, edge) in enumerate(edges.items())
        }
        inputs, targets, weights = draw_batch(task, batch_size, ranges, seeds)
        return tf.ensure_shape(inputs, spec_shape), targets, weights

    steps = tf.data.Dataset.range(first_step, np.iinfo("int64").max)
    return steps.map(make, num_parallel_calls=1).prefetch(4)


def one_batch(task, batch_size, seed=0, step=0):
    """A batch of sequences of all sizes of the task."""
    ranges = {
        name: (tf.constant(low), tf.constant(high))
        for name, (low, high) in task.sizes.items()
    }
    return draw_batch(task, batch_size, ranges, _seeds(seed, step))


def band_edges(low, high, bands, favour_long=False):
    """Largest value of each band, preceded by the one below the smallest."""
    share = np.linspace(0.0, 1.0, min(bands, high - low + 1) + 1)
    if favour_long:
        share = np.sqrt(share)
    edges = low - 1 + share * (high - low + 1)
    return np.unique(edges.round().astype("int32"))


def _draw_band(edges, favour_long, index, seed):
    """Smallest and largest value of a random band."""
    seed = seed + tf.constant([index * _STREAMS, 0], tf.int64)
    if favour_long:
        band = tf.random.stateless_uniform(
            (), seed, 0, len(edges) - 1, dtype=tf.int32
        )
    else:
        value = tf.random.stateless_uniform(
            (), seed, edges[0] + 1, edges[-1] + 1, dtype=tf.int32
        )
        band = tf.searchsorted(tf.constant(edges), value[None])[0] - 1
    edges = tf.constant(edges)
    return edges[band] + 1, edges[band + 1]


def _seeds(seed, step):
    step = tf.cast(step, tf.int64)
    return [
        tf.stack([tf.constant(seed * _STREAMS + stream, tf.int64), step])
        for stream in range(_STREAMS)
    ]


def draw_batch(task, batch_size, ranges, seeds):
    """Sequences with sizes from `ranges`, padded to the longest possible."""
    sizes = {}
    for index, (name, (low, high)) in enumerate(ranges.items()):
        # Steps are far below 2**40: no two steps share a seed.
        seed = seeds[_SIZES] + tf.constant([0, index << 40], tf.int64)
        sizes[name] = tf.random.stateless_uniform(
            (batch_size, 1), seed, low, high + 1, dtype=tf.int32
        )
    longest = {name: high for name, (_, high) in ranges.items()}
    return lay_out(*task.draw(sizes, longest, seeds[_BITS]))


def lay_out(given, given_length, answer, answer_length):
    """A batch from what is given and the answer to it."""
    steps = tf.shape(given)[1] + tf.shape(answer)[1]
    time = tf.range(steps)[None]  # (1, time)
    inputs = tf.pad(given, [[0, 0], [0, tf.shape(answer)[1]], [0, 0]])
    targets, there = _take(answer, time - given_length, answer_length)
    steps = tf.cast(steps, tf.float32)
    weights = there * steps / tf.cast(answer_length, tf.float32)
    return inputs, targets, weights


def _take(rows, index, length):
    """`rows[index]` of each sequence, zero where `index` is out of range."""
    there = (index >= 0) & (index < length)
    taken = tf.gather(rows, tf.where(there, index, 0), batch_dims=1)
    there = tf.cast(there, tf.float32)
    return taken * there[..., None], there


def _random_bits(shape, seed):
    bits = tf.random.stateless_uniform(shape, seed, 0, 2, dtype=tf.int32)
    return tf.cast(bits, tf.float32)


# --- tasks -------------------------------------------------------------------
# `bounds` are those of the "released" code, or one larger as in the "paper".


def copy(bounds="released", width=None):
    """Repeat a sequence of bit vectors, shown between two flags."""
    longest = 50 if bounds == "paper" else 49
    width = width or (6 if bounds == "paper" else 8)

    def draw(sizes, longest, seed):
        length = sizes["length"]
        shape = (tf.shape(length)[0], longest["length"], width)
        return copy_rows(_random_bits(shape, seed), length)

    return Task("copy", width + 2, width, {"length": (1, longest)}, draw)


def copy_rows(bits, length):
    given = _between_flags(bits, length, tf.ones_like(length, tf.float32))
    return given, length + 2, bits, length


def _between_flags(bits, length, last):
    """A start flag, the bits, and `last` on a separate channel."""
    time = tf.range(tf.shape(bits)[1] + 2)[None]
    rows, _ = _take(bits, time - 1, length)
    start = tf.cast(tf.broadcast_to(time == 0, tf.shape(rows)[:2]), tf.float32)
    end = tf.cast(time == length + 1, tf.float32) * last
    return tf.concat([rows, start[..., None], end[..., None]], axis=-1)


def repeat_copy(bounds="released", width=8):
    """Repeat a sequence a given number of times, then give an end marker."""
    most = 10 if bounds == "paper" else 9

    def draw(sizes, longest, seed):
        length = sizes["length"]
        shape = (tf.shape(length)[0], longest["length"], width)
        return repeat_copy_rows(
            _random_bits(shape, seed), length, sizes["repeats"], longest
        )

    ranges = {"length": (1, most), "repeats": (1, most)}
    return Task("repeat-copy", width + 2, width + 1, ranges, draw)


# The authors scale the number of repeats by the standard deviation of 1 to 10,
# around a value that is not quite their mean.
_REPEATS_MEAN, _REPEATS_DEVIATION = 4.5, math.sqrt(8.25)


def repeat_copy_rows(bits, length, repeats, longest):
    number = tf.cast(repeats, tf.float32)
    number = (number - _REPEATS_MEAN) / _REPEATS_DEVIATION
    given = _between_flags(bits, length, number)
    steps = length * repeats
    time = tf.range(longest["length"] * longest["repeats"] + 1)[None]
    rows = tf.gather(bits, time % length, batch_dims=1)
    rows *= tf.cast(time < steps, tf.float32)[..., None]
    marker = tf.cast(time == steps, tf.float32)[..., None]
    answer = tf.concat([rows, marker], axis=-1)
    return given, length + 2, answer, steps + 1


ITEM_LENGTH = 3


def associative_recall(bounds="released", width=6):
    """Given items and one of them again, name the item that followed it."""
    most = 6 if bounds == "paper" else 5

    def draw(sizes, longest, seed):
        count = sizes["items"]
        shape = (tf.shape(count)[0], longest["items"], ITEM_LENGTH, width)
        # Any but the last item.
        asked = tf.random.stateless_uniform(
            tf.shape(count), seed + tf.constant([0, 1 << 40], tf.int64)
        )
        asked = tf.cast(asked * tf.cast(count - 1, tf.float32), tf.int32)
        return recall_rows(_random_bits(shape, seed), count, asked)

    return Task("recall", width + 2, width, {"items": (2, most)}, draw, 2)


def recall_rows(items, count, asked):
    """`items` is `(batch, items, 3, width)`; `count`, `asked` `(batch, 1)`."""
    batch, most, _, width = tf.unstack(tf.shape(items))
    block = ITEM_LENGTH + 1
    shown = tf.reshape(
        tf.pad(items, [[0, 0], [0, 0], [1, 0], [0, 0]]),
        (batch, most * block, width),
    )
    query = tf.gather(items, asked[:, 0], batch_dims=1)
    time = tf.range((most + 1) * block + 1)[None]
    end = count * block  # of the items
    rows = (
        _take(shown, time, end)[0] + _take(query, time - end - 1, block - 1)[0]
    )
    delimiter = (time < end) & (time % block == 0)
    query_delimiter = (time == end) | (time == end + block)
    flags = tf.cast(tf.stack([delimiter, query_delimiter], -1), tf.float32)
    answer = tf.gather(items, asked[:, 0] + 1, batch_dims=1)
    answer_length = tf.fill(tf.shape(count), ITEM_LENGTH)
    return tf.concat([rows, flags], -1), end + block + 1, answer, answer_length


def priority_sort(bounds="released", width=8, columnwise=False):
    """The vectors of highest priority, in descending order.

    The answer has three quarters of the vectors: 30 of 40. `columnwise` is
    what the authors' code does and the paper's figures come from: every bit
    column is sorted independently, ignoring the priorities.
    """

    def draw(sizes, longest, seed):
        count = sizes["items"]
        shape = (tf.shape(count)[0], longest["items"], width)
        priority = tf.random.stateless_uniform(
            shape[:2], seed + tf.constant([0, 1 << 40], tf.int64), -1.0, 1.0
        )
        bits = _random_bits(shape, seed)
        return sort_rows(bits, priority, count, columnwise)

    name = "sort-columnwise" if columnwise else "sort"
    return Task(name, width + 1, width, {"items": (40, 40)}, draw)


def sort_rows(bits, priority, count, columnwise=False):
    here = tf.cast(tf.range(tf.shape(bits)[1])[None] < count, tf.float32)
    bits, priority = bits * here[..., None], priority * here
    given = tf.concat([bits, priority[..., None]], axis=-1)
    if columnwise:
        answer = tf.sort(bits, axis=1, direction="DESCENDING")
    else:
        # Padding comes last.
        order = tf.argsort(
            tf.where(here > 0, priority, -2.0), 1, "DESCENDING", stable=True
        )
        answer = tf.gather(bits, order, batch_dims=1)
    return given, count, answer, (3 * count + 3) // 4


TASKS = {
    "copy": copy,
    "repeat-copy": repeat_copy,
    "recall": associative_recall,
    "sort": priority_sort,
    "sort-columnwise": lambda bounds: priority_sort(bounds, columnwise=True),
}


# --- answers -----------------------------------------------------------------


def score(model, batches):
    """Loss per bit, and share of answers without a wrong bit.

    `batches` is an iterable of batches of equal size, as arrays.
    """
    losses, correct = [], []
    for inputs, targets, weights in batches:
        logits = model.predict_on_batch(inputs)
        sign = np.where(targets > 0.5, 1, -1)
        loss = np.logaddexp(0, -sign * logits).mean(axis=-1) * weights
        wrong = ((logits > 0) != (targets > 0.5)) & (weights > 0)[..., None]
        losses.append(loss.mean())
        correct.append(1 - wrong.any(axis=(1, 2)).mean())
    return float(np.mean(losses)), float(np.mean(correct))


def print_answer(model, batch, rows=None):
    """Prints target and output of the first sequence side by side, as bits."""
    inputs, targets, weights = batch
    answer = weights[0] > 0
    targets = targets[0][answer] > 0.5
    outputs = model.predict_on_batch(inputs)[0][answer] > 0
    print(f"\n{'target':{targets.shape[1]}}   output")
    for target, output in list(zip(targets, outputs))[:rows]:
        bits = ["".join(np.where(x, "1", "0")) for x in (target, output)]
        wrong = (target != output).sum()
        print("   ".join(bits), f"  {wrong} wrong" if wrong else "")
