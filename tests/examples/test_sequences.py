"""The algorithmic tasks, against cases written out by hand."""

import keras
import numpy as np
import pytest

tf = pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples.support.data import sequences  # noqa: E402
from tests.helpers.common import slow_except_on  # noqa: E402

# Data is NumPy and tf.data on every backend.
pytestmark = slow_except_on("tensorflow")


def laid_out(rows):
    return [array.numpy()[0] for array in sequences.lay_out(*rows)]


def column(*values):
    return tf.constant([[value] for value in values])


A, B, C = [1, 0, 1], [0, 1, 1], [1, 1, 0]
ZERO = [0, 0, 0]


def bits(*rows):
    return tf.constant([rows], tf.float32)


def test_a_copy_written_out_by_hand():
    # C is padding: the sequence has two vectors.
    rows = sequences.copy_rows(bits(A, B, C), column(2))
    inputs, targets, weights = laid_out(rows)

    np.testing.assert_array_equal(
        inputs,
        [
            [*ZERO, 1, 0],
            [*A, 0, 0],
            [*B, 0, 0],
            [*ZERO, 0, 1],
            *[[*ZERO, 0, 0]] * 4,
        ],
    )
    np.testing.assert_array_equal(targets, [ZERO] * 4 + [A, B] + [ZERO] * 2)
    np.testing.assert_array_equal(weights, [0, 0, 0, 0, 4, 4, 0, 0])


