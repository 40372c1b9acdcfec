"""The fused loop of ARMIN, with a custom gradient.

Same equations and numbers as the reference loop over `ARMINCell.step`, with
less work inside the loop and less memory for the backward pass:

- No later step depends on the output of a step. The outputs, with two of the
  five gates, are computed for all steps at once.
- A write is reverted by restoring the row that was overwritten. The backward
  pass carries the memory and restores it row by row, so that what is stored
  per step does not grow with the size of the memory.
- A row is written by a single step: its gradient accumulates until the
  backward pass reaches that step.
- The gradient of a weight is one matrix product over all steps, after the
  loop.

Tensors are held in dicts by name, without those that an option does not need.
Those of all steps are time-major.
"""

import functools

import keras

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.armin_backward import LINEAR
from keras_armin.armin_backward import BackwardPass
from keras_armin.armin_equations import ARMINState
from keras_armin.armin_equations import Noise
from keras_armin.armin_equations import prepare_inputs
from keras_armin.backends import ops
from keras_armin.keras_private import preserve_float64
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.reference_loop import LoopResult

# The results from which the output is computed.
OUTPUTS = ("output_inputs", "gated")
# Fields of `StepRecord` that the backward pass needs.
TAPE = ("h_and_r", "gated", "query", "scores", "recency", "written", "replaced")
# The gates, if the gradients of their activations follow from their values.
GATE_VALUES = ("g_h_r", "i_f_g")
# Otherwise.
PRE_ACTIVATIONS = ("input_gates", "state_gates")

# Recorded values that only the steps of the backward pass use, one by one.
UNSTACKED = ("query", "slot", "written", "replaced")
# Parts of the tape that its steps do not use.
NOT_PER_STEP = (
    "weights",
    "recurrent_dropout",
    "h",
    "memory",
    "ranks",
    "gated",
    "recency",
)

# Gradients of the projected inputs.
PROJECTED_TO = {
    "address": "d_scores",
    "input_gates": "d_input_gates",
    "gates": "d_state_gates",
    "write": "d_value",
    "query": "d_query",
}


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
    """As `reference_loop.run_cell`, for a cell that writes a single slot.

    `sequences` has the shape `(time, batch, features)`, `mask`
    `(time, batch, 1)`.
    """
    time, batch = keras.ops.shape(sequences)[:2]
    step_noise, sequence_noise = StepNoise(), SequenceNoise()
    if training:
        step_noise, sequence_noise = cell.draw_noise(time, batch)
    state_weights, output_weights = cell.split_output_weights(
        cell.weight_tensors()
    )
    state = ARMINState(*states)
    count, last_count = _write_counts(state.pointer, mask, time)
    inputs = prepare_inputs(sequences, sequence_noise)
    weights, projected = cell.scale_scores(
        cell.recurrent_weights(state_weights),
        cell.project_sequence(state_weights, inputs),
        step_noise.gumbel,
    )
    outputs, last = run_recurrence(
        cell,
        {
            "projected": projected,
            "weights": weights,
            "start": {
                "h": state.h,
                "memory": cell.unflatten_memory(state.memory),
            },
        },
        _without_none(
            ranks=cell.unpack_write_order(state.write_order),
            count=count,
            valid=mask,
            zoneout=step_noise.zoneout if cell.zoneout else None,
            recurrent_dropout=sequence_noise.recurrent,
        ),
        training,
        last_only=not (keep_outputs or training),
    )

    def output(inputs, output_inputs, gated):
        gates = cell.output_gates(output_weights, inputs, gated)
        return cell.output(output_weights, gates, output_inputs, in_place=True)

    if keep_outputs:
        outputs = output(inputs, **outputs)
        repeated = outputs
        if mask is not None:
            repeated = _repeat_outputs(outputs, mask, state.output)
        last_output = repeated[-1]
        if mask is not None and zero_output_for_mask:
            outputs = keras.ops.where(
                mask, outputs, keras.ops.zeros_like(outputs)
            )
        else:
            outputs = repeated
    else:
        step = None if mask is None else _last_valid_steps(mask)[-1]
        if training:
            outputs = {name: _at(x, step) for name, x in outputs.items()}
        last_output = output(_at(inputs, step), **outputs)
        if step is not None:
            last_output = keras.ops.where(
                step[:, None] < 0, state.output, last_output
            )
        outputs = None
    dtype = state.h.dtype
    pointer = memory_ops.count_to_pointer(last_count, dtype)
    memory = cell.flatten_memory(last["memory"])
    states = [last_output, last["h"], memory, pointer]
    if cell.recency_addressing:
        states.append(memory_ops.ranks_to_order(last["ranks"], dtype))
    return LoopResult(states, outputs)


