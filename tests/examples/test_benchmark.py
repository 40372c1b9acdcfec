"""The benchmark in its quickest form, on every backend."""

import json
import math
import pathlib
import subprocess

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the benchmark draws what it measures")

from examples import benchmark
from examples.support import benchmarking
from keras_armin import ARMIN
from keras_armin import baselines
from tests.helpers.common import BACKEND
from tests.helpers.common import slow_except_on

PNG = b"\x89PNG"


@slow_except_on("torch")
def test_the_lstm_has_as_many_parameters():
    assert benchmarking.equal_lstm_units(250, 20, 128) == 470
    for units, slots in ((64, 5), (250, 100), (500, 512)):
        found = benchmarking.layers(units, slots, 128)
        for name in (benchmarking.FUSED, benchmarking.LSTM):
            found[name].build((None, None, 128))
        armin = sum(
            math.prod(v.shape)
            for v in found[benchmarking.FUSED].trainable_variables
        )
        lstm = found[benchmarking.LSTM].count_params()

        assert benchmarking.armin_parameters(units, slots, 128) == armin
        assert 0.95 * armin < lstm < 1.05 * armin


def test_contenders_take_turns_and_keep_their_best(monkeypatch):
    clock, calls = [0.0], []
    durations = {"a": iter([9, 8, 3, 2, 4]), "b": iter([9, 8, 7, 5, 6])}

    def call(name):
        calls.append(name)
        clock[0] += next(durations[name])

    monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: clock[0])
    best, first = benchmarking.best_times(
        {name: lambda name=name: call(name) for name in durations}, 3, "title"
    )

    assert calls == ["a", "b"] * 5
    assert best == {"a": 2, "b": 5}
    assert first == {"a": 9, "b": 9}


def test_every_network_is_measured_at_the_sizes_of_the_paper():
    found = benchmarking.networks()

    assert {f"{name}Cell" for name in found if hasattr(baselines, name)} == {
        name for name in baselines.__all__ if name.endswith("Cell")
    }
    assert all(layer.return_sequences for layer in found.values())
    sizes = {
        name: (layer.cell.units, layer.cell.memory_slots, layer.cell.memory_dim)
        for name, layer in found.items()
        if getattr(layer.cell, "memory_slots", 0) and name != "SAB"
    }
    heads = (120, 128, 20)
    assert sizes == {
        "ARMIN": (100, 50, 32),
        "AwTA": (100, 50, 32),
        "TARDIS": (120, 50, 32),
        **dict.fromkeys(("NTM", "DNC", "SAM"), heads),
    }


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    "question",
    [
        pytest.param("train", marks=slow_except_on("torch")),
        pytest.param("inference", marks=slow_except_on("jax")),
        pytest.param("scaling", marks=slow_except_on("torch")),
        pytest.param("networks", marks=slow_except_on("torch")),
    ],
)
def test_a_question_gives_a_table_numbers_and_a_picture(
    question, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(
        benchmark.QUICK,
        question,
        {k: v[:1] for k, v in benchmark.QUICK[question].items()},
    )
    some = {"ARMIN": ARMIN(4), "SAB": baselines.SAB(4)}
    monkeypatch.setattr(benchmarking, "networks", lambda: some)
    numbers, picture = tmp_path / "found.json", tmp_path / "picture.png"
    arguments = [question, "--quick", "--small", "--repeats", "1"]
    benchmark.main([*arguments, "--json", f"{numbers}", "--plot", f"{picture}"])

    result = json.loads(numbers.read_text())
    (point,) = result["points"]
    assert result["backend"] == BACKEND
    assert any(name.startswith("ARMIN") for name in point["found"])
    assert all(value >= 0 for value in point["found"].values())
    if question == "train":
        assert {"RNN(ARMINCell)", "keras.layers.LSTM"} <= set(point["found"])
        assert (BACKEND == "torch") == ("torch.nn.LSTM" in point["found"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in point["found"])
    assert picture.read_bytes().startswith(PNG)

    both = tmp_path / "both.png"
    benchmark.main(["plot", f"{numbers}", f"{numbers}", "--plot", f"{both}"])
    assert both.read_bytes().startswith(PNG)


@pytest.mark.slow("jax", "tensorflow")
def test_further_networks_have_as_many_parameters_as_armin(tmp_path, capsys):
    names = list(benchmarking.QUOTED)
    for name in names:
        layer = benchmarking.quoted_layer(name, 64, 20, 32)
        layer.build((None, None, 32))
        count = sum(np.prod(w.shape) for w in layer.trainable_weights)
        armin = benchmarking.armin_parameters(64, 20, 32)
        assert 0.95 < count / armin < 1.05, name
    picture = tmp_path / "picture.png"
    command = ["train", "--small", "--repeats", "1", "--plot", f"{picture}"]
    benchmark.main([*command, "--model", "NAS", "FSLSTM"])

    printed = capsys.readouterr().out
    assert "NAS" in printed and "FSLSTM" in printed
    assert picture.read_bytes().startswith(PNG)
    # It is not what the others are compared with.
    found = {"FSLSTM": 1.0, "keras.layers.LSTM": 4.0}
    assert "0.25 x the best LSTM" in benchmark.table(found, "ms")


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="the peak is read from /proc, which only Linux has",
)
def test_the_peak_is_that_of_the_step():
    # Of one sequence that is ten times as long as the other.
    short, long = (
        benchmarking.peak_memory("ARMIN", 32, 4, 16, 16, time)
        for time in (100, 1000)
    )

    assert long > 2 * max(short, 1_000_000)


def test_a_failed_process_says_what_failed(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stderr="out of memory")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(benchmarking, "_CLEAR_REFS", pathlib.Path(__file__))
    with pytest.raises(RuntimeError, match=r"ARMIN .*\nout of memory"):
        benchmarking.peak_memory("ARMIN", 4, 2, 3, 2, 5)


@pytest.mark.parametrize("text", ["not json", "[1]", "{}"])
def test_a_file_that_is_not_a_result_is_refused(text, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(text)

    with pytest.raises(SystemExit, match="found.json"):
        benchmark.main(["plot", f"{path}", "--plot", f"{tmp_path / 'x.png'}"])


def test_repeats_of_zero_are_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["train", "--repeats", "0"])

    assert "--repeats: must be at least 1" in capsys.readouterr().err
