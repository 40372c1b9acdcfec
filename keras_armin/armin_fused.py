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

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.armin_backward import BackwardPass
from keras_armin.armin_equations import Noise
from keras_armin.backends import ops
from keras_armin.keras_private import preserve_float64

# Fields of `StepRecord` from which the output is computed, and others that the
# backward pass needs.
OUTPUTS = ("output_inputs", "gated")
TAPE = ("h_and_r", "query", "scores", "recency", "written", "replaced")
# The gates, if the gradients of their activations follow from their values.
GATE_VALUES = ("g_h_r", "i", "f", "g")
# Otherwise.
PRE_ACTIVATIONS = ("input_gates", "state_gates")

# Recorded values that only the steps of the backward pass use.
UNSTACKED = (
    "query",
    "slot",
    "written",
    "replaced",
    *GATE_VALUES,
    *PRE_ACTIVATIONS,
)
# Recorded values that they do not use.
_NOT_USED_BACKWARD = (
    "output_inputs",
    "gated",
    "scores",
    "recency",
    "h",
    "memory",
    "ranks",
    "recurrent_dropout",
)

# Gradients of the projected inputs.
PROJECTED_TO = {
    "address": "d_scores",
    "input_gates": "d_input_gates",
    "gates": "d_state_gates",
    "write": "d_value",
    "query": "d_query",
}