# --- steps and masks --------------------------------------------------------


def _write_counts(pointer, mask, time):
    """Writes before each step `(time, batch)`, and after the last one."""
    start = memory_ops.pointer_to_count(pointer)
    if mask is None:
        before = keras.ops.expand_dims(backends.arange(time), -1) + start
        after = start + time
    else:
        written = keras.ops.cast(mask[..., 0], "int32")
        total = start + keras.ops.cumsum(written, axis=0)
        before, after = total - written, total[-1]
    return before, keras.ops.minimum(after, memory_ops.POINTER_MAX)


def _last_valid_steps(mask):
    """The last valid step up to each step, `(time, batch)`; -1 if none."""
    valid = mask[..., 0]
    time = backends.arange(keras.ops.shape(valid)[0])
    steps = keras.ops.where(valid, keras.ops.expand_dims(time, -1), -1)

    def step(carry, inputs):
        last = keras.ops.maximum(carry["last"], inputs["step"])
        return {"last": last}, {"last": last}

    carry = {"last": keras.ops.full_like(steps[0], -1)}
    _, outputs = backends.scan(step, carry, {"step": steps})
    return outputs["last"]


def _at(x, steps):
    """`x[steps[..., b], b]` of `x` `(time, batch, ...)`; negative ones: 0.

    The last step if `steps` is None.
    """
    if steps is None:
        return x[-1]
    batch = keras.ops.shape(x)[1]
    flat = keras.ops.reshape(x, (-1, x.shape[-1]))
    index = keras.ops.maximum(steps, 0) * batch + backends.arange(batch)
    return keras.ops.take(flat, index, axis=0)


def _repeat_outputs(outputs, mask, initial):
    """At each step the output of the last valid one, else `initial`."""
    steps = _last_valid_steps(mask)
    has_output = keras.ops.expand_dims(steps >= 0, -1)
    return keras.ops.where(has_output, _at(outputs, steps), initial)


# --- the recurrence ---------------------------------------------------------


def run_recurrence(cell, inputs, constants, training, last_only=False):
    """Hidden state and memory over a sequence.

    Args:
        cell: `ARMINCell`.
        inputs: Dict of `projected`, the projected inputs, `weights`, those of
            the recurrence, and `start`, which has `h` `(batch, units)` and
            `memory` `(batch, n, r)`.
        constants: Tensors without a gradient: `count` `(time, batch)`, the
            number of writes before each step; optionally `zoneout` and
            `valid` per step, `recurrent_dropout`, and `ranks` `(batch, n)`,
            the initial order of writes.
        training: If false, nothing is stored for the gradient, which then
            needs a second forward pass.
        last_only: At inference: return the last valid step only.

    Returns:
        `output_inputs` and `gated` of all steps; the last `h`, `memory` and
        `ranks`.
    """
    if training:
        results = backends.custom_gradient(
            functools.partial(_forward, cell, training=True),
            functools.partial(_backward, cell, training=True),
            inputs,
            constants,
        )
    elif backends.gradients_are_disabled():
        results = _infer(cell, inputs, constants, last_only)
    else:
        results = backends.custom_gradient(
            functools.partial(_infer_with_residuals, cell, last_only),
            functools.partial(_infer_backward, cell, last_only),
            inputs,
            constants,
        )
    outputs = {name: results[name] for name in OUTPUTS}
    return outputs, {k: v for k, v in results.items() if k not in OUTPUTS}