def test_a_repeat_copy_written_out_by_hand():
    longest = {"length": 2, "repeats": 3}
    rows = sequences.repeat_copy_rows(bits(A, B), column(2), column(2), longest)
    inputs, targets, weights = laid_out(rows)
    twice = (2 - 4.5) / np.sqrt(8.25)

    np.testing.assert_allclose(
        inputs,
        [
            [*ZERO, 1, 0],
            [*A, 0, 0],
            [*B, 0, 0],
            [*ZERO, 0, twice],
            *[[*ZERO, 0, 0]] * 7,
        ],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(
        targets,
        [[*ZERO, 0]] * 4
        + [[*A, 0], [*B, 0], [*A, 0], [*B, 0], [*ZERO, 1]]
        + [[*ZERO, 0]] * 2,
    )
    np.testing.assert_allclose(
        weights, [0] * 4 + [11 / 5] * 5 + [0] * 2, rtol=1e-6
    )


def test_a_recall_written_out_by_hand():
    first, second, third = (
        [A, B, C],
        [B, B, A],
        [C, A, A],
    )
    items = tf.constant([[first, second, third]], tf.float32)
    rows = sequences.recall_rows(items, column(2), column(0))
    inputs, targets, weights = laid_out(rows)

    def shown(row):
        return [*row, 0, 0]

    np.testing.assert_array_equal(
        inputs,
        [
            [*ZERO, 1, 0],
            *map(shown, first),
            [*ZERO, 1, 0],
            *map(shown, second),
            [*ZERO, 0, 1],
            *map(shown, first),
            [*ZERO, 0, 1],
            *[[*ZERO, 0, 0]] * 7,
        ],
    )
    np.testing.assert_array_equal(targets, [ZERO] * 13 + second + [ZERO] * 4)
    np.testing.assert_allclose(
        weights, [0] * 13 + [20 / 3] * 3 + [0] * 4, rtol=1e-6
    )


PRIORITIES = [-0.5, 0.25, 0.75, 0.9]


def test_a_priority_sort_written_out_by_hand():
    # Three items; the fourth, of highest priority, is padding.
    rows = sequences.sort_rows(
        bits(A, B, C, A), tf.constant([PRIORITIES]), column(3)
    )
    inputs, targets, weights = laid_out(rows)

    np.testing.assert_allclose(
        inputs, [[*A, -0.5], [*B, 0.25], [*C, 0.75], *[[*ZERO, 0]] * 5]
    )
    np.testing.assert_array_equal(targets, [ZERO] * 3 + [C, B, A] + [ZERO] * 2)
    np.testing.assert_allclose(weights, [0] * 3 + [8 / 3] * 3 + [0] * 2)


def test_the_released_sort_sorts_every_column_for_itself():
    rows = sequences.sort_rows(
        bits(A, B, C, ZERO), tf.constant([PRIORITIES]), column(4), True
    )
    _, targets, weights = laid_out(rows)

    # The columns hold two, two and two ones; three rows are asked for.
    expected = [[1, 1, 1], [1, 1, 1], ZERO]
    np.testing.assert_array_equal(targets[4:7], expected)
    np.testing.assert_allclose(weights, [0] * 4 + [8 / 3] * 3 + [0])


def test_thirty_of_forty_items_are_asked_for():
    for name in ("sort", "sort-columnwise"):
        task = sequences.TASKS[name](bounds="paper")
        _, _, weights = sequences.one_batch(task, 2)

        assert task.sizes == {"items": (40, 40)}
        np.testing.assert_array_equal((weights.numpy() > 0).sum(axis=1), 30)


@pytest.mark.parametrize(
    "name,bounds,sizes,widths",
    [
        ("copy", "paper", {"length": (1, 50)}, (8, 6)),
        ("copy", "released", {"length": (1, 49)}, (10, 8)),
        (
            "repeat-copy",
            "paper",
            {"length": (1, 10), "repeats": (1, 10)},
            (10, 9),
        ),
        (
            "repeat-copy",
            "released",
            {"length": (1, 9), "repeats": (1, 9)},
            (10, 9),
        ),
        ("recall", "paper", {"items": (2, 6)}, (8, 6)),
        ("recall", "released", {"items": (2, 5)}, (8, 6)),
        ("sort", "released", {"items": (40, 40)}, (9, 8)),
    ],
)
def test_sizes_of_the_paper_and_of_its_code(name, bounds, sizes, widths):
    task = sequences.TASKS[name](bounds=bounds)

    assert task.sizes == sizes
    assert (task.inputs, task.outputs) == widths


def small(name):
    sizes = {
        "copy": {"length": (1, 9)},
        "repeat-copy": {"length": (1, 4), "repeats": (1, 3)},
        "recall": {"items": (2, 5)},
        "sort": {"items": (3, 6)},
        "sort-columnwise": {"items": (3, 6)},
    }
    return sequences.TASKS[name](bounds="released").with_sizes(**sizes[name])


def expected_answer(name, x):
    """The answer to a sequence `(time, inputs)`, found from what it shows."""
    if name == "copy":
        end = x[:, -1].argmax()
        return end + 1, x[1:end, :-2]
    if name == "repeat-copy":
        end = np.abs(x[:, -1]).argmax()
        repeats = round(float(x[end, -1] * np.sqrt(8.25) + 4.5))
        answer = np.tile(x[1:end, :-2], (repeats, 1))
        answer = np.pad(answer, ((0, 1), (0, 1)))
        answer[-1, -1] = 1
        return end + 1, answer
    if name == "recall":
        start, end = x[:, -1].nonzero()[0]
        items = x[:start, :-2].reshape(-1, 4, x.shape[1] - 2)[:, 1:]
        asked = x[start + 1 : end, :-2]
        (found,) = (items[:-1] == asked).all(axis=(1, 2)).nonzero()
        return end + 1, items[found[0] + 1]
    count = int((x[:, -1] != 0).sum())
    shown = x[:count, :-1]
    asked = -(-3 * count // 4)
    if name == "sort":
        return count, shown[np.argsort(-x[:count, -1])][:asked]
    return count, -np.sort(-shown, axis=0)[:asked]


@pytest.mark.parametrize("name", sequences.TASKS)
def test_each_sequence_of_each_batch_is_right(name):
    lengths = set()
    dataset = sequences.batches(small(name), 16, bands=2, seed=1)
    for inputs, targets, weights in dataset.take(12).as_numpy_iterator():
        for x, y, w in zip(inputs, targets, weights):
            start, answer = expected_answer(name, x)
            lengths.add(start)
            place = slice(start, start + len(answer))
            expected = np.zeros_like(y)
            expected[place] = answer
            np.testing.assert_array_equal(y, expected)
            assert (x[start:] == 0).all()
            expected = np.zeros_like(w)
            expected[place] = len(w) / len(answer)
            np.testing.assert_allclose(w, expected, rtol=1e-6)
    # Every size turns up.
    assert (
        lengths
        == {
            "copy": set(range(3, 12)),
            "repeat-copy": set(range(3, 7)),
            "recall": {13, 17, 21, 25},
            "sort": {3, 4, 5, 6},
            "sort-columnwise": {3, 4, 5, 6},
        }[name]
    )


def test_sizes_are_drawn_evenly_or_in_favour_of_the_long():
    def mean_length(**options):
        task = sequences.copy(width=1).with_sizes(length=(1, 10))
        dataset = sequences.batches(task, 4, bands=5, **options).take(200)
        flags = [
            x[..., 2].argmax(axis=1) for x, _, _ in dataset.as_numpy_iterator()
        ]
        return np.mean(flags) - 1

    assert mean_length() == pytest.approx(5.5, abs=0.3)
    assert mean_length(favour_long=True) > 6.3


def test_no_two_draws_of_a_step_share_their_numbers():
    task = sequences.TASKS["repeat-copy"](bounds="released")
    _, targets, weights = sequences.one_batch(task, 400, seed=5)
    steps = (weights.numpy() > 0).sum(axis=1) - 1
    # Sizes that went together would make every product a square.
    assert (np.sqrt(steps) % 1 > 0).mean() > 0.5


@pytest.mark.slow_after(1, "tensorflow")
@pytest.mark.parametrize("name", sequences.TASKS)
def test_data_is_a_function_of_seed_and_step(name):
    def drawn(count=3, **options):
        dataset = sequences.batches(small(name), 2, bands=2, **options)
        return [
            b"".join(array.tobytes() for array in batch)
            for batch in dataset.take(count).as_numpy_iterator()
        ]

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1)[2:] == drawn(1, seed=1, first_step=2)
    assert drawn(seed=1) != drawn(seed=2)
    assert len(set(drawn(seed=1))) == 3


@pytest.mark.parametrize("high", [1, 2, 3, 5, 49])
@pytest.mark.parametrize("favour_long", [False, True])
def test_parts_of_a_range_cover_it_and_none_is_empty(high, favour_long):
    edges = sequences.band_edges(1, high, 5, favour_long)

    assert edges[0] == 0 and edges[-1] == high
    assert (np.diff(edges) > 0).all()


def test_the_weights_make_the_loss_the_mean_over_answers():
    _, targets, weights = sequences.one_batch(small("copy"), 4, seed=2)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    value = loss(targets.numpy(), np.zeros_like(targets), weights.numpy())

    assert float(value) == pytest.approx(np.log(2), rel=1e-5)


def test_wrong_sizes_are_explained():
    task = sequences.copy()
    with pytest.raises(ValueError, match=r"has the sizes \['length'\].*items"):
        task.with_sizes(items=3)
    for size in (0, (3, 2)):
        with pytest.raises(ValueError, match="`length` must be .* at least 1"):
            task.with_sizes(length=size)
    with pytest.raises(ValueError, match="`items` must be .* at least 2"):
        sequences.associative_recall().with_sizes(items=(1, 4))
