"""The networks that the benchmark compares, as calls that can be timed.

Every function here returns a dict from a name to a call without arguments,
which does the work and returns when it is done.
"""

import math

import keras
import numpy as np

from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import baselines

BACKEND = keras.backend.backend()

FUSED = "ARMIN"
PLAIN = "RNN(ARMINCell)"
LSTM = "keras.layers.LSTM"
TORCH_LSTM = "torch.nn.LSTM"
XLA = " with XLA"


# Slots as wide as the state, the paper's and the most work for a given number
# of units.
WIDTH = {"memory_dim": None}


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


def layers(units, slots, inputs):
    """The layers to compare, the LSTM with as many parameters as ARMIN."""
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
    return found


def training_steps(units, slots, inputs, batch, time, only=None):
    """A forward and a backward pass, gradients of weights and inputs.

    `only` names the layers that are wanted.
    """
    found = layers(units, slots, inputs)
    wanted = {k: v for k, v in found.items() if only is None or k in only}
    return _training_steps_of(wanted, (batch, time, inputs))


def _training_steps_of(found, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    calls = {}
    for name, layer in found.items():
        if isinstance(layer, keras.layers.Layer):
            layer.build(shape)
        calls.update(_TRAINING[BACKEND](name, layer, x))
    return calls


def networks():
    """All networks at the paper's sizes for algorithmic tasks.

    SAB, which the paper has not run on them, has as many slots as a sequence
    has steps.
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
    }
    for layer in found.values():
        layer.return_sequences = True
    return found


def network_training_steps(inputs, batch, time):
    """As `training_steps`, of all `networks`."""
    return _training_steps_of(networks(), (batch, time, inputs))


def _training_jax(name, layer, x):
    import jax

    def loss(trainable, x, non_trainable):
        outputs, updates = layer.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return (outputs**2).sum(), updates

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    trainable = [v.value for v in layer.trainable_variables]
    non_trainable = [v.value for v in layer.non_trainable_variables]
    x = jax.numpy.asarray(x)
    return {
        name: lambda: jax.block_until_ready(
            gradient(trainable, x, non_trainable)
        )
    }


def _training_tensorflow(name, layer, x):
    import tensorflow as tf

    x = tf.constant(x)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(
            loss, [v.value for v in layer.trainable_variables] + [x]
        )

    def call(jit_compile):
        function = tf.function(gradient, jit_compile=jit_compile)
        return lambda: function(x)[0].numpy()

    return {name: call(False), name + XLA: call(True)}


def _training_torch(name, layer, x):
    import torch

    x = torch.tensor(x, requires_grad=True)
    keras_layer = isinstance(layer, keras.layers.Layer)
    parameters = [
        *(
            [v.value for v in layer.trainable_variables]
            if keras_layer
            else layer.parameters()
        ),
        x,
    ]

    def call():
        y = layer(x, training=True) if keras_layer else layer(x)[0]
        torch.autograd.grad((y**2).sum(), parameters)

    return {name: call}


_TRAINING = {
    "jax": _training_jax,
    "tensorflow": _training_tensorflow,
    "torch": _training_torch,
}


def inference_runs(units, slots, inputs, batch, time):
    """A whole sequence at inference: the layer's compiled loop."""
    shape = (batch, time, inputs)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    calls = {}
    for name, layer in layers(units, slots, inputs).items():
        if name == PLAIN:
            continue
        if isinstance(layer, keras.layers.Layer):
            layer.build(shape)
        calls[name] = _INFERENCE[BACKEND](layer, x)
    return calls


def _inference_jax(layer, x):
    import jax

    variables = (
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
    )
    run = jax.jit(lambda variables, x: layer.stateless_call(*variables, x)[0])
    x = jax.numpy.asarray(x)
    return lambda: jax.block_until_ready(run(variables, x))


def _inference_tensorflow(layer, x):
    import tensorflow as tf

    run = tf.function(layer, jit_compile=True)
    x = tf.constant(x)
    return lambda: run(x).numpy()


def _inference_torch(layer, x):
    import torch

    x = torch.tensor(x)

    def call():
        with torch.no_grad():
            layer(x)

    return call


_INFERENCE = {
    "jax": _inference_jax,
    "tensorflow": _inference_tensorflow,
    "torch": _inference_torch,
}


def generators(units, slots, inputs, symbols, time):
    """Text generation: each step's input is the last step's best symbol."""
    cells = {
        FUSED: ARMINCell(units, slots, **WIDTH),
        LSTM: keras.layers.LSTMCell(equal_lstm_units(units, slots, inputs)),
    }
    return {
        name: _GENERATION[BACKEND](_Generator(cell, inputs, symbols), time)
        for name, cell in cells.items()
    }


class _Generator(keras.Model):
    """Symbols and states in, best next symbols and new states out."""

    def __init__(self, cell, inputs, symbols):
        super().__init__()
        self.embedding = keras.layers.Embedding(symbols, inputs)
        self.cell = cell
        self.head = keras.layers.Dense(symbols)
        self.embedding.build((None,))
        cell.build((None, inputs))
        self.head.build((None, cell.output_size))
        self.built = True

    def call(self, symbol, states):
        inputs = self.embedding.call(symbol)
        output, states = self.cell.call(inputs, states, training=False)
        symbol = keras.ops.argmax(self.head.call(output), axis=-1)
        return keras.ops.cast(symbol, "int32"), states


def _generation_jax(model, time):
    import jax

    @jax.jit
    def generate(variables):
        def body(_, carry):
            (symbol, states), _ = model.stateless_call(
                *variables, carry[0], carry[1]
            )
            return symbol, list(states)

        symbol = jax.numpy.zeros((1,), "int32")
        states = list(model.cell.get_initial_state(1))
        return jax.lax.fori_loop(0, time, body, (symbol, states))[0]

    variables = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    return lambda: jax.block_until_ready(generate(variables))


def _generation_tensorflow(model, time):
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def generate():
        def body(step, symbol, states):
            symbol, states = model(symbol, states)
            return step + 1, symbol, list(states)

        states = list(model.cell.get_initial_state(1))
        start = (0, tf.zeros((1,), "int32"), states)
        return tf.while_loop(lambda step, *_: step < time, body, start)[1]

    return lambda: generate().numpy()


def _generation_torch(model, time):
    import torch

    def generate():
        with torch.no_grad():
            symbol = torch.zeros((1,), dtype=torch.int32)
            states = model.cell.get_initial_state(1)
            for _ in range(time):
                # Not `model(...)`, nor `cell(...)` inside: what Keras does
                # around a call takes longer here than the call.
                symbol, states = model.call(symbol, states)

    return generate


_GENERATION = {
    "jax": _generation_jax,
    "tensorflow": _generation_tensorflow,
    "torch": _generation_torch,
}
