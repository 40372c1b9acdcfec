"""How the next token is sampled, in NumPy and in compiled loops.

Needs NumPy alone: a program that runs an exported model without Keras can load
this file by its path, as examples/serve_char_lm.py does.

Adding Gumbel noise to logits and taking the largest is sampling from their
softmax, and noise times a temperature has the effect of logits divided by it.
So a temperature of zero, the most likely token, is no special case.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np


def gumbel_noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Noise of the shape `(..., vocabulary)`.

    The same numbers whether drawn row by row or at once.
    """
    return rng.gumbel(size=shape).astype("float32")


def sample(
    xp: Any, logits: Any, noise: Any, temperature: Any, top_k: Any
) -> Any:
    """The next token.

    Args:
        xp: `numpy` or `keras.ops`.
        logits, noise: `(..., vocabulary)`.
        temperature: float. Zero takes the most likely token.
        top_k: int. Sample from this many most likely tokens, ties included.
            May exceed the size of the vocabulary.

    Returns:
        Token ids, `(...)`.
    """
    vocabulary = logits.shape[-1]
    last = vocabulary - xp.minimum(top_k, vocabulary)
    least = xp.take(xp.sort(logits, axis=-1), last, axis=-1)
    allowed = xp.where(logits < least[..., None], -np.inf, logits)
    return xp.argmax(allowed + temperature * noise, axis=-1)


def generate_steps(
    step: Callable[[int, Any], tuple[Any, Any, Any]],
    states: Any,
    prompt: Sequence[int],
    length: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[tuple[int, Any]]:
    """Feed the prompt, then generate, one token at a time, in NumPy.

    Args:
        step: Function from a token and the states to logits `(vocabulary,)`,
            new states, and anything else about the step.
        states: The initial states.
        prompt: Token ids, at least one.
        length, temperature, top_k, seed: As for `keras_armin.generate`.

    Yields:
        Each token, those of the prompt first, with the last that `step`
        returned for it.
    """
    rng = np.random.default_rng(seed)
    for token in prompt:
        logits, states, found = step(token, states)
        yield token, found
    for _ in range(length):
        noise = gumbel_noise(rng, len(logits))
        token = int(sample(np, logits, noise, np.float32(temperature), top_k))
        logits, states, found = step(token, states)
        yield token, found
