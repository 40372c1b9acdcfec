"""The fast way to run ARMIN over a sequence.

Same equations and same numbers as a loop over `ARMINCell.step`, arranged so
that little is left inside the loop and little is kept of it:

- No later step depends on a step's output. The output, with its share of the
  matrix products (two of the five gates), is computed for all steps at once.
- Overwriting a slot is undone by putting back the row that was there. So the
  way back carries the memory along and restores it row by row; what is kept
  per step does not grow with the size of the memory.
- What a slot holds was written once: the gradient of a row is collected until
  the step that wrote it, and handed to that step.
- The gradient of a weight is one matrix product over all steps, after the
  loop.

Everything that has a name is held in dicts, so that what an option does not
need is simply not there. What there is per step has time as its first axis.
"""

from keras_armin import backends
from keras_armin import memory as memory_ops
from keras_armin.armin_equations import Noise
from keras_armin.backends import ops
from keras_armin.keras_private import in_own_precision
from keras_armin.way_back import WayBack

# Of what `ARMINCell.move` returns: what the output is computed from, and what
# is kept beside it for the way back.
SEEN = ("shown", "gated")
TAPE = ("both", "query", "scores", "recency", "written", "replaced")
# The gates: where their activation has a gradient that their value tells.
VALUES = ("g_both", "i", "f", "g")
# In all other cases.
BEFORE = ("input_gates", "state_gates")

# Of what is kept, what nothing but the steps back looks at.
LOOSE = ("query", "slot", "written", "replaced", *VALUES, *BEFORE)
# And what the steps back do not look at.
_NOT_BACK = (
    "shown",
    "gated",
    "scores",
    "recency",
    "h",
    "memory",
    "ranks",
    "recurrent_dropout",
)

# What a projected input is added to.
PROJECTED_TO = {
    "address": "d_scores",
    "input_gates": "d_input_gates",
    "gates": "d_state_gates",
    "write": "d_value",
    "query": "d_query",
}


def recur(
    cell, projected, weights, start, constants, training, last_only=False
):
    """Hidden state and memory along a sequence.

    Args:
        cell: `ARMINCell`.
        projected: The projected inputs.
        weights: The weights that take part.
        start: `h` `(batch, units)` and `memory` `(batch, n, r)`.
        constants: What has no gradient. `count` `(time, batch)`, the number
            of writes before each step; where there are any, `zoneout` and
            `live` per step, `recurrent_dropout`, and `ranks` `(batch, n)`, the
            order of writes to start with.
        training: If false, nothing is kept for the gradient: who asks for one
            pays for a second pass.
        last_only: At inference: keep what the last live step has seen only.

    Returns:
        `shown` and `gated` of all steps; the last `h`, `memory` and `ranks`.
    """
    groups = {"projected": projected, "weights": weights, "start": start}
    if not training and backends.is_never_differentiated():
        return _infer(cell, **groups, constants=constants, last_only=last_only)
    names = [(group, name) for group in groups for name in groups[group]]
    group_names, constant_names = tuple(groups), tuple(constants)
    carried = ("h", "memory", *(["ranks"] if "ranks" in constants else []))
    outputs = (*SEEN, *carried)
    kept = ()

    def grouped(tensors):
        # Not `groups`, whose tensors would live as long as this function.
        found = {group: {} for group in group_names}
        for (group, name), tensor in zip(names, tensors):
            found[group][name] = tensor
        return found

    def forward(inputs, constants):
        nonlocal kept
        last, seen = _forward(
            cell, **grouped(inputs), constants=constants, training=training
        )
        unchanged = ("live", "zoneout", "recurrent_dropout")
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
        # JAX hands dicts on in another order.
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
        found = backends.with_gradient(forward, backward, flat, constants)
    else:
        found = backends.with_gradient(
            infer, forward_and_backward, flat, constants
        )
    found = dict(zip(outputs, found))
    last = {name: found.pop(name) for name in carried}
    return found, last


def _copies(inputs):
    """A pass may destroy its inputs, which another one still needs."""
    return [backends.own(x) for x in inputs]


def _at_last_step(gradients, constants):
    """Gradients of `SEEN` at all steps, if they were seen at the last only."""
    steps = backends.count_up(ops.shape(constants["count"])[0])
    if "live" in constants:
        steps = ops.expand_dims(steps, -1)
        latest = ops.where(constants["live"][..., 0], steps, -1)
        is_last = steps == ops.max(latest, axis=0)
    else:
        is_last = ops.expand_dims(steps == ops.shape(steps)[0] - 1, -1)
    is_last = ops.expand_dims(is_last, -1)

    def at_last_step(d):
        return None if d is None else ops.where(is_last, d, ops.zeros_like(d))

    of_seen, rest = gradients[: len(SEEN)], gradients[len(SEEN) :]
    return [*(at_last_step(d) for d in of_seen), *rest]