def _prepare_loop(cell, inputs, constants, training, record):
    """The initial carry, the inputs of all steps, and the step function."""
    weights = inputs["weights"]
    carry = dict(inputs["start"])
    carry["memory"] = backends.writable_copy(carry["memory"])
    if "ranks" in constants:
        carry["ranks"] = constants["ranks"]
    dropout = constants.get("recurrent_dropout")
    per_step = {"projected": inputs["projected"], "count": constants["count"]}
    for name in ("valid", "zoneout"):
        if name in constants:
            per_step[name] = constants[name]

    def step(carry, now):
        return cell.recurrent_step(
            weights,
            now["projected"],
            carry,
            now["count"],
            Noise(now.get("zoneout"), dropout),
            training,
            valid=now.get("valid"),
            record=record,
            in_place=True,
            rows=now.get("rows"),
        )

    return carry, per_step, step


def _carry(record):
    """The part of a record that is carried to the next step."""
    return _without_none(h=record.h, memory=record.memory, ranks=record.ranks)


def _infer(cell, inputs, constants, last_only):
    carry, per_step, recurrent_step = _prepare_loop(
        cell, inputs, constants, training=False, record=False
    )
    shown = ("h_and_r", "gated", "c")

    def step(carry, now):
        record = recurrent_step(carry, now)
        outputs = {name: getattr(record, name) for name in shown}
        if not last_only:
            return _carry(record), outputs
        if "valid" in now:
            outputs = {
                name: ops.where(now["valid"], x, carry[name])
                for name, x in outputs.items()
            }
        return {**_carry(record), **outputs}, {}

    if last_only:
        c, r = ops.zeros_like(carry["h"]), ops.zeros_like(carry["memory"][:, 0])
        both = ops.concatenate([c, r], axis=-1)
        carry = {**carry, "h_and_r": both, "gated": both, "c": c}
    last, outputs = backends.scan(step, carry, per_step)
    if last_only:
        outputs = {name: last.pop(name) for name in shown}
    return {**_outputs(cell, outputs, last["h"]), **last}


def _outputs(cell, steps, last_h):
    """The results in `OUTPUTS`, from recorded values of all steps."""
    c, r = _new_states(cell, steps, last_h), steps["h_and_r"][..., cell.units :]
    return {
        "output_inputs": cell.output_inputs(c, r),
        "gated": steps["gated"],
    }


def _new_states(cell, steps, last_h):
    """The new state of each step, before zoneout.

    Without zoneout it is the old state of the next step. (At a masked step it
    is not, but nothing of such a step is used.)
    """
    if "c" in steps:
        return steps["c"]
    later = steps["h_and_r"][1:, :, : cell.units]
    return ops.concatenate([later, ops.expand_dims(last_h, 0)], axis=0)


def _infer_with_residuals(cell, last_only, inputs, constants):
    results = _infer(cell, _copy(inputs), constants, last_only)
    return results, {"inputs": inputs, "constants": constants}


def _infer_backward(cell, last_only, residuals, d):
    """A forward pass that stores what the backward pass needs, then that."""
    _, tape = _forward(
        cell,
        _copy(residuals["inputs"]),
        residuals["constants"],
        training=False,
    )
    if last_only:
        d = {**d, **_at_last_step({name: d[name] for name in OUTPUTS}, tape)}
    return _backward(cell, tape, d, training=False)


def _copy(inputs):
    """A pass may overwrite its inputs, which another one still needs."""
    return keras.tree.map_structure(backends.writable_copy, inputs)


