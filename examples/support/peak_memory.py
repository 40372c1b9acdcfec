"""Peak memory of one training step, measured in a separate process.

    python -m examples.support.peak_memory ARMIN 128 20 128 64 200

The step is run once, so that everything is compiled. Then free memory is
returned to the system, the kernel's record of the peak is reset, and the step
is run again. The script prints how far the peak rose above what the process
held before, in bytes. TensorFlow does not return memory: there the baseline is
what the process held before the first run.
"""

import ctypes
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLEAR = pathlib.Path("/proc/self/clear_refs")


def measure(name, units, slots, inputs, batch, time):
    """Start the process, and return the bytes."""
    if not CLEAR.exists():
        raise SystemExit(
            "Peak memory is measured through /proc/self/clear_refs, which "
            "this system does not have. It takes a Linux kernel."
        )
    sizes = [str(n) for n in (units, slots, inputs, batch, time)]
    done = subprocess.run(
        [sys.executable, "-m", "examples.support.peak_memory", name, *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} with sizes {sizes} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _main(name, *sizes):
    from examples.support import contenders

    units, slots, inputs, batch, time = map(int, sizes)
    layer = name.removesuffix(contenders.XLA)
    calls = contenders.training_steps(
        units, slots, inputs, batch, time, only=[layer]
    )
    if name not in calls:
        sys.exit(f"no such layer: {name}")
    call = calls[name]
    before = _status("VmRSS")
    call()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    CLEAR.write_text("5")
    if contenders.BACKEND != "tensorflow":
        before = _status("VmRSS")
    call()
    print(json.dumps(_status("VmHWM") - before))


if __name__ == "__main__":
    _main(*sys.argv[1:])