def _mover(cell, projected, weights, start, constants, training, record):
    """What is there per step, and the step that uses it."""
    start = {**start, "memory": backends.own(start["memory"])}
    per_step = {**constants, **projected}
    recurrent = per_step.pop("recurrent_dropout", None)
    if "ranks" in per_step:
        start["ranks"] = per_step.pop("ranks")

    def move(state, now):
        return cell.move(
            weights,
            {name: now[name] for name in projected},
            state["h"],
            state["memory"],
            now["count"],
            Noise(now.get("zoneout"), recurrent),
            training,
            ranks=state.get("ranks"),
            live=now.get("live"),
            record=record,
            in_place=True,
        )

    return start, per_step, move


def _carried(moved):
    """What one step hands on to the next."""
    carried = {"h": moved.h, "memory": moved.memory}
    if moved.ranks is not None:
        carried["ranks"] = moved.ranks
    return carried


def _infer(cell, projected, weights, start, constants, last_only):
    start, per_step, move = _mover(
        cell, projected, weights, start, constants, False, record=False
    )

    def step(state, now):
        moved = move(state, now)
        new = _carried(moved)
        seen = {name: getattr(moved, name) for name in SEEN}
        if not last_only:
            return new, seen
        if "live" in now:
            seen = {
                name: ops.where(now["live"], seen[name], state[name])
                for name in SEEN
            }
        return {**new, **seen}, {}

    if last_only:
        c, r = ops.zeros_like(start["h"]), ops.zeros_like(start["memory"][:, 0])
        gated = ops.concatenate([c, r], axis=-1)
        shown = gated if cell.output_read else c
        start = {**start, "shown": shown, "gated": gated}
    names = () if last_only else SEEN
    last, seen = _scan(step, start, per_step, names=names)
    if last_only:
        seen = {name: last.pop(name) for name in SEEN}
    return seen, last


@in_own_precision
def _forward(cell, projected, weights, start, constants, training):
    start, per_step, move = _mover(
        cell, projected, weights, start, constants, training, record=True
    )
    names = (*SEEN, *TAPE, *(VALUES if cell.gates_tell_gradient else BEFORE))

    def step(state, now):
        moved = move(state, now)
        tape = {name: getattr(moved, name) for name in names}
        tape["slot"] = moved.address.slot
        return _carried(moved), tape

    return _scan(step, start, per_step, by_hand=True)


@in_own_precision
def _backward(cell, projected, weights, start, tape, d, training):
    """Gradients of `projected`, `weights` and `start`.

    `d` holds the gradients of what `recur` returns. Inside, a name that
    starts with `d_` is the gradient of the quantity after it.
    """
    way_back = WayBack(cell, weights, tape.get("recurrent_dropout"), training)
    per_step = {
        **{k: v for k, v in tape.items() if k not in _NOT_BACK},
        **{f"d_{name}": _or_zeros(d[name], tape[name]) for name in SEEN},
        "relaxed": memory_ops.softmax(tape["scores"]),
    }
    carry = {
        "memory": backends.own(tape["memory"]),
        "d_h": _or_zeros(d["h"], tape["h"]),
        "d_memory": backends.own(_or_zeros(d["memory"], tape["memory"])),
        **way_back.empty_sums(),
    }
    first, found = _scan(
        way_back.step, carry, per_step, reverse=True, by_hand=True
    )
    return {
        "projected": {
            name: found[source]
            for name, source in PROJECTED_TO.items()
            if name in projected
        },
        "weights": way_back.weight_gradients(tape, found, first),
        "start": {"h": first["d_h"], "memory": first["d_memory"]},
    }


def _or_zeros(d, x):
    """The gradient of `x`, for which None may stand."""
    return ops.zeros_like(x) if d is None else d


def _scan(step, carry, per_step, reverse=False, by_hand=False, names=None):
    """`backends.scan` over dicts; what is None is left out.

    `names` are those of what `step` finds, where they are known beforehand
    and all of it is to be stacked: no step then notes them down, which a loop
    that is to be exported from torch would not allow.
    """
    per_step = {k: v for k, v in per_step.items() if v is not None}
    stacked, kept = names or (), ()

    def flat_step(state, now):
        nonlocal stacked, kept
        new, found = step(dict(zip(carry, state)), dict(zip(per_step, now)))
        if names is None:
            found = {k: v for k, v in found.items() if v is not None}
            kept = tuple(name for name in found if name in LOOSE)
            stacked = tuple(name for name in found if name not in LOOSE)
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
        by_hand=by_hand,
    )
    outputs = {**dict(zip(stacked, outputs)), **dict(zip(kept, loose))}
    return dict(zip(carry, last)), outputs
