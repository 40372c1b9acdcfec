"""One backend per run, chosen by KERAS_BACKEND; `python -m tests` runs all."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")
# Some processors announce AMX and cannot run it: a bfloat16 product outside
# XLA then ends the process. This keeps oneDNN to what they can do, and has to
# be set before a backend is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import keras
import numpy as np
import pytest
from hypothesis import settings

# New examples on a developer's machine; fewer, and the same ones, in CI.
IN_CI = bool(os.environ.get("CI"))
settings.register_profile(
    "suite",
    max_examples=4 if IN_CI else 15,
    deadline=None,
    derandomize=IN_CI,
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


@pytest.fixture(autouse=True, scope="module")
def little_kept():
    """Let go of what JAX compiled for a file of tests.

    Every compiled function takes some memory maps, of which Linux gives a
    process 65,530 and then lets it crash. 42,391 were counted in a worker
    that kept all.
    """
    yield
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def float64():
    """Real float64: JAX gives float32 under that name unless told."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def no_jit():
    """JAX without compilation, where a test runs hundreds of tiny graphs."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    with jax.disable_jit():
        yield


# On JAX every loop of every network takes seconds to compile: all of them
# would take CI past its time. `python -m tests jax` runs them all.
LEFT_OUT = ("DNC", "SAM", "TARDIS", "AwTA", "SAB")


def in_ci_only_on(backend):
    """Skip here if this is CI: it has time for one backend only."""
    if IN_CI and keras.backend.backend() != backend:
        pytest.skip(f"in CI on {backend} only, to save time")


@pytest.fixture
def in_time(request):
    """For what is tested with each network: leaves some out of CI on JAX."""
    name = request.node.name.partition("[")[2]
    compiles = "network" in request.fixturenames
    on_jax = keras.backend.backend() == "jax"
    if on_jax and IN_CI and compiles and name.startswith(LEFT_OUT):
        pytest.skip("takes minutes to compile on JAX: not in CI")
