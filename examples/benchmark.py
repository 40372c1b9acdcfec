"""Measure ARMIN's speed and memory against an LSTM with as many parameters.

    KERAS_BACKEND=jax python examples/benchmark.py train
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
import sys

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from examples.support import benchmark_plots
from examples.support import contenders
from examples.support import peak_memory
from examples.support import timing

INPUTS = 128
# Those of the copy task.
ALGORITHMIC_INPUTS = 10

# Sizes for each benchmark: those of the table, then those that are varied one
# at a time.
SETTINGS = {
    "train": {"units": 250, "slots": 20, "batch": 128, "time": 50},
    "memory": {"units": 128, "slots": 20, "batch": 64, "time": 200},
    "inference": {"units": 500, "slots": 8, "batch": 1, "time": 500},
    "scaling": {"units": 32, "slots": 20, "batch": 4, "time": 1000},
    # Every network with its own sizes.
    "networks": {"batch": 1, "time": 100},
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
SYMBOLS = 50


def training_times(setting, repeats, title):
    calls = contenders.training_steps(
        setting["units"],
        setting["slots"],
        INPUTS,
        setting["batch"],
        setting["time"],
    )
    best, _ = timing.best_times(calls, repeats, title)
    return {name: 1e3 * seconds for name, seconds in best.items()}


def peak_memories(setting, repeats, title):
    """The smallest of several processes: what else they hold varies."""
    names = [contenders.FUSED, contenders.PLAIN, contenders.LSTM]
    if contenders.BACKEND == "torch":
        names.append(contenders.TORCH_LSTM)
    print(title)
    bar = keras.utils.Progbar(len(names) * repeats, unit_name="process")
    found = {}
    for name in names:
        for _ in range(repeats):
            size = peak_memory.measure(
                name,
                setting["units"],
                setting["slots"],
                INPUTS,
                setting["batch"],
                setting["time"],
            )
            found[name] = min(found.get(name, size / 1e6), size / 1e6)
            bar.add(1)
    return found


def inference_times(setting, repeats, title):
    """Microseconds per step: a given sequence, and a generated one."""
    units, slots, time = setting["units"], setting["slots"], setting["time"]
    runs = contenders.inference_runs(
        units, slots, INPUTS, setting["batch"], time
    )
    generators = contenders.generators(units, slots, INPUTS, SYMBOLS, time)
    calls = {f"{name}, sequence": call for name, call in runs.items()}
    for name, call in generators.items():
        calls[f"{name}, generating"] = call
    best, _ = timing.best_times(calls, repeats, title)
    return {name: 1e6 * seconds / time for name, seconds in best.items()}


def scaling_times(setting, repeats, title):
    """Microseconds of a training step per time step; seconds to compile."""
    calls = contenders.training_steps(
        setting["units"],
        setting["slots"],
        INPUTS,
        setting["batch"],
        setting["time"],
        only=[contenders.FUSED],
    )
    best, first = timing.best_times(calls, repeats, title, warm_up=1)
    found = {}
    for name, seconds in best.items():
        found[f"{name}, us a time step"] = 1e6 * seconds / setting["time"]
        found[f"{name}, s longer the first time"] = max(
            0.0, first[name] - seconds
        )
    return found


def network_times(setting, repeats, title):
    """Every network of the package, at the sizes of the paper."""
    calls = contenders.network_training_steps(
        ALGORITHMIC_INPUTS, setting["batch"], setting["time"]
    )
    best, _ = timing.best_times(calls, repeats, title)
    return {name: 1e3 * seconds for name, seconds in best.items()}


MEASURES = {
    "train": (training_times, "ms a training step", 7),
    "memory": (peak_memories, "MB at the peak of a training step", 3),
    "inference": (inference_times, "us a time step", 7),
    "scaling": (scaling_times, "", 3),
    "networks": (network_times, "ms a training step", 5),
}


def measure(question, repeats=None, quick=False, small=False):
    """All points of a question, as what `--json` writes."""
    function, unit, least = MEASURES[question]
    repeats = repeats or least
    base = dict(SETTINGS[question])
    if small:
        base.update({k: v for k, v in SMALL.items() if k in base})
    varied = (QUICK if quick or small else VARIED)[question]
    points = []
    for name, values in varied.items():
        for value in values:
            setting = {**base, name: value}
            title = f"{question}: " + ", ".join(
                f"{name} {value}" for name, value in setting.items()
            )
            found = function(setting, repeats, title)
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


def table(found, unit):
    """Values, and each relative to the best LSTM and the reference loop."""
    lines = [f"  {'':34} {unit:>12}"]
    for name, value in found.items():
        line = f"  {name:34} {value:12.1f}"
        # "LAYER, KIND" is compared with its own kind.
        kind = name.partition(", ")[2]
        lstm = [v for k, v in found.items() if "LSTM" in k and kind in k]
        if lstm:
            line += f"   {value / min(lstm):5.2f} x the best LSTM"
        if contenders.FUSED in found and contenders.PLAIN not in found:
            # With XLA as with XLA.
            xla = contenders.XLA if name.endswith(contenders.XLA) else ""
            armin = found[contenders.FUSED + xla]
            line += f"   {value / armin:5.2f} x ARMIN"
        if contenders.PLAIN in found:
            plain = min(v for k, v in found.items() if contenders.PLAIN in k)
            line += f"   {value / plain:5.2f} x the plain ARMIN"
        lines.append(line)
    return "\n".join(lines) + "\n"


def read_results(path):
    try:
        result = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(result, dict) or "points" not in result:
        raise SystemExit(f"{path} is not a file that `--json` has written.")
    return result


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for question in MEASURES:
        command = commands.add_parser(question)
        command.add_argument(
            "--repeats", type=int, help="runs to take the best of"
        )
        command.add_argument("--quick", action="store_true", help="fewer sizes")
        command.add_argument(
            "--small", action="store_true", help="tiny sizes, with --quick"
        )
        command.add_argument("--json", help="file to write the numbers to")
        command.add_argument("--plot", help="file to write the picture to")
    plot = commands.add_parser("plot")
    plot.add_argument("results", nargs="+", help="files of `--json`")
    plot.add_argument("--plot", required=True)
    options = parser.parse_args(arguments)
    repeats = getattr(options, "repeats", None)
    if repeats is not None and repeats < 1:
        parser.error(f"--repeats must be at least 1, not {options.repeats}")
    return options


def main(arguments=None):
    options = parse(arguments)
    if options.command == "plot":
        results = [read_results(path) for path in options.results]
        if len({result["question"] for result in results}) > 1:
            raise SystemExit("`plot` takes files that answer one question.")
        benchmark_plots.draw(results, options.plot)
        return
    result = measure(
        options.command, options.repeats, options.quick, options.small
    )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1))
    picture = options.plot or f"{options.command}-{result['backend']}.png"
    benchmark_plots.draw([result], picture)
    print(f"The picture is in {picture}.")


if __name__ == "__main__":
    main()
