"""The wheel, the sdist, and use without TensorFlow."""

import email
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

import keras_armin
from tests.helpers.common import BACKEND
from tests.helpers.common import slow_except_on

pytestmark = slow_except_on("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both distributions, built from a copy without leftovers."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    done = subprocess.run(
        [*command, str(folder / "dist"), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_the_wheel_holds_the_package_alone(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}

    assert (
        wheel.name == f"keras_armin-{keras_armin.__version__}-py3-none-any.whl"
    )
    assert "keras_armin/py.typed" in names
    assert "keras_armin/backends/jax.py" in names
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "keras_armin"
    }


def test_the_package_needs_keras_and_numpy_only(built):
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    needed = [
        line.split(">")[0].strip()
        for line in metadata.get_all("Requires-Dist")
        if "extra ==" not in line
    ]

    assert sorted(needed) == ["keras", "numpy"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License"] == "MIT"
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"tensorflow", "jax", "torch", "examples", "test"} <= extras


def test_the_sdist_builds_and_has_its_licence(built):
    (sdist,) = built.glob("*.tar.gz")
    names = tarfile.open(sdist).getnames()

    assert any(name.endswith("/LICENSE") for name in names)
    assert any(name.endswith("/setup.cfg") for name in names)


USE = """
import numpy as np, keras, keras_armin
x = np.zeros((2, 3, 4), "float32")
model = keras.Sequential([keras.Input((3, 4)), keras_armin.ARMIN(4)])
model.compile("sgd", "mse")
model.fit(x, np.zeros((2, 6)), verbose=0)
print("version", keras_armin.__version__, keras_armin.__file__)
"""


def run_python(code, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_installed_wheel_works_from_an_empty_folder(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_python(USE, empty, PYTHONPATH=str(tmp_path / "site"))

    assert done.returncode == 0, done.stderr
    assert f"version {keras_armin.__version__} {tmp_path}" in done.stdout


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow is the backend of this run"
)
@pytest.mark.slow("jax")
def test_it_works_with_tensorflow_and_matplotlib_out_of_reach(tmp_path):
    absent = "import sys; sys.modules['{}'] = None\n"
    code = absent.format("tensorflow") + absent.format("matplotlib") + USE
    done = run_python(code, tmp_path, PYTHONPATH=str(ROOT))

    assert done.returncode == 0, done.stderr
