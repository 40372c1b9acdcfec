"""Random numbers of a memory cell, drawn so that they are fresh at each step.

A loop compiled by JAX cannot advance a `SeedGenerator`. A layer of ours
therefore draws the noise of a whole sequence before its loop. A bare cell in
somebody else's loop gets one seed before that loop and mixes it with the
number of writes its state has counted.
"""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

# Odd and far from any small multiple of 2**32, so that the seeds of steps and
# the seeds of calls, which count up by one, do not meet. The torch backend of
# Keras seeds with the sum of both halves.
_STEP_STRIDE = 0x61C88647

# A float32 uniform may be 0, whose Gumbel value is infinite, and 1 after
# rounding, likewise.
_SMALLEST_UNIFORM = 1e-20
_LARGEST_UNIFORM = 1 - 2**-24


class StepNoise(NamedTuple):
    """Noise of one step, or with a leading time axis of all steps."""

    gumbel: Any = None  # (..., batch, slots)
    zoneout: Any = None  # (..., batch, units), True keeps the old value
    zoneout_cell: Any = None  # likewise, for the cell state of an LSTM
    switches: Any = None  # (..., batch, 2), added to logits of TARDIS


class SequenceNoise(NamedTuple):
    """Dropout masks, one for a whole sequence, already scaled."""

    inputs: Any = None  # (batch, features)
    recurrent: Any = None  # (batch, units + memory_dim)


class GivenSeed(keras.random.SeedGenerator):
    """Hands a tensor to `keras.random`, which takes one on JAX only."""

    def __init__(self, value):
        # No super().__init__(): it would create a variable.
        self._value = value

    def next(self, ordered=True):
        return self._value


def spread_seed(seed, *path: int) -> int:
    """An integer seed of its own for each `path` below `seed`.

    Neighbouring seeds come out far apart: on torch, seed generators of
    neighbouring seeds would give the same numbers, shifted by one.
    """
    sequence = np.random.SeedSequence([abs(seed), int(seed < 0), *path])
    return int(sequence.generate_state(1)[0] >> 1)


def step_seed(call_seed, count, draw: int, draws: int):
    """Seed of one draw of one step, from the seed of the call.

    `count` is `(batch,)`: the writes of each sample. Their sum grows at every
    step that is not masked for the whole batch.
    """
    position = ops.sum(count) * draws + draw
    offset = ops.cast(position, call_seed.dtype) * _STEP_STRIDE
    return GivenSeed(call_seed + ops.cast(offset, call_seed.dtype))


def gumbel(shape, seed):
    uniform = keras.random.uniform(shape, dtype="float32", seed=seed)
    uniform = ops.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM)
    return -ops.log(-ops.log(uniform))


def logistic(shape, seed):
    """What makes a sigmoid of logits a sample: two Gumbel noises apart."""
    uniform = keras.random.uniform(shape, dtype="float32", seed=seed)
    uniform = ops.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM)
    return ops.log(uniform) - ops.log1p(-uniform)


def keep_old(shape, rate: float, seed):
    """True with probability `rate`."""
    return keras.random.uniform(shape, dtype="float32", seed=seed) < rate


def dropout_mask(shape, rate: float, dtype, seed):
    kept = keras.random.uniform(shape, dtype="float32", seed=seed) >= rate
    return ops.cast(kept, dtype) / (1 - rate)
