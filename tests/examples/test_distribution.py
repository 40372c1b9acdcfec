"""Distributed training: the same weights, states and losses as one device.

Virtual devices of the CPU, and processes that talk over loopback. What they
run is in tests/helpers/distributed.py.
"""

import argparse
import ast
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples import char_lm
from examples.support import distribution
from examples.support import runs
from examples.support.cli import RunError
from examples.support.data import pixels
from examples.support.distribution.engine import Engine
from examples.support.distribution.engine import seed_of
from tests.helpers import distributed

BACKEND = keras.backend.backend()
ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def environments(count):
    """For each process what tells it of the others."""
    ports = [free_port() for _ in range(count)]
    for number in range(count):
        if BACKEND == "jax":
            yield {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(number),
            }
        elif BACKEND == "tensorflow":
            workers = [f"127.0.0.1:{port}" for port in ports]
            task = {"type": "worker", "index": number}
            config = {"cluster": {"worker": workers}, "task": task}
            yield {"TF_CONFIG": json.dumps(config)}
        else:  # as torchrun sets them
            yield {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
                "WORLD_SIZE": str(count),
                "RANK": str(number),
                "LOCAL_RANK": str(number),
            }


def start(environment, *arguments):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.helpers.distributed",
            *map(str, arguments),
        ],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(processes):
    """What they print until they end."""
    try:
        return [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def start_training(path, devices, *cases, how="data"):
    """Networks of `distributed.CASES` on so many devices."""
    command = [path, *cases, "--", "--distribute", how]
    if BACKEND == "torch":
        return start({}, "fork", free_port(), devices, *command)
    return start({}, "train", *command, "--virtual-devices", devices)


def finish(path, process):
    (printed,) = outputs([process])
    assert process.returncode == 0, printed
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def compare(found, case, expected):
    names = [name for name in expected if name != f"{case}/loss"]
    assert len(names) > 20
    for name in names:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=0, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(
        found[f"{case}/loss"], expected[f"{case}/loss"], rtol=1e-5
    )


@pytest.mark.slow("tensorflow", "torch")
@pytest.mark.parametrize(
    "cases",
    [
        ["carried"],
        # One test for all of them: its processes take most of the time.
        pytest.param(list(distributed.CASES), id="all", marks=pytest.mark.slow),
    ],
)
def test_several_devices_train_as_one(cases, tmp_path):
    """Weights, moments, carried states and losses of 20 updates."""
    several = start_training(
        tmp_path / "found.npz", 8 if BACKEND == "jax" else 2, *cases
    )
    expected = {case: distributed.train_here(case) for case in cases}
    found = finish(tmp_path / "found.npz", several)

    for case in cases:
        if case == "noisy":
            check_noise(found, expected["noisy"])
        else:
            compare(found, case, expected[case])
    check_own_state(found, expected["carried"])
    if BACKEND == "jax":
        states, kernel = specs(found)
        assert states == ["batch"] * 4 and kernel is None


def check_noise(found, expected):
    if BACKEND == "jax":
        # The noise of a sample does not depend on the number of devices.
        compare(found, "noisy", expected)
    several, one = found["noisy/loss"], expected["noisy/loss"]
    for losses in (several, one):
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    np.testing.assert_allclose(
        np.mean(several[-5:]), np.mean(one[-5:]), rtol=0.05
    )


def check_own_state(found, expected):
    """A device holds the state of its own samples."""
    shape = (distributed.BATCH, 8)
    (h,) = [x for x in expected.values() if np.shape(x) == shape]
    assert np.ptp(h, axis=0).min() > 1e-3, "the samples are not alike"
    # It was given the last samples in the end, the other way round.
    own = h[::-1][: distributed.BATCH // int(found["devices"])]
    np.testing.assert_allclose(found["own state"], own, rtol=0, atol=1e-5)


def specs(found):
    """On JAX: what states are split by, and a wide kernel's columns."""
    split = {
        name.removeprefix("sharding "): ast.literal_eval(str(value))
        for name, value in found.items()
        if name.startswith("sharding ")
    }
    kernel = (*split.pop("recurrent_kernel"), None, None)[1]
    assert "model" not in split.pop("address_recurrent_kernel")
    return [spec[0] for spec in split.values()], kernel


@pytest.mark.slow
def test_four_devices_train_as_one(tmp_path):
    """On JAX two share the batch, and two the kernels."""
    how = "model" if BACKEND == "jax" else "data"
    path = tmp_path / "found.npz"
    several = start_training(path, 4, "carried", how=how)
    expected = distributed.train_here("carried")
    found = finish(path, several)

    compare(found, "carried", expected)
    if BACKEND == "jax":
        states, kernel = specs(found)
        assert states == ["batch"] * 4 and kernel == "model"


# --- several processes, and the end of one ----------------------------------


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"one fish, two fish, red fish, blue fish\n" * 60)
    return [
        *("--data", str(text), "--units", "6", "--slots", "3"),
        *("--embedding", "5", "--batch-size", "4", "--steps", "4"),
        *("--updates", "9", "--epoch-updates", "3", "--addressing", "soft"),
        *("--validation-chars", "60", "--test-chars", "9", "--sample", "0"),
        *("--learning-rate", "1e-3"),
    ]


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_a_resume_goes_on(
    arguments, tmp_path, monkeypatch
):
    together = ["char_lm", *arguments, "--distribute", "data"]
    together += ["--output", tmp_path / "together"]

    def run(*more, dies=None):
        processes = [
            start(own | ({"DIES": "1"} if number == dies else {}), *more)
            for number, own in enumerate(environments(2))
        ]
        return outputs(processes), [p.returncode for p in processes]

    printed, codes = run(*together, dies=1)
    assert codes[1] == -9, printed[1]
    assert codes[0] > 0, printed[0]
    assert "another process of this run has ended" in printed[0]
    assert "Traceback" not in printed[0]

    left = shutil.copytree(tmp_path / "together", tmp_path / "left")
    printed, codes = run(*together, "--resume")
    assert codes == [0, 0], "\n".join(printed)
    result = json.loads(printed[0].splitlines()[-1])
    assert result["updates"] == 9 and "{" not in printed[1]

    monkeypatch.setattr(char_lm, "show", lambda *_: None)
    char_lm.main([*arguments, "--output", str(tmp_path / "one")])
    # What two have begun, one can end.
    char_lm.main([*arguments, "--output", str(left), "--resume"])
    for name in ("together", "left"):
        compare_runs(tmp_path / name, tmp_path / "one")


def compare_runs(folder, other):
    with (
        np.load(folder / runs.RESUME_FILE) as found,
        np.load(other / runs.RESUME_FILE) as expected,
    ):
        assert set(found.files) == set(expected.files)
        for name in set(found.files) - {"history", "generator"}:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=0, atol=1e-5, err_msg=name
            )
        logs = [json.loads(str(x["history"])) for x in (found, expected)]
    for metric in ("loss", "val_bpc"):
        first, second = ([epoch[metric] for epoch in log] for log in logs)
        np.testing.assert_allclose(first, second, rtol=1e-5)
    assert len((folder / "log.csv").read_text().splitlines()) == 4


