"""Helpers shared by several test files."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import memory_ops
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise

BACKEND = keras.backend.backend()

# Every size different, so that swapped axes fail.
BATCH, TIME, FEATURES, UNITS, SLOTS, DIM = 3, 7, 4, 6, 5, 2

KERAS_OBJECTS = {
    "kernel_initializer": keras.initializers.HeNormal(seed=3),
    "recurrent_initializer": keras.initializers.GlorotNormal(seed=4),
    "bias_initializer": keras.initializers.RandomNormal(seed=5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "recurrent_regularizer": keras.regularizers.L1(0.02),
    "bias_regularizer": keras.regularizers.L2(0.03),
    "kernel_constraint": keras.constraints.MaxNorm(2.0),
    "recurrent_constraint": keras.constraints.MaxNorm(3.0),
    "bias_constraint": keras.constraints.NonNeg(),
}
# No argument at its default value.
FULL = {
    "units": UNITS,
    "memory_slots": SLOTS,
    "memory_dim": DIM,
    "addressing": "relaxed",
    "temperature": 0.7,
    "activation": "softsign",
    "recurrent_activation": "hard_sigmoid",
    "state_activation": "softsign",
    "output_activation": "softsign",
    "use_bias": False,
    "unit_forget_bias": False,
    "write_inputs": True,
    "learn_initial_state": True,
    "layer_norm": True,
    "zoneout": 0.1,
    "content_addressing": True,
    "output_read": False,
    "noise_scale": 0.6,
    "recency_addressing": False,
    "unit_gate_bias": False,
    "write_activation": "softsign",
    **KERAS_OBJECTS,
    "dropout": 0.2,
    "recurrent_dropout": 0.3,
    "seed": 6,
}
LAYER_ONLY = {
    "return_sequences": True,
    "return_state": True,
    "go_backwards": True,
    "stateful": True,
    "unroll": True,
    "zero_output_for_mask": True,
}


def slow_except_on(backend):
    """Marks what one backend proves for all."""
    others = {"jax", "tensorflow", "torch"} - {backend}
    return pytest.mark.slow(*sorted(others))


def array(x):
    return np.array(ops.convert_to_numpy(x))


def inputs(rng, batch=BATCH, time=TIME, features=FEATURES, dtype="float32"):
    return rng.normal(size=(batch, time, features)).astype(dtype)


def tensor(x, dtype=None):
    """Keras turns a NumPy float64 into float32 on its way into a layer."""
    return ops.convert_to_tensor(x, dtype=dtype or str(x.dtype))


def set_cell_weights(cell, weights):
    for variable in cell.trainable_weights:
        variable.assign(np.asarray(weights[variable.name]))


def randomise(layer, rng, scale=0.6):
    """Give every trainable weight values of its own."""
    for variable in layer.trainable_weights:
        variable.assign(rng.normal(0.0, scale, tuple(variable.shape)))


def as_layer(**arguments):
    return ARMIN(**arguments)


def as_rnn(**arguments):
    names = [*LAYER_ONLY, "name"]
    layer_arguments = {
        name: arguments.pop(name) for name in names if name in arguments
    }
    dtype = arguments.get("dtype")
    return keras.layers.RNN(
        ARMINCell(**arguments), dtype=dtype, **layer_arguments
    )


BOTH = {"ARMIN": as_layer, "RNN(ARMINCell)": as_rnn}
# What is compiled takes seconds for each; that the two are equal has tests of
# its own.
each_form = pytest.mark.parametrize(
    "make",
    [
        pytest.param(as_layer, id="ARMIN"),
        pytest.param(
            as_rnn,
            id="RNN(ARMINCell)",
            marks=pytest.mark.slow("jax", "tensorflow"),
        ),
    ],
)


def fix_noise(monkeypatch, noise):
    """Make every cell use `noise`, a dict of `(batch, time, ...)` arrays."""
    per_step = {
        name: ops.convert_to_tensor(np.swapaxes(noise[name], 0, 1))
        for name in ("gumbel", "zoneout")
        if name in noise
    }

    def sequence_noise(cell):
        def cast(name):
            value = noise.get(name)
            return (
                None if value is None else ops.cast(value, cell.compute_dtype)
            )

        return SequenceNoise(cast("dropout"), cast("recurrent_dropout"))

    def draw_noise(cell, time, batch):
        return StepNoise(**per_step), sequence_noise(cell)

    def noise_for_step(cell, states, training):
        if not training:
            return StepNoise(), SequenceNoise()
        pointer = states[cell.state_names.index("pointer")]
        step = memory_ops.pointer_to_count(pointer)[0]
        now = {k: ops.take(v, step, axis=0) for k, v in per_step.items()}
        return StepNoise(**now), sequence_noise(cell)

    monkeypatch.setattr(ARMINCell, "draw_noise", draw_noise)
    monkeypatch.setattr(ARMINCell, "_noise_for_step", noise_for_step)


def random_noise(rng, batch=BATCH, time=TIME, slots=SLOTS, units=UNITS):
    return {
        "gumbel": rng.gumbel(size=(batch, time, slots)).astype("float32"),
        "zoneout": rng.random((batch, time, units)) < 0.4,
    }


def gradients(
    layer, x, training=False, weigh=None, in_graph=False, **call_arguments
):
    """Gradients of a weighted sum of the outputs.

    `in_graph` is for long sequences on TensorFlow, which take minutes without.

    Returns those of the trainable weights by name, and that of `x`. `None`
    stands for a weight that the outputs do not depend on.
    """
    variables = layer.trainable_variables

    def loss_of(y):
        y = y[0] if isinstance(y, (list, tuple)) else y
        y = ops.cast(y, "float64" if "64" in str(y.dtype) else "float32")
        return ops.sum(y if weigh is None else y * ops.cast(weigh, y.dtype))

    call_arguments["training"] = training
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(layer(x, **call_arguments))
            return tape.gradient(loss, [v.value for v in variables] + [x])

        gradient = tf.function(gradient) if in_graph else gradient
        *grads, grad_x = gradient(tf.convert_to_tensor(x))
    elif BACKEND == "torch":
        import torch

        x = torch.tensor(x, requires_grad=True)
        loss = loss_of(layer(x, **call_arguments))
        *grads, grad_x = torch.autograd.grad(
            loss, [v.value for v in variables] + [x], allow_unused=True
        )
    else:
        import jax

        def loss_function(values, x):
            y, _ = layer.stateless_call(
                values,
                [v.value for v in layer.non_trainable_variables],
                x,
                **call_arguments,
            )
            return loss_of(y)

        values = [v.value for v in variables]
        grads, grad_x = jax.grad(loss_function, argnums=(0, 1))(
            values, jax.numpy.asarray(x)
        )
    named = {
        v.name: None if g is None else array(g)
        for v, g in zip(variables, grads)
    }
    return named, array(grad_x)


def compiled(layer, shape, **compile_arguments):
    """A model with the layer and a small head, ready to fit."""
    model = keras.Sequential(
        [keras.Input(batch_shape=shape), layer, keras.layers.Dense(2)]
    )
    compile_arguments.setdefault("optimizer", keras.optimizers.SGD(0.1))
    if BACKEND == "tensorflow":
        # XLA would take longer to compile than all the rest to run.
        compile_arguments.setdefault("jit_compile", False)
    model.compile(loss="mse", **compile_arguments)
    return model
