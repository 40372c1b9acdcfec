"""Random numbers of a memory cell, different at each step.

A loop compiled by JAX cannot advance a `SeedGenerator`. The layers of this
package therefore draw the noise of a whole sequence before their loop. A bare
cell in a foreign loop gets one seed before that loop and combines it with the
number of writes in its state.
"""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin.types import Tensor

# Odd and far from any small multiple of 2**32, so that the seeds of steps and
# the seeds of calls, which increase by one, do not coincide. The torch backend
# of Keras seeds with the sum of both halves.
_STEP_STRIDE = 0x61C88647

# A float32 uniform may be 0 or, after rounding, 1, where the Gumbel value is
# infinite.
_SMALLEST_UNIFORM = 1e-20
_LARGEST_UNIFORM = 1 - 2**-24


class StepNoise(NamedTuple):
    """Noise of one step, or with a leading time axis of all steps."""

    gumbel: Any = None  # (..., batch, slots)
    zoneout: Any = None  # (..., batch, units), True keeps the old value
    zoneout_cell: Any = None  # the same for the cell state of an LSTM
    switches: Any = None  # (..., batch, 2), added to logits of TARDIS


class SequenceNoise(NamedTuple):
    """Dropout masks, one for a whole sequence, already scaled."""

    inputs: Any = None  # (batch, features)
    recurrent: Any = None  # (batch, units + memory_dim)


class FixedSeed(keras.random.SeedGenerator):
    """Passes a tensor as a seed, which `keras.random` accepts on JAX only."""

    def __init__(self, value: Tensor) -> None:
        # Without super().__init__(), which would create a variable.
        self._value = value

    def next(self, ordered: bool = True) -> Tensor:
        return self._value


def derive_seed(seed: int, *path: int) -> int:
    """An integer seed for each `path`, derived from `seed`.

    Consecutive seeds give unrelated results: on torch, seed generators of
    consecutive seeds would give the same numbers, shifted by one.
    """
    sequence = np.random.SeedSequence([abs(seed), int(seed < 0), *path])
    return int(sequence.generate_state(1)[0] >> 1)


def step_seed(
    call_seed: Tensor, count: Tensor, draw: int, draws: int
) -> FixedSeed:
    """Seed of one draw of one step, from the seed of the call.

    `count` is `(batch,)`: the writes of each sample. Their sum grows at every
    step that is not masked for the whole batch.
    """
    position = ops.sum(count) * draws + draw
    offset = ops.cast(position, call_seed.dtype) * _STEP_STRIDE
    return FixedSeed(call_seed + ops.cast(offset, call_seed.dtype))


def gumbel(shape: tuple, seed: Any) -> Tensor:
    uniform = keras.random.uniform(shape, dtype="float32", seed=seed)
    uniform = ops.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM)
    return -ops.log(-ops.log(uniform))


def logistic(shape: tuple, seed: Any) -> Tensor:
    """Logistic noise, which is the difference of two Gumbel noises."""
    uniform = keras.random.uniform(shape, dtype="float32", seed=seed)
    uniform = ops.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM)
    return ops.log(uniform) - ops.log1p(-uniform)


def zoneout_mask(shape: tuple, rate: float, seed: Any) -> Tensor:
    """True with probability `rate`."""
    return keras.random.uniform(shape, dtype="float32", seed=seed) < rate


def dropout_mask(shape: tuple, rate: float, dtype: str, seed: Any) -> Tensor:
    kept = keras.random.uniform(shape, dtype="float32", seed=seed) >= rate
    return ops.cast(kept, dtype) / (1 - rate)