# --- what cannot be ---------------------------------------------------------


def asked(**options):
    nothing = dict(distribute=None, virtual_devices=None, model_devices=None)
    sizes = dict(batch_size=6, model="armin", units=3, slots=2, memory_dim=None)
    return argparse.Namespace(**nothing | sizes | options)


def test_without_distribute_there_is_one_device(monkeypatch):
    assert distribution.start(asked()).devices == 1
    with pytest.raises(RunError, match="--virtual-devices needs --distribute"):
        distribution.start(asked(virtual_devices=2))
    if BACKEND == "torch":
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RunError, match="torchrun.*--distribute data"):
            distribution.start(asked())


def test_a_batch_has_to_be_split_evenly():
    engine = Engine()
    engine.devices = 4
    engine.check_batch_size(8)
    with pytest.raises(RunError, match="--batch-size 6 .* multiple of 4"):
        engine.check_batch_size(6)


def test_what_a_backend_cannot_do_is_explained(monkeypatch):
    if BACKEND == "jax":
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        with pytest.raises(RunError, match="Missing: JAX_COORDINATOR_ADDRESS"):
            distribution.start(asked(distribute="data"))
        monkeypatch.delenv("JAX_PROCESS_ID")
        with pytest.raises(RunError, match="--virtual-devices 2 comes too la"):
            keras.ops.zeros(())  # from now on the devices are known
            distribution.start(asked(distribute="data", virtual_devices=2))
        with pytest.raises(RunError, match="--model-devices 2 does not divid"):
            distribution.start(asked(distribute="model"))
        return
    with pytest.raises(RunError, match=f"model is for .*jax.*{BACKEND}"):
        distribution.start(asked(distribute="model"))
    with pytest.raises(RunError, match="--model-devices is for"):
        distribution.start(asked(distribute="data", model_devices=2))
    if BACKEND == "torch":
        with pytest.raises(RunError, match="torchrun --nproc-per-node"):
            distribution.start(asked(distribute="data"))
        with pytest.raises(RunError, match="--nproc-per-node 3"):
            distribution.start(asked(distribute="data", virtual_devices=3))
    else:
        monkeypatch.setenv("TF_CONFIG", "{}")
        with pytest.raises(RunError, match="TF_CONFIG asks for several"):
            distribution.start(asked(distribute="data", virtual_devices=3))


def test_each_device_has_a_seed_of_its_own():
    states = [seed_of(number, [7, 3]).tolist() for number in range(9)]

    assert states[0] == [7, 3], "a file of the first serves any number"
    assert len({first for first, _ in states}) == 9
    assert {count for _, count in states} == {3}


def test_filled_up_batches_have_the_mean_of_the_true_samples():
    images = np.arange(10, dtype="float32").reshape(10, 1, 1)
    labels = np.arange(10, dtype="int32")
    (batch,) = pixels.evaluation_batches(images, labels, multiple=4)
    x, y, weights = (part.numpy() for part in batch)

    assert len(x) == len(y) == 12 and (weights[10:] == 0).all()
    assert (weights * y).sum() / 12 == pytest.approx(labels.mean())
    assert (weights * y).sum() / weights.sum() == pytest.approx(labels.mean())
    plain = pixels.evaluation_batches(images, labels, multiple=5)
    assert [len(batch) for batch in plain] == [2]
