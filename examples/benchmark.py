"""Measure ARMIN's speed and memory against an LSTM with as many parameters.

    KERAS_BACKEND=jax python examples/benchmark.py train
    KERAS_BACKEND=jax python examples/benchmark.py train --model NAS RHN
    KERAS_BACKEND=jax python examples/benchmark.py memory
    KERAS_BACKEND=jax python examples/benchmark.py inference
    KERAS_BACKEND=jax python examples/benchmark.py scaling
    KERAS_BACKEND=jax python examples/benchmark.py networks
    python examples/benchmark.py plot jax.json torch.json --plot both.png

Each benchmark prints a table and writes a picture. `--json` saves the numbers;
`plot` draws several such files side by side. Times are the best of several
runs that take turns in one process, so that they can be compared even on a busy
machine. Measurements are in examples/RESULTS.md.
"""

import argparse
import json
import os
import pathlib
import re
import sys

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib

from examples.support import benchmarking
from examples.support import cli
from examples.support import plotting
from examples.support.benchmarking import FUSED
from examples.support.benchmarking import LSTM
from examples.support.benchmarking import PLAIN
from examples.support.benchmarking import TORCH_LSTM
from examples.support.benchmarking import XLA

INPUTS = 128
ALGORITHMIC_INPUTS = 10  # those of the copy task
SYMBOLS = 50

# Sizes of each benchmark, and those that are varied one at a time.
SETTINGS = {
    "train": {"units": 250, "slots": 20, "batch": 128, "time": 50},
    "memory": {"units": 128, "slots": 20, "batch": 64, "time": 200},
    "inference": {"units": 500, "slots": 8, "batch": 1, "time": 500},
    "scaling": {"units": 32, "slots": 20, "batch": 4, "time": 1000},
    "networks": {"batch": 1, "time": 100},  # each has its own other sizes
}
VARIED = {
    "train": {"units": [64, 125, 250], "slots": [5, 20, 100]},
    "memory": {"units": [64, 128, 256], "slots": [5, 20, 100]},
    "inference": {"slots": [8, 64, 512]},
    "scaling": {"time": [100, 1000, 5000, 20000]},
    "networks": {"batch": [1, 16]},
}
QUICK = {
    "train": {"slots": [5, 20]},
    "memory": {"slots": [5, 100]},
    "inference": {"slots": [8, 512]},
    "scaling": {"time": [10, 50]},
    "networks": {"batch": [1]},
}
SMALL = {"units": 8, "batch": 2, "time": 10}


def training_times(repeats, title, units, slots, batch, time, quoted=()):
    layers = benchmarking.layers(units, slots, INPUTS, quoted)
    calls = benchmarking.training_steps(layers, batch, time, INPUTS)
    best, _ = benchmarking.best_times(calls, repeats, title)
    return {name: 1e3 * seconds for name, seconds in best.items()}


def peak_memories(repeats, title, units, slots, batch, time):
    """The smallest of several processes, whose other memory varies."""
    names = [FUSED, PLAIN, LSTM]
    if benchmarking.BACKEND == "torch":
        names.append(TORCH_LSTM)
    print(title)
    bar = keras.utils.Progbar(len(names) * repeats, unit_name="process")
    found = {}
    for name in names:
        for _ in range(repeats):
            size = benchmarking.peak_memory(
                name, units, slots, INPUTS, batch, time
            )
            found[name] = min(found.get(name, size / 1e6), size / 1e6)
            bar.add(1)
    return found


def inference_times(repeats, title, units, slots, batch, time):
    """Microseconds per step of a given sequence, and of a generated one."""
    layers = benchmarking.layers(units, slots, INPUTS)
    del layers[PLAIN]
    given = benchmarking.inference_runs(layers, batch, time, INPUTS)
    generated = benchmarking.generators(units, slots, INPUTS, SYMBOLS, time)
    calls = {f"{name}, sequence": call for name, call in given.items()}
    for name, call in generated.items():
        calls[f"{name}, generating"] = call
    best, _ = benchmarking.best_times(calls, repeats, title)
    return {name: 1e6 * seconds / time for name, seconds in best.items()}


def scaling_times(repeats, title, units, slots, batch, time):
    """Microseconds of a training step per time step; seconds to compile."""
    layers = {FUSED: benchmarking.layers(units, slots, INPUTS)[FUSED]}
    calls = benchmarking.training_steps(layers, batch, time, INPUTS)
    best, first = benchmarking.best_times(calls, repeats, title, warm_up=1)
    found = {}
    for name, seconds in best.items():
        found[f"{name}, us a time step"] = 1e6 * seconds / time
        longer = max(0.0, first[name] - seconds)
        found[f"{name}, s longer the first time"] = longer
    return found