def _at_last_step(gradients, tape):
    """Gradients at all steps, of outputs that were returned at the last."""
    steps = backends.arange(ops.shape(tape["scores"])[0])
    if "valid" in tape:
        steps = ops.expand_dims(steps, -1)
        valid = ops.where(tape["valid"][..., 0], steps, -1)
        is_last = steps == ops.max(valid, axis=0)
    else:
        is_last = ops.expand_dims(steps == ops.shape(steps)[0] - 1, -1)
    is_last = ops.expand_dims(is_last, -1)

    return {
        name: d if d is None else ops.where(is_last, d, ops.zeros_like(d))
        for name, d in gradients.items()
    }


def _recorded_gates(cell):
    """The input gates and the state gates, as the tape has them."""
    if cell.backward_needs_gate_values_only:
        return GATE_VALUES
    return PRE_ACTIVATIONS


@preserve_float64
def _forward(cell, inputs, constants, training):
    """The outputs and the last carry, and the tape of the backward pass."""
    carry, per_step, recurrent_step = _prepare_loop(
        cell, inputs, constants, training, record=True
    )
    names = [*TAPE, *_recorded_gates(cell)]
    if cell.zoneout:
        names.append("c")
    if cell.has_write_kernel and cell.write_activation is not LINEAR:
        names.append("value")

    def step(carry, now):
        record = recurrent_step(carry, now)
        recorded = {name: getattr(record, name) for name in names}
        return _carry(record), _without_none(
            slot=record.address.slot, **recorded
        )

    last, steps = backends.scan(
        step, carry, per_step, differentiable=False, unstacked=UNSTACKED
    )
    results = {**_outputs(cell, steps, last["h"]), **last}
    tape = {**steps, **results, "weights": inputs["weights"]}
    for name in ("valid", "zoneout", "recurrent_dropout"):
        if name in constants:
            tape[name] = constants[name]
    return results, tape


@preserve_float64
def _backward(cell, tape, d, training):
    """Gradients of the inputs of `run_recurrence`.

    `d` holds the gradients of the results of `_forward`. The prefix `d_`
    denotes a gradient.
    """
    backward_pass = BackwardPass(
        cell, tape["weights"], tape.get("recurrent_dropout"), training
    )
    per_step = {
        **{name: x for name, x in tape.items() if name not in NOT_PER_STEP},
        **_output_gradients(cell, d, tape),
    }
    if d["memory"] is None:
        d_memory = ops.zeros_like(tape["memory"])
    else:
        d_memory = backends.writable_copy(d["memory"])
    carry = {
        "memory": backends.writable_copy(tape["memory"]),
        "d_h": _or_zeros(d["h"], tape["h"]),
        "d_memory": d_memory,
        **backward_pass.zero_sums(),
    }
    gates = _recorded_gates(cell)
    first, found = backends.scan(
        backward_pass.step,
        carry,
        per_step,
        reverse=True,
        differentiable=False,
        prepare=backward_pass.prepare,
        may_overwrite={
            "d_input_gates": gates[0],
            "d_state_gates": gates[1],
        },
    )
    return {
        "projected": {
            name: found[PROJECTED_TO[name]] for name in cell.projected_names
        },
        "weights": backward_pass.weight_gradients(tape, found, first),
        "start": {"h": first["d_h"], "memory": first["d_memory"]},
    }


def _output_gradients(cell, d, tape):
    """Of the new state, of what was read and of both after the gates."""
    d_gated = _or_zeros(d["gated"], tape["gated"])
    d_inputs = d["output_inputs"]
    if d_inputs is None:
        d_inputs = ops.zeros_like(tape["h_and_r"])
    found = {"d_gated": d_gated, "d_c": d_inputs[..., : cell.units]}
    if cell.output_read:
        found["d_r"] = d_inputs[..., cell.units :]
    return found


def _or_zeros(d, x):
    """The gradient of `x`, which may be None."""
    return ops.zeros_like(x) if d is None else d


def _without_none(**tensors):
    return {name: x for name, x in tensors.items() if x is not None}
