"""Export models, run the files in a separate process, and compare."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

import keras_armin
from keras_armin.export_lib import ENDINGS
from tests.helpers.common import array

LOADER = pathlib.Path(__file__).with_name("load_exported.py")
TOLERANCE = 1e-4


def run_exported(folder, jobs, stepped=False):
    """Run `jobs`, a dict from a name to `(format, file, calls)`.

    `calls` is a list of calls, each a dict from the names of the inputs to
    arrays; `stepped` says that the files hold single steps, which are to be
    run along the first input. Returns for each name a list of lists of
    outputs.
    """
    written = []
    for name, (format, file, calls) in jobs.items():
        given = {
            f"{number:03}/{key}": x
            for number, call in enumerate(calls)
            for key, x in call.items()
        }
        np.savez(folder / f"{name}.in.npz", **given)
        written.append(
            {
                "format": format,
                "file": str(file),
                "inputs": str(folder / f"{name}.in.npz"),
                "outputs": str(folder / f"{name}.out.npz"),
                "stepped": stepped,
            }
        )
    (folder / "jobs.json").write_text(json.dumps(written))
    done = subprocess.run(
        [sys.executable, str(LOADER), str(folder / "jobs.json")],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: _outputs(folder / f"{name}.out.npz") for name in jobs}


def _outputs(file):
    calls = {}
    with np.load(file) as found:
        for name in found.files:
            calls.setdefault(name.split("/")[0], []).append(found[name])
    return list(calls.values())


def call_model(model, call):
    inputs = list(call.values())
    outputs = model(inputs if len(inputs) > 1 else inputs[0])
    return [array(y) for y in keras.tree.flatten(outputs)]


def check_exported(folder, format, models, calls, **arguments):
    """Export `models`, by name, and see that the files compute the same.

    `calls` is a dict from the names to lists of calls.
    """
    jobs, expected = {}, {}
    for name, model in models.items():
        file = folder / f"{name}{ENDINGS[format]}"
        keras_armin.export(model, file, format, **arguments)
        jobs[name] = (format, file, calls[name])
        expected[name] = [call_model(model, call) for call in calls[name]]
    found = run_exported(folder, jobs)
    for name in models:
        assert len(found[name]) == len(expected[name])
        for got, wanted in zip(found[name], expected[name]):
            assert len(got) == len(wanted)
            for x, y in zip(got, wanted):
                assert x.shape == y.shape, name
                np.testing.assert_allclose(x, y, atol=TOLERANCE, err_msg=name)
