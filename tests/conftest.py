"""One backend per run, chosen by KERAS_BACKEND; `python -m tests` runs all."""

import collections
import functools
import gc
import itertools
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")
# Some processors announce AMX and cannot run it: a bfloat16 product outside
# XLA then ends the process. This keeps oneDNN to what they can do, and has to
# be set before a backend is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
from hypothesis import settings

# Keras is imported where it is needed: pytest's own process, which only hands
# out tests, would spend as long on it as each of those that run them.


@functools.cache
def _backend():
    import keras

    return keras.backend.backend()


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run the tests marked as slow too"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "slow(*backends): runs only with --all, on these backends or on every "
        "one if none is named",
    )
    config.addinivalue_line(
        "markers",
        "slow_after(count, *backends): of a parametrised test the cases beyond "
        "the first `count` are slow",
    )
    # Few examples, the same ones each time; with --all more, and new ones.
    settings.register_profile(
        "quick", max_examples=4, deadline=None, derandomize=True
    )
    settings.register_profile("all", max_examples=15, deadline=None)
    settings.load_profile("all" if config.getoption("--all") else "quick")


def pytest_collection_finish():
    """Nothing that was imported is garbage: do not look through it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    kept, slow, cases = [], [], collections.Counter()
    for item in items:
        is_slow = _is_slow(item, cases[item.nodeid.split("[")[0]])
        if not is_slow:
            cases[item.nodeid.split("[")[0]] += 1
        (slow if is_slow else kept).append(item)
    config.hook.pytest_deselected(items=slow)
    items[:] = kept


def _is_slow(item, cases_before):
    marks = [marker.args for marker in item.iter_markers("slow")]
    for marker in item.iter_markers("slow_after"):
        count, *backends = marker.args
        if cases_before >= count:
            marks.append(backends)
    return any(not backends or _backend() in backends for backends in marks)


@pytest.fixture(autouse=True)
def seeded():
    import keras

    keras.utils.set_random_seed(7)


_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def little_kept():
    """Release what JAX has compiled, before there is too much of it.

    Every compiled function takes some memory maps, of which Linux gives a
    process 65,530 and then lets it crash.
    """
    yield
    # Not after each test: it takes a moment to count them.
    if _backend() != "jax" or next(_tests_run) % 10:
        return
    if _memory_maps() > 30_000:
        import jax

        jax.clear_caches()
        gc.collect()


def _memory_maps():
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def float64():
    """Real float64: JAX gives float32 under that name unless told."""
    if _backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def no_jit():
    """JAX without compilation, where a test runs hundreds of tiny graphs."""
    if _backend() != "jax":
        yield
        return
    import jax

    with jax.disable_jit():
        yield
