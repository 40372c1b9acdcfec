"""The reference loop: a cell along a sequence, step by step."""

from typing import Any
from typing import NamedTuple

from keras import ops

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.memory_cell import MemoryCell
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Tensor
from keras_armin.types import Tensors


class LoopResult(NamedTuple):
    """The results of a loop over a sequence, time-major."""

    states: list
    outputs: Any = None
    read_weights: Any = None
    write_weights: Any = None


def run_cell(
    cell: MemoryCell,
    sequences: Tensor,
    states: list,
    *,
    mask: Tensor = None,
    reset: Tensor = None,
    training: bool = False,
    unroll: bool = False,
    zero_output_for_mask: bool = False,
    keep_outputs: bool = True,
    trace: bool = False,
) -> LoopResult:
    """Run a cell along the first axis of `sequences` `(time, batch, ...)`.

    `mask` and `reset` have the shape `(time, batch, 1)`.
    """
    if trace and not cell.trace_width:
        raise TypeError(f"Cell '{cell.name}' has no memory to trace.")
    time, batch = ops.shape(sequences)[:2]
    step_noise, sequence_noise = StepNoise(), SequenceNoise()
    if training:
        step_noise, sequence_noise = cell.draw_noise(time, batch)
    weights = cell.weight_tensors()
    projected = cell.project(weights, sequences, sequence_noise)
    noise = step_noise._asdict()
    per_step = {
        "projected": projected,
        "noise": {name: x for name, x in noise.items() if x is not None},
    }
    if mask is not None:
        per_step["mask"] = mask
    if reset is not None:
        per_step["reset"] = reset
        initial = cell.get_initial_state(batch_size=batch)

    def step(states: list, now: dict) -> tuple[list, Tensors]:
        if "reset" in now:
            states = where_states(now["reset"], initial, states)
        result = cell.step(
            weights,
            now["projected"],
            states,
            StepNoise(**now["noise"]),
            sequence_noise,
            training,
        )
        new_states, outputs = result.states, {}
        if keep_outputs:
            outputs["outputs"] = new_states[0]
        if trace:
            outputs["read_weights"] = memory_ops.as_weights(
                result.read, cell.trace_width
            )
            outputs["write_weights"] = memory_ops.as_weights(
                result.written, cell.trace_width
            )
        if "mask" in now:
            new_states = where_states(now["mask"], new_states, states)
            outputs = _zero_masked(now["mask"], outputs)
            if keep_outputs and not zero_output_for_mask:
                outputs["outputs"] = new_states[0]
        return new_states, outputs

    states, outputs = backends.scan(step, states, per_step, unroll=unroll)
    return LoopResult(states, **outputs)


def where_states(condition: Tensor, yes: list, no: list) -> list:
    """`ops.where` for each of several states."""
    return [
        ops.where(condition, ops.cast(y, n.dtype), n) for y, n in zip(yes, no)
    ]


def _zero_masked(mask: Tensor, outputs: Tensors) -> Tensors:
    return {
        name: ops.where(mask, x, ops.zeros_like(x))
        for name, x in outputs.items()
    }