def run_recurrence(
    cell, projected, weights, start, constants, training, last_only=False
):
    """Hidden state and memory over a sequence.

    Args:
        cell: `ARMINCell`.
        projected: The projected inputs.
        weights: The weights of the recurrence.
        start: `h` `(batch, units)` and `memory` `(batch, n, r)`.
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
    groups = {"projected": projected, "weights": weights, "start": start}
    if not training and backends.gradients_are_disabled():
        return _infer(cell, **groups, constants=constants, last_only=last_only)
    names = [(group, name) for group in groups for name in groups[group]]
    group_names, constant_names = tuple(groups), tuple(constants)
    carried = ("h", "memory", *(["ranks"] if "ranks" in constants else []))
    outputs = (*OUTPUTS, *carried)
    kept = ()

    def grouped(tensors):
        # Not `groups`, which would keep its tensors alive with this function.
        found = {group: {} for group in group_names}
        for (group, name), tensor in zip(names, tensors):
            found[group][name] = tensor
        return found

    def forward(inputs, constants):
        nonlocal kept
        last, seen = _forward(
            cell, **grouped(inputs), constants=constants, training=training
        )
        unchanged = ("valid", "zoneout", "recurrent_dropout")
        unchanged = {k: constants[k] for k in unchanged if k in constants}
        everything = {**seen, **last, **unchanged}
        kept = tuple(everything)
        return [everything[k] for k in outputs], list(everything.values())

    def backward(inputs, residuals, gradients):
        found = _backward(
            cell,
            **grouped(inputs),
            tape=dict(zip(kept, residuals)),
            d=dict(zip(outputs, gradients)),
            training=training,
        )
        return [found[group][name] for group, name in names]

    def infer(inputs, constants):
        seen, last = _infer(
            cell,
            **grouped(_copies(inputs)),
            constants=constants,
            last_only=last_only,
        )
        found = {**seen, **last}
        # JAX sorts the keys of dicts.
        residuals = [constants[k] for k in constant_names]
        return [found[k] for k in outputs], residuals

    def forward_and_backward(inputs, residuals, gradients):
        constants = dict(zip(constant_names, residuals))
        _, tape = forward(_copies(inputs), constants)
        if last_only:
            gradients = _at_last_step(gradients, constants)
        return backward(inputs, tape, gradients)

    flat = [groups[group][name] for group, name in names]
    if training:
        found = backends.custom_gradient(forward, backward, flat, constants)
    else:
        found = backends.custom_gradient(
            infer, forward_and_backward, flat, constants
        )
    found = dict(zip(outputs, found))
    last = {name: found.pop(name) for name in carried}
    return found, last


def _copies(inputs):
    """A pass may overwrite its inputs, which another one still needs."""
    return [backends.writable_copy(x) for x in inputs]


def _at_last_step(gradients, constants):
    """Gradients of `OUTPUTS` at all steps, if only the last was returned."""
    steps = backends.arange(ops.shape(constants["count"])[0])
    if "valid" in constants:
        steps = ops.expand_dims(steps, -1)
        latest = ops.where(constants["valid"][..., 0], steps, -1)
        is_last = steps == ops.max(latest, axis=0)
    else:
        is_last = ops.expand_dims(steps == ops.shape(steps)[0] - 1, -1)
    is_last = ops.expand_dims(is_last, -1)

    def at_last_step(d):
        return None if d is None else ops.where(is_last, d, ops.zeros_like(d))

    of_seen, rest = gradients[: len(OUTPUTS)], gradients[len(OUTPUTS) :]
    return [*(at_last_step(d) for d in of_seen), *rest]


def _recurrent_step(
    cell, projected, weights, start, constants, training, record
):
    """The initial state, the inputs per step, and the step function."""
    start = {**start, "memory": backends.writable_copy(start["memory"])}
    per_step = {**constants, **projected}
    recurrent = per_step.pop("recurrent_dropout", None)
    if "ranks" in per_step:
        start["ranks"] = per_step.pop("ranks")

    def recurrent_step(state, now):
        return cell.recurrent_step(
            weights,
            {name: now[name] for name in projected},
            state["h"],
            state["memory"],
            now["count"],
            Noise(now.get("zoneout"), recurrent),
            training,
            ranks=state.get("ranks"),
            valid=now.get("valid"),
            record=record,
            in_place=True,
        )

    return start, per_step, recurrent_step


def _carried(moved):
    """The part of a record that is carried to the next step."""
    carried = {"h": moved.h, "memory": moved.memory}
    if moved.ranks is not None:
        carried["ranks"] = moved.ranks
    return carried


def _infer(cell, projected, weights, start, constants, last_only):
    start, per_step, recurrent_step = _recurrent_step(
        cell, projected, weights, start, constants, False, record=False
    )

    def step(state, now):
        moved = recurrent_step(state, now)
        new = _carried(moved)
        seen = {name: getattr(moved, name) for name in OUTPUTS}
        if not last_only:
            return new, seen
        if "valid" in now:
            seen = {
                name: ops.where(now["valid"], seen[name], state[name])
                for name in OUTPUTS
            }
        return {**new, **seen}, {}

    if last_only:
        c, r = ops.zeros_like(start["h"]), ops.zeros_like(start["memory"][:, 0])
        gated = ops.concatenate([c, r], axis=-1)
        output_inputs = gated if cell.output_read else c
        start = {**start, "output_inputs": output_inputs, "gated": gated}
    names = () if last_only else OUTPUTS
    last, seen = _scan(step, start, per_step, names=names)
    if last_only:
        seen = {name: last.pop(name) for name in OUTPUTS}
    return seen, last


@preserve_float64
def _forward(cell, projected, weights, start, constants, training):
    start, per_step, recurrent_step = _recurrent_step(
        cell, projected, weights, start, constants, training, record=True
    )
    names = (
        *OUTPUTS,
        *TAPE,
        *(
            GATE_VALUES
            if cell.backward_needs_gate_values_only
            else PRE_ACTIVATIONS
        ),
    )

    def step(state, now):
        moved = recurrent_step(state, now)
        tape = {name: getattr(moved, name) for name in names}
        tape["slot"] = moved.address.slot
        return _carried(moved), tape

    return _scan(step, start, per_step, custom_vjp=True)


@preserve_float64
def _backward(cell, projected, weights, start, tape, d, training):
    """Gradients of `projected`, `weights` and `start`.

    `d` holds the gradients of the results of `run_recurrence`. The prefix `d_`
    denotes a gradient.
    """
    backward_pass = BackwardPass(
        cell, weights, tape.get("recurrent_dropout"), training
    )
    per_step = {
        **{k: v for k, v in tape.items() if k not in _NOT_USED_BACKWARD},
        **{f"d_{name}": _or_zeros(d[name], tape[name]) for name in OUTPUTS},
        "relaxed": memory_ops.softmax(tape["scores"]),
    }
    carry = {
        "memory": backends.writable_copy(tape["memory"]),
        "d_h": _or_zeros(d["h"], tape["h"]),
        "d_memory": backends.writable_copy(
            _or_zeros(d["memory"], tape["memory"])
        ),
        **backward_pass.zero_sums(),
    }
    first, found = _scan(
        backward_pass.step, carry, per_step, reverse=True, custom_vjp=True
    )
    return {
        "projected": {
            name: found[source]
            for name, source in PROJECTED_TO.items()
            if name in projected
        },
        "weights": backward_pass.weight_gradients(tape, found, first),
        "start": {"h": first["d_h"], "memory": first["d_memory"]},
    }


def _or_zeros(d, x):
    """The gradient of `x`, which may be None."""
    return ops.zeros_like(x) if d is None else d


def _scan(step, carry, per_step, reverse=False, custom_vjp=False, names=None):
    """`backends.scan` over dicts; None is left out.

    `names` are those of the outputs of `step`, if they are known beforehand
    and all stacked: the step then has no side effects, which a loop exported
    from torch does not allow.
    """
    per_step = {k: v for k, v in per_step.items() if v is not None}
    stacked, kept = names or (), ()

    def flat_step(state, now):
        nonlocal stacked, kept
        new, found = step(dict(zip(carry, state)), dict(zip(per_step, now)))
        if names is None:
            found = {k: v for k, v in found.items() if v is not None}
            kept = tuple(name for name in found if name in UNSTACKED)
            stacked = tuple(name for name in found if name not in UNSTACKED)
        return (
            [new[name] for name in carry],
            [found[name] for name in stacked],
            [found[name] for name in kept],
        )

    last, outputs, loose = backends.scan(
        flat_step,
        list(carry.values()),
        list(per_step.values()),
        reverse=reverse,
        custom_vjp=custom_vjp,
    )
    outputs = {**dict(zip(stacked, outputs)), **dict(zip(kept, loose))}
    return dict(zip(carry, last)), outputs
