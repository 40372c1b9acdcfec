"""The notebooks run from top to bottom, and are small as they are committed."""

import json
import pathlib

import pytest

from tests.helpers.common import slow_except_on

nbclient = pytest.importorskip("nbclient", reason="runs the notebooks")
nbformat = pytest.importorskip("nbformat", reason="reads the notebooks")
pytest.importorskip(
    "tensorflow", reason="the notebooks' data pipelines are tf.data"
)

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LARGEST = 400_000  # bytes
# A notebook takes half a minute where it has to be compiled.
SLOW = pytest.mark.slow
QUICK = {
    "your_own_model": slow_except_on("torch"),
}


def test_all_five_are_there():
    assert [path.stem for path in NOTEBOOKS] == [
        "character_model",
        "copy_task",
        "forecast",
        "permuted_digits",
        "your_own_model",
    ]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=QUICK.get(path.stem, SLOW))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_in_quick_mode(path, monkeypatch):
    monkeypatch.setenv("KERAS_ARMIN_QUICK", "1")
    # The kernel has its own way to show pictures.
    monkeypatch.delenv("MPLBACKEND")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()

    assert pictures(notebook)


def pictures(notebook):
    return [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_results(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    printed = json.dumps(notebook)

    assert counts == list(range(1, len(code) + 1))
    assert pictures(notebook)
    assert path.stat().st_size < LARGEST
    assert "Traceback" not in printed and "/root" not in printed
