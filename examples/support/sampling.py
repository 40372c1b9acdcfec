"""How the next character is sampled, for NumPy and for compiled loops.

Needs NumPy alone. To add Gumbel noise to logits and take the largest is to
draw from their softmax; noise times a temperature is logits divided by it. So
a temperature of zero, which is the likeliest character, is no special case.
"""

import numpy as np


def gumbel_noise(rng, *shape):
    """`(..., symbols)`, the same whether drawn row by row or at once."""
    return rng.gumbel(size=shape).astype("float32")


def choose(xp, logits, noise, temperature, top_k):
    """The index of the next character.

    Args:
        xp: `numpy` or `keras.ops`.
        logits, noise: `(symbols,)`.
        temperature: Sampling temperature; zero takes the likeliest.
        top_k: Sample from this many likeliest, ties included. May be larger
            than `symbols`.
    """
    symbols = logits.shape[-1]
    last = symbols - xp.minimum(top_k, symbols)
    least = xp.take(xp.sort(logits), last)
    allowed = xp.where(logits < least, -np.inf, logits)
    return xp.argmax(allowed + temperature * noise)


def write(step, states, prompt, length, temperature, top_k, seed):
    """Feeds the prompt, then generates, one character at a time.

    Args:
        step: Function from an index and the list of states to logits
            `(symbols,)`, new states, and what else is to be handed on.
        prompt: Indices, at least one.

    Yields:
        Each index, those of the prompt first, with what its step handed on.
    """
    rng = np.random.default_rng(seed)
    for index in prompt:
        logits, states, found = step(index, states)
        yield index, found
    for _ in range(length):
        noise = gumbel_noise(rng, len(logits))
        index = int(choose(np, logits, noise, np.float32(temperature), top_k))
        logits, states, found = step(index, states)
        yield index, found
