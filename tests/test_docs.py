"""Every code block of the README and every docstring example runs."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import baselines

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})


def modules():
    for package in (keras_armin, baselines):
        prefix = f"{package.__name__}."
        for info in pkgutil.iter_modules(package.__path__, prefix):
            if not info.ispkg:
                yield info.name


WITH_EXAMPLES = (
    "keras_armin.armin",
    "keras_armin.armin_cell",
    "keras_armin.baselines.lstm",
)


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples(name):
    names = {"keras": keras, "keras_armin": keras_armin, "np": np}
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names)

    assert result.failed == 0
    if name in WITH_EXAMPLES:
        assert result.attempted > 0


def test_the_readme_lists_every_argument():
    from keras_armin.armin_cell import cell_arguments

    text = README.read_text()
    for name in cell_arguments():
        stem = re.sub(r"^(kernel|recurrent|bias)_(?=init|reg|con)", "*_", name)
        assert f"`{name}`" in text or f"`{stem}`" in text, name


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link


def test_all_public_names_exist_and_are_documented():
    for name in keras_armin.__all__:
        assert getattr(keras_armin, name).__doc__
