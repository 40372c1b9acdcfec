"""Text from a trained character model, by a compiled loop over its steps.

On TensorFlow and JAX the whole text is one call of a compiled function; torch
runs the loop eagerly. `examples.support.sampling` has the sampling rule, and
the loop for an exported model, which gives the same text for the same seed.
"""

import keras
import numpy as np
from keras import ops

import keras_armin
from examples.support import sampling


class Writer:
    """Generates text with the current weights of a model.

    The compiled loop is reused for texts of the same length, prompt
    included.

    Args:
        model: A model from indices of characters to logits, as
            `keras_armin.step_model` takes it.
    """

    def __init__(self, model):
        self.step = keras_armin.step_model(model)
        self.symbols = model.outputs[0].shape[-1]
        self._loop = _compiled(self._write, self.step)

    def __call__(self, prompt, length, temperature=1.0, top_k=None, seed=0):
        """Indices of `length` characters that follow on `prompt`.

        Args:
            prompt: Indices of characters, at least one.
            temperature: Sampling temperature; zero always takes the
                likeliest character.
            top_k: Sample from this many likeliest. Defaults to all.
            seed: The same seed gives the same text.
        """
        if len(prompt) == 0:
            raise ValueError("Argument `prompt` needs at least one character.")
        if length == 0:
            return []
        rng = np.random.default_rng(seed)
        noise = sampling.gumbel_noise(rng, length, self.symbols)
        # What the last step but one chooses is the last character.
        steps = len(prompt) + length - 1
        given = np.full(steps, -1, "int32")
        given[: len(prompt)] = prompt
        shown = np.zeros((steps, self.symbols), "float32")
        shown[len(prompt) - 1 :] = noise
        written = self._loop(
            *map(ops.convert_to_tensor, (given, shown)),
            ops.convert_to_tensor(temperature, "float32"),
            ops.convert_to_tensor(top_k or self.symbols, "int32"),
            [ops.convert_to_tensor(x) for x in self.step.initial_states()],
        )
        found = ops.convert_to_numpy(written)[len(prompt) - 1 :]
        return [int(index) for index in found]

    def _write(self, given, noise, temperature, top_k, states):
        steps = given.shape[0]
        places = ops.arange(steps, dtype="int32")

        def one_step(time, written, *states):
            # What an earlier step chose, where nothing is given.
            index = ops.where(
                given[time] < 0, written[ops.maximum(time - 1, 0)], given[time]
            )
            logits, *states = self.step([ops.expand_dims(index, 0), *states])
            chosen = sampling.choose(
                ops, logits[0], noise[time], temperature, top_k
            )
            chosen = ops.cast(chosen, "int32")
            written = ops.where(places == time, chosen, written)
            return time + 1, written, *states

        _, written, *_ = ops.while_loop(
            lambda time, *_: time < steps,
            one_step,
            (ops.zeros((), "int32"), ops.zeros_like(given), *states),
        )
        return written


def compiled_step(step):
    """A step model as a compiled function from and to lists of arrays.

    `predict_on_batch` would be recompiled at each call on JAX.
    """
    call = _compiled(lambda *inputs: step(list(inputs)), step)

    def run(inputs):
        outputs = call(*map(ops.convert_to_tensor, inputs))
        return [ops.convert_to_numpy(x) for x in outputs]

    return run


def _compiled(loop, model):
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(loop)
    if backend == "jax":
        return _compiled_by_jax(loop, model)
    import torch

    return torch.no_grad()(loop)


def _compiled_by_jax(loop, model):
    import jax

    @jax.jit
    def run(values, *arguments):
        # As arguments: they would be constants of the compiled loop else.
        weights = list(zip(model.variables, values))
        with keras.StatelessScope(state_mapping=weights):
            return loop(*arguments)

    def loop_with_weights(*arguments):
        return run([v.value for v in model.variables], *arguments)

    return loop_with_weights
