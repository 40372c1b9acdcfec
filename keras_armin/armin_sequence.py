"""ARMIN over a whole sequence, around the loop of `armin_fused.py`."""

from keras import ops

from keras_armin import armin_fused
from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.armin_equations import ARMINState
from keras_armin.memory_rnn import LoopResult
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise


def run_armin(
    cell,
    sequences,
    states,
    *,
    mask=None,
    training=False,
    zero_output_for_mask=False,
    keep_outputs=True,
) -> LoopResult:
    """As `keras_armin.memory_rnn.run_cell`, for a cell that writes one slot.

    `sequences` has the shape `(time, batch, features)`, `mask`
    `(time, batch, 1)`.
    """
    time, batch = ops.shape(sequences)[:2]
    step_noise, sequence_noise = StepNoise(), SequenceNoise()
    if training:
        step_noise, sequence_noise = cell.draw_noise(time, batch)
    of_state, of_output = cell.split_output_weights(cell.weight_tensors())
    state = ARMINState(*states)
    before, after = _counts(state.pointer, mask, time)
    constants = {
        "ranks": cell.unpack_write_order(state.write_order),
        "count": before,
        "valid": mask,
        "zoneout": step_noise.zoneout if cell.zoneout else None,
        "recurrent_dropout": sequence_noise.recurrent,
    }
    weights, projected = cell.scale_scores(
        cell.recurrent_weights(of_state),
        cell.project_sequence(of_state, sequences, sequence_noise),
        step_noise.gumbel,
    )
    seen, last = armin_fused.run_recurrence(
        cell,
        projected,
        weights,
        {"h": state.h, "memory": cell.unflatten_memory(state.memory)},
        {name: x for name, x in constants.items() if x is not None},
        training,
        last_only=not (keep_outputs or training),
    )

    def output(inputs, seen):
        gates = cell.output_gates(
            of_output, inputs, seen["gated"], sequence_noise
        )
        return cell.output(of_output, gates, seen["output_inputs"])

    if keep_outputs:
        outputs = output(sequences, seen)
        carried = outputs
        if mask is not None:
            carried = _repeat(outputs, _latest(mask), state.output)
        final = carried[-1]
        if mask is not None and zero_output_for_mask:
            outputs = ops.where(mask, outputs, ops.zeros_like(outputs))
        else:
            outputs = carried
    else:
        outputs = None
        latest = None if mask is None else _latest(mask)[-1]
        if training:
            seen = {name: _at(x, latest) for name, x in seen.items()}
        final = output(_at(sequences, latest), seen)
        if mask is not None:
            final = ops.where(latest[:, None] < 0, state.output, final)
    dtype = state.h.dtype
    pointer = memory_ops.count_to_pointer(after, dtype)
    states = [final, last["h"], cell.flatten_memory(last["memory"]), pointer]
    if cell.recency_addressing:
        states.append(memory_ops.ranks_to_order(last["ranks"], dtype))
    return LoopResult(states, outputs)


def _counts(pointer, mask, time):
    """Writes before each step `(time, batch)`, and after the last one."""
    start = memory_ops.pointer_to_count(pointer)
    if mask is None:
        before = ops.expand_dims(backends.arange(time), -1) + start
        after = start + time
    else:
        written = ops.cast(mask[..., 0], "int32")
        total = start + ops.cumsum(written, axis=0)
        before, after = total - written, total[-1]
    return before, ops.minimum(after, memory_ops.POINTER_MAX)


def _latest(mask):
    """The last valid step up to each step, `(time, batch)`; -1 if none."""
    valid = mask[..., 0]
    time = backends.arange(ops.shape(valid)[0])
    last_valid = ops.where(valid, ops.expand_dims(time, -1), -1)

    def step(states, inputs):
        latest = ops.maximum(states[0], inputs[0])
        return [latest], [latest], []

    _, (latest,), _ = backends.scan(
        step, [ops.full_like(last_valid[0], -1)], [last_valid]
    )
    return latest


def _rows(x, steps):
    """`x[steps[..., b], b]` of `x` `(time, batch, ...)`; negative ones: 0."""
    batch = ops.shape(x)[1]
    flat = ops.reshape(x, (-1, x.shape[-1]))
    index = ops.maximum(steps, 0) * batch + backends.arange(batch)
    return ops.take(flat, index, axis=0)


def _at(x, steps):
    return x[-1] if steps is None else _rows(x, steps)


def _repeat(outputs, latest, initial):
    """At each step the output of the last valid one, else `initial`."""
    has_output = ops.expand_dims(latest >= 0, -1)
    return ops.where(has_output, _rows(outputs, latest), initial)
