"""Run the suite on every backend and sum up the results.

    python -m tests                     all three
    python -m tests --all               with the slow tests too
    python -m tests jax torch           some
    python -m tests torch -- -k mask    with arguments for pytest

The last line is `N passed, N failed, N skipped`. A backend that cannot be
imported counts as a failure. Expected failures count as skipped; pytest lists
them with their reasons.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

BACKENDS = ("tensorflow", "jax", "torch")
# There is a process for each core already, and the sizes are tiny.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}
ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(backend, pytest_arguments):
    """Run pytest on one backend; returns (passed, failed, skipped)."""
    print(f"\n=== {backend} ===", flush=True)
    if importlib.util.find_spec(backend) is None:
        print(f"{backend} is not installed")
        return 0, 1, 0
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        finished = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--numprocesses=auto",
                "--dist=worksteal",
                f"--junit-xml={report}",
                *pytest_arguments,
            ],
            cwd=ROOT,
            env={
                **ONE_THREAD,
                **compiled_once(folder),
                **os.environ,
                "KERAS_BACKEND": backend,
            },
        )
        passed, failed, skipped = count(report)
    if finished.returncode and not failed:
        failed = 1  # pytest itself broke: nothing collected, or a crash
    return passed, failed, skipped


def compiled_once(folder):
    """What JAX has compiled serves all tests: many compile the same loops.

    Compiling takes most of the time on JAX. XLA needs half of it if it does not
    optimise what runs for a moment, and less than half of that again without
    the newer of its two code generators for CPUs.
    """
    return {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 "
        "--xla_cpu_use_fusion_emitters=false",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def count(report):
    if not report.exists():
        return 0, 0, 0
    suite = ElementTree.parse(report).getroot().find("testsuite")
    total, skipped = int(suite.get("tests")), int(suite.get("skipped"))
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    return total - skipped - failed, failed, skipped


def main(arguments):
    pytest_arguments = []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, pytest_arguments = arguments[:cut], arguments[cut + 1 :]
    if "--all" in arguments:
        arguments = [x for x in arguments if x != "--all"]
        pytest_arguments.append("--all")
    backends = arguments or BACKENDS
    unknown = set(backends) - set(BACKENDS)
    if unknown:
        sys.exit(f"unknown backends {sorted(unknown)}; there are {BACKENDS}")
    results = [run(backend, pytest_arguments) for backend in backends]
    for backend, (passed, failed, skipped) in zip(backends, results):
        print(f"{backend}: {passed} passed, {failed} failed, {skipped} skipped")
    passed, failed, skipped = map(sum, zip(*results))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
