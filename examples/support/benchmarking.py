"""What `benchmark.py` compares, and how it measures time and memory.

Contenders are dicts from a name to a function without arguments, which does
the work and returns when it is done.

    python -m examples.support.benchmarking ARMIN 128 20 128 64 200

measures the peak memory of one training step in this process; see
`peak_memory`.
"""

import ctypes
import functools
import json
import math
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np
from keras import ops

import keras_armin
from examples.support import networks as networks_support
from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import baselines

BACKEND = keras.backend.backend()

FUSED = "ARMIN"
PLAIN = "RNN(ARMINCell)"
LSTM = "keras.layers.LSTM"
TORCH_LSTM = "torch.nn.LSTM"
XLA = " with XLA"
COMPILED = " compiled"

# Slots as wide as the state: the paper's, and the most work per unit.
WIDTH = {"memory_dim": None}


# --- layers ------------------------------------------------------------------

# The networks that the paper's table of language models quotes, and units with
# which they have as many parameters as ARMIN on algorithmic tasks; one layer
# of IndRNN has few.
_partial = functools.partial
QUOTED = {
    "IndRNN": (baselines.IndRNN, 128),
    "RHN": (baselines.RHN, 94),
    "HyperRHN": (_partial(baselines.HyperRHN, hyper_units=32), 81),
    "NAS": (baselines.NAS, 102),
    "FSLSTM": (_partial(baselines.FSLSTM, slow_units=50), 77),
    "HyperLSTM": (_partial(baselines.HyperLSTM, hyper_units=32), 120),
    "HMLSTM": (baselines.HMLSTM, 56),
}


def armin_parameters(units, slots, inputs):
    columns = slots + 7 * units
    products = columns * (inputs + 1) + units * slots + 2 * units * 7 * units
    return products + 1  # the scale of recency


def equal_lstm_units(units, slots, inputs):
    """Units of the LSTM with as many parameters, to the nearest ten."""
    # 4 u (u + inputs + 1) = parameters
    parameters, b = armin_parameters(units, slots, inputs), inputs + 1
    exact = (-b + math.sqrt(b * b + parameters)) / 2
    return max(10, round(exact / 10) * 10)


def quoted_layer(name, units, slots, inputs):
    """One of `QUOTED`, with as many parameters as ARMIN."""
    make = QUOTED[name][0]

    def count(units):
        layer = make(units)
        with keras.StatelessScope(initialize_variables=False):
            layer.build((None, None, inputs))
        return sum(math.prod(w.shape) for w in layer.trainable_weights)

    target = armin_parameters(units, slots, inputs)
    found = networks_support.nearest_units(count, target, most=100 * units)
    keras.utils.clear_session(free_memory=False)
    return make(found, return_sequences=True)


def layers(units, slots, inputs, quoted=()):
    """The layers to compare, the LSTM with as many parameters as ARMIN.

    `quoted` are the names of further ones.
    """
    lstm_units = equal_lstm_units(units, slots, inputs)
    found = {
        FUSED: ARMIN(units, slots, **WIDTH, return_sequences=True, seed=1),
        PLAIN: keras.layers.RNN(
            ARMINCell(units, slots, **WIDTH, seed=1), return_sequences=True
        ),
        LSTM: keras.layers.LSTM(lstm_units, return_sequences=True),
    }
    if BACKEND == "torch":
        import torch

        found[TORCH_LSTM] = torch.nn.LSTM(inputs, lstm_units, batch_first=True)
    for name in quoted:
        found[name] = quoted_layer(name, units, slots, inputs)
    return found


def networks():
    """All networks, with the paper's sizes for algorithmic tasks.

    The paper has no sizes of SAB for them. Here it has a slot for each step.
    Nor does it have sizes of `QUOTED`.
    """
    heads = {"units": 120, "memory_slots": 128, "memory_dim": 20}
    slots = {"memory_slots": 50, "memory_dim": 32}
    found = {
        FUSED: ARMIN(100, **slots, seed=1),
        "AwTA": baselines.AwTA(100, **slots, key_dim=5, seed=1),
        "TARDIS": baselines.TARDIS(120, **slots, key_dim=5, seed=1),
        "NTM": baselines.NTM(**heads),
        "DNC": baselines.DNC(**heads),
        "SAM": baselines.SAM(**heads),
        "SAB": baselines.SAB(128, memory_slots=100),
        "LayerNormLSTM": baselines.LayerNormLSTM(300),
        LSTM: keras.layers.LSTM(300),
        **{name: make(units) for name, (make, units) in QUOTED.items()},
    }
    for layer in found.values():
        layer.return_sequences = True
    return found


def _build(layer, shape):
    if isinstance(layer, keras.layers.Layer):
        layer.build(shape)


