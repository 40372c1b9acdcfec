"""What the documents show runs, what they link to exists."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import tempfile

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import baselines
from keras_armin import callbacks
from tests.helpers.common import slow_except_on

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 4


@slow_except_on("tensorflow")
def test_the_code_of_the_readme_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README block {number}", "exec"), names)


def modules():
    for package in (keras_armin, baselines, callbacks):
        prefix = f"{package.__name__}."
        for info in pkgutil.iter_modules(package.__path__, prefix):
            if not info.ispkg:
                yield info.name


WITH_EXAMPLES = (
    "keras_armin.armin",
    "keras_armin.armin_cell",
    "keras_armin.baselines.lstm",
    "keras_armin.callbacks.resume_training",
)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples(name):
    names = {
        "keras": keras,
        "keras_armin": keras_armin,
        "np": np,
        "tempfile": tempfile,
    }
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names)

    assert result.failed == 0
    if name in WITH_EXAMPLES:
        assert result.attempted > 0


def test_the_docstrings_describe_every_argument():
    cell, layer = inspect.signature(ARMINCell), inspect.signature(ARMIN)
    for name in {*cell.parameters, *layer.parameters} - {"kwargs"}:
        assert re.search(rf"\b{name}\b", ARMIN.__doc__), name
    for name in set(cell.parameters) - {"kwargs"}:
        assert re.search(rf"\b{name}\b.*:", ARMINCell.__doc__), name


def test_the_arguments_of_the_readme_have_its_defaults():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", README.read_text(), re.M)
    parameters = inspect.signature(ARMIN).parameters

    assert len(rows) == 10
    for name, default in rows:
        expected = parameters[name].default
        if expected is not inspect.Parameter.empty:
            written = default.strip("`").split("`")[0].strip('"')
            assert written == str(expected), name


def anchors(path):
    """Of the headings of a Markdown file, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in titles
    }


DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "examples/RESULTS.md",
    "examples/trained/README.md",
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text())

    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 220


def test_all_public_names_exist_and_are_documented():
    for name in keras_armin.__all__:
        assert getattr(keras_armin, name).__doc__


def test_what_users_read_takes_public_modules_only():
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    package = ROOT / "keras_armin" / "__init__.py"
    assert notebooks
    for path in (README, package, *notebooks):
        found = re.findall(
            r"keras_private|examples\.support|keras_armin\.backends",
            path.read_text(),
        )
        assert not found, path.name