def network_times(repeats, title, batch, time):
    """Every network of the package, with the sizes of the paper."""
    calls = benchmarking.training_steps(
        benchmarking.networks(), batch, time, ALGORITHMIC_INPUTS
    )
    best, _ = benchmarking.best_times(calls, repeats, title)
    return {name: 1e3 * seconds for name, seconds in best.items()}


MEASURES = {
    "train": (training_times, "ms a training step", 7),
    "memory": (peak_memories, "MB at the peak of a training step", 3),
    "inference": (inference_times, "us a time step", 7),
    "scaling": (scaling_times, "", 3),
    "networks": (network_times, "ms a training step", 5),
}


def measure(question, repeats=None, quick=False, small=False, quoted=()):
    """All points of a benchmark, as `--json` writes them.

    `quoted` are networks that "train" also measures, at its own sizes alone.
    """
    function, unit, default_repeats = MEASURES[question]
    repeats = repeats or default_repeats
    base = dict(SETTINGS[question])
    if small:
        base.update({k: v for k, v in SMALL.items() if k in base})
    varied = (QUICK if quick or small else VARIED)[question]
    further = {}
    if quoted:
        varied, further = {"units": [base["units"]]}, {"quoted": quoted}
    points = []
    for name, values in varied.items():
        for value in values:
            setting = {**base, name: value}
            sizes = ", ".join(f"{k} {v}" for k, v in setting.items())
            found = function(
                repeats, f"{question}: {sizes}", **setting, **further
            )
            print(table(found, unit))
            points.append({"varied": name, **setting, "found": found})
    return {
        "question": question,
        "backend": keras.backend.backend(),
        "unit": unit,
        "repeats": repeats,
        "inputs": ALGORITHMIC_INPUTS if question == "networks" else INPUTS,
        "points": points,
    }


# Neither FSLSTM nor the like.
_LSTMS = re.compile(r"(keras\.layers\.|torch\.nn\.|LayerNorm)LSTM")


def table(found, unit):
    """Values, also relative to the best LSTM and the reference loop."""
    lines = [f"  {'':34} {unit:>12}"]
    for name, value in found.items():
        line = f"  {name:34} {value:12.1f}"
        # "LAYER, KIND" is compared with its own kind.
        kind = name.partition(", ")[2]
        lstm = [v for k, v in found.items() if _LSTMS.match(k) and kind in k]
        if lstm:
            line += f"   {value / min(lstm):5.2f} x the best LSTM"
        if PLAIN in found:
            plain = min(v for k, v in found.items() if PLAIN in k)
            line += f"   {value / plain:5.2f} x the reference loop"
        elif FUSED in found:
            armin = found[FUSED + (XLA if name.endswith(XLA) else "")]
            line += f"   {value / armin:5.2f} x ARMIN"
        lines.append(line)
    return "\n".join(lines) + "\n"


def read_results(path):
    try:
        result = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(result, dict) or "points" not in result:
        raise SystemExit(f"{path} was not written by `--json`.")
    return result


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for question in MEASURES:
        command = commands.add_parser(question)
        command.add_argument(
            "--repeats", type=cli.positive, help="runs to take the best of"
        )
        command.add_argument("--quick", action="store_true", help="fewer sizes")
        command.add_argument("--small", action="store_true", help="tiny sizes")
        if question == "train":
            command.add_argument(
                "--model",
                nargs="+",
                default=[],
                choices=benchmarking.QUOTED,
                help="further networks, with as many parameters as ARMIN",
            )
        command.add_argument("--json", help="file to write the numbers to")
        command.add_argument("--plot", help="file to write the picture to")
    plot = commands.add_parser("plot")
    plot.add_argument("results", nargs="+", help="files written by `--json`")
    plot.add_argument("--plot", required=True)
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    matplotlib.use("Agg")
    if arguments.command == "plot":
        results = [read_results(path) for path in arguments.results]
        if len({result["question"] for result in results}) > 1:
            raise SystemExit("`plot` takes files of one benchmark.")
        plotting.draw_benchmark(results, arguments.plot)
        return
    result = measure(
        arguments.command,
        arguments.repeats,
        arguments.quick,
        arguments.small,
        getattr(arguments, "model", ()),
    )
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1))
    picture = arguments.plot or f"{arguments.command}-{result['backend']}.png"
    plotting.draw_benchmark([result], picture)
    print(f"The picture is in {picture}.")


if __name__ == "__main__":
    main()