def _random(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    return ops.convert_to_tensor(x)


def _values(layer):
    return (
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
    )


# --- training ----------------------------------------------------------------


def training_steps(layers, batch, time, inputs):
    """Forward and backward pass: gradients of weights and inputs."""
    x, calls = _random((batch, time, inputs)), {}
    for name, layer in layers.items():
        _build(layer, x.shape)
        calls.update(_TRAINING[BACKEND](name, layer, x))
    return calls


def _training_jax(name, layer, x):
    import jax

    def loss(trainable, x, non_trainable):
        outputs, updates = layer.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return (outputs**2).sum(), updates

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    trainable, non_trainable = _values(layer)
    return {
        name: lambda: jax.block_until_ready(
            gradient(trainable, x, non_trainable)
        )
    }


def _training_tensorflow(name, layer, x):
    import tensorflow as tf

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [*_values(layer)[0], x])

    def call(jit_compile):
        function = tf.function(gradient, jit_compile=jit_compile)
        return lambda: function(x)[0].numpy()

    return {name: call(False), name + XLA: call(True)}


def _training_torch(name, layer, x):
    import torch

    x = x.detach().requires_grad_()
    is_keras = isinstance(layer, keras.layers.Layer)
    weights = _values(layer)[0] if is_keras else layer.parameters()
    weights = [*weights, x]

    def call():
        y = layer(x, training=True) if is_keras else layer(x)[0]
        torch.autograd.grad((y**2).sum(), weights)

    return {name: call}


_TRAINING = {
    "jax": _training_jax,
    "tensorflow": _training_tensorflow,
    "torch": _training_torch,
}


# --- inference ---------------------------------------------------------------


def inference_runs(layers, batch, time, inputs):
    """A given sequence at inference, in one call."""
    x, calls = _random((batch, time, inputs)), {}
    for name, layer in layers.items():
        _build(layer, x.shape)
        calls[name] = _compiled(layer, layer, x)
    return calls


def generators(units, slots, inputs, symbols, time):
    """Text generation, where the input of a step is the last symbol."""
    lstm_units = equal_lstm_units(units, slots, inputs)
    layers = {
        FUSED: ARMIN(units, slots, **WIDTH, return_sequences=True),
        LSTM: keras.layers.LSTM(lstm_units, return_sequences=True),
    }
    calls = {}
    for name, layer in layers.items():
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(symbols, inputs),
                layer,
                keras.layers.Dense(symbols),
            ]
        )
        for suffix in _GENERATORS[BACKEND]:
            generator = keras_armin.Generator(model, jit_compile=bool(suffix))
            calls[name + suffix] = functools.partial(
                generator, [0], time, temperature=0
            )
    return calls


# JAX always compiles.
_GENERATORS = {
    "jax": [""],
    "tensorflow": ["", XLA],
    "torch": ["", COMPILED],
}


def _compiled(function, layer, *arguments):
    """A call of `function`, which uses the variables of `layer`."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        run = tf.function(function, jit_compile=True)
        return lambda: run(*arguments).numpy()
    if BACKEND == "jax":
        import jax

        @jax.jit
        def run(values, *arguments):
            mapping = list(zip(layer.variables, values))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*arguments)

        values = [v.value for v in layer.variables]
        return lambda: jax.block_until_ready(run(values, *arguments))
    import torch

    run = torch.no_grad()(function)
    return lambda: run(*arguments)


# --- time and memory ---------------------------------------------------------


def best_times(calls, repeats, title, warm_up=2):
    """The shortest of `repeats` runs of each call, and its first, in seconds.

    The calls take turns, so that other load affects all of them, and the
    shortest run is the least disturbed one. The first run includes
    compilation.
    """
    print(title)
    bar = keras.utils.Progbar(len(calls) * (warm_up + repeats), unit_name="run")
    best, first = dict.fromkeys(calls, float("inf")), {}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            first.setdefault(name, seconds)
            if turn >= warm_up:
                best[name] = min(best[name], seconds)
            bar.add(1)
    return best, first


def peak_memory(name, units, slots, inputs, batch, time):
    """Bytes at the peak of one training step, in a separate process.

    The step is run once, so that everything is compiled. Then free memory is
    returned to the system, the kernel's record of the peak is reset, and the
    step is run again. The result is how far the peak rose above what the
    process held before. TensorFlow does not return memory: its baseline is
    what the process held before the first run.
    """
    if not _CLEAR_REFS.exists():
        raise SystemExit(
            "Peak memory is measured through /proc/self/clear_refs, which "
            "this system does not have. It takes a Linux kernel."
        )
    sizes = [str(n) for n in (units, slots, inputs, batch, time)]
    done = subprocess.run(
        [sys.executable, "-m", "examples.support.benchmarking", name, *sizes],
        cwd=pathlib.Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} with sizes {sizes} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


def _status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _measure_here(name, *sizes):
    units, slots, inputs, batch, time = map(int, sizes)
    layer = layers(units, slots, inputs)[name]
    call = training_steps({name: layer}, batch, time, inputs)[name]
    before = _status("VmRSS")
    call()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    _CLEAR_REFS.write_text("5")
    if BACKEND != "tensorflow":
        before = _status("VmRSS")
    call()
    print(json.dumps(_status("VmHWM") - before))


if __name__ == "__main__":
    _measure_here(*sys.argv[1:])
