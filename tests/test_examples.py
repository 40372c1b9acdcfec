"""The example scripts in their quickest form, and their data by hand."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

tf = pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import copy_task  # noqa: E402
from examples.support import sequences  # noqa: E402


def test_a_copy_sequence_written_out_by_hand():
    inputs, targets, weights = (
        a.numpy() for a in sequences.fixed_length_batch(1, 2, width=3, seed=4)
    )
    a, b = inputs[0, 1, :3], inputs[0, 2, :3]
    zero = np.zeros(3)

    np.testing.assert_array_equal(
        inputs[0],
        [
            [0, 0, 0, 1, 0],
            [*a, 0, 0],
            [*b, 0, 0],
            [0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0],
        ],
    )
    np.testing.assert_array_equal(targets[0], [zero, zero, zero, zero, a, b])
    np.testing.assert_array_equal(weights[0], [0, 0, 0, 0, 3, 3])
    assert set(np.ravel(inputs)) == {0.0, 1.0}


def test_each_sequence_of_a_copy_batch_is_right():
    dataset = sequences.copy_task(16, max_length=9, buckets=2, width=4, seed=1)
    lengths = set()
    for inputs, targets, weights in dataset.take(8).as_numpy_iterator():
        assert inputs.shape[1] in (2 * 6 + 2, 2 * 9 + 2)
        for x, y, w in zip(inputs, targets, weights):
            length = int(x[:, 5].argmax()) - 1
            lengths.add(length)
            answer = slice(length + 2, 2 * length + 2)
            np.testing.assert_array_equal(y[answer], x[1 : length + 1, :4])
            assert (x[length + 2 :] == 0).all() and x[:, 4:].sum() == 2
            expected = np.zeros(len(w))
            expected[answer] = len(w) / length
            np.testing.assert_allclose(w, expected, rtol=1e-6)
    assert lengths == set(range(1, 10))


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 49])
def test_ranges_of_lengths_cover_all_and_none_is_empty(max_length):
    edges = sequences._bucket_edges(1, max_length, 5)

    assert edges[0] == 0 and edges[-1] == max_length
    assert (np.diff(edges) > 0).all()


def test_data_is_a_function_of_seed_and_step():
    def batches(count=3, **options):
        dataset = sequences.copy_task(2, 5, **options).take(count)
        return [x.tobytes() for x, _, _ in dataset.as_numpy_iterator()]

    assert batches(seed=1) == batches(seed=1)
    assert batches(seed=1)[2:] == batches(1, seed=1, first_step=2)
    assert batches(seed=1) != batches(seed=2)
    assert len(set(batches(seed=1))) == 3


def test_the_weights_make_the_loss_the_mean_over_answers():
    inputs, targets, weights = sequences.fixed_length_batch(4, 3, seed=2)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    value = loss(targets.numpy(), np.zeros_like(targets), weights.numpy())

    assert float(value) == pytest.approx(np.log(2), rel=1e-5)


def test_bits_wrong_counts_the_answer_only():
    targets = np.zeros((2, 3, 4), "float32")
    logits = np.full((2, 3, 4), -1.0, "float32")
    logits[0, 0] = 1.0  # wrong, but not part of the answer
    logits[0, 2, :3] = 1.0
    weights = np.array([[0, 0, 2], [0, 2, 2]], "float32")
    metric = copy_task.BitsWrong()
    metric.update_state(targets, logits, weights)

    assert float(metric.result()) == 1.5


def test_the_check_sees_a_right_and_a_wrong_network():
    class Oracle:
        """Answers from the input, but never a vector that starts with 1."""

        def __init__(self, flaw):
            self.flaw = flaw

        def predict_on_batch(self, inputs):
            logits = np.full((*inputs.shape[:2], copy_task.WIDTH), -20.0)
            for x, y in zip(inputs, logits):
                length = int(x[:, copy_task.WIDTH + 1].argmax()) - 1
                bits = x[1 : length + 1, : copy_task.WIDTH]
                y[length + 2 : 2 * length + 2] += 40.0 * bits
                if self.flaw:
                    y[:, 0] = -20.0
            return logits

    loss, share = copy_task.check_every_length(Oracle(False), 4, seed=3)
    assert loss < 1e-6 and share == 1.0
    loss, share = copy_task.check_every_length(Oracle(True), 4, seed=3)
    assert loss > 0.5 and share < 0.6


def test_the_copy_script_runs_and_leaves_its_files(tmp_path, capsys):
    solved = copy_task.main(
        [
            *("--max-length", "2", "--units", "8", "--memory-dim", "4"),
            *("--updates", "4", "--output", str(tmp_path)),
        ]
    )
    printed = capsys.readouterr().out
    result = json.loads(printed.strip().splitlines()[-1])

    assert solved is False and result["solved"] is False
    assert result["updates"] == 4
    assert result["backend"] == keras.backend.backend()
    assert "target" in printed and "output" in printed
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2
    keras.models.load_model(tmp_path / "model.keras")


def test_bad_command_lines_are_explained(capsys):
    with pytest.raises(SystemExit):
        copy_task.parse_arguments(["--max-length", "0"])
    assert "--max-length: must be at least 1, not 0" in capsys.readouterr().err


def test_the_script_runs_from_another_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, copy_task.__file__, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0 and "--max-length" in done.stdout
