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
from examples.support.networks import BitsWrong  # noqa: E402


def test_bits_wrong_counts_the_answer_only():
    targets = np.zeros((2, 3, 4), "float32")
    logits = np.full((2, 3, 4), -1.0, "float32")
    logits[0, 0] = 1.0  # wrong, but not part of the answer
    logits[0, 2, :3] = 1.0
    weights = np.array([[0, 0, 2], [0, 2, 2]], "float32")
    metric = BitsWrong()
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


@pytest.mark.slow("jax", "tensorflow")
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


@pytest.mark.slow
def test_the_script_runs_from_another_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, copy_task.__file__, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0 and "--max-length" in done.stdout
