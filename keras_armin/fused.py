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

import keras

from keras_armin import backends
from keras_armin import memory as memory_ops
from keras_armin.armin_equations import GRADIENTS
from keras_armin.armin_equations import Noise
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.keras_private import in_own_precision
from keras_armin.normalization import layer_norm
from keras_armin.normalization import layer_norm_gradient

# Of what `ARMINCell.move` returns: what the output is computed from, and what
# is kept beside it for the way back.
SEEN = ("shown", "gated")
TAPE = ("both", "query", "scores", "written", "replaced")
# The gates: where their activation has a gradient that their value tells.
VALUES = ("g_both", "i", "f", "g")
# In all other cases.
BEFORE = ("input_gates", "state_gates")

# Of what is kept, what nothing but the steps back looks at.
LOOSE = ("query", "slot", "written", "replaced", *VALUES, *BEFORE)
# And what the steps back do not look at.
_NOT_BACK = ("shown", "gated", "scores", "h", "memory", "recurrent_dropout")

# What a projected input is added to.
PROJECTED_TO = {
    "address": "d_scores",
    "input_gates": "d_input_gates",
    "gates": "d_state_gates",
    "write": "d_value",
    "query": "d_query",
}

# Weights whose gradient is added up step by step.
SUMMED = (
    "gate_norm_gain",
    "gate_norm_bias",
    "norm_gain",
    "norm_bias",
    "state_norm_gain",
    "state_norm_bias",
    "match_scale",
)

LINEAR = keras.activations.linear


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
            `live` per step, and `recurrent_dropout`.
        training: If true, the gradient is the hand-written one below, else it
            is left to the backend.
        last_only: At inference: keep what the last live step has seen only.

    Returns:
        `shown` and `gated` of all steps; the last `h` and `memory`.
    """
    groups = {"projected": projected, "weights": weights, "start": start}
    if not training:
        return _infer(cell, **groups, constants=constants, last_only=last_only)
    names = [(group, name) for group in groups for name in groups[group]]
    outputs = (*SEEN, "h", "memory")
    kept = ()

    def grouped(tensors):
        found = {group: {} for group in groups}
        for (group, name), tensor in zip(names, tensors):
            found[group][name] = tensor
        return found

    def forward(inputs, constants):
        nonlocal kept
        last, seen = _forward(cell, **grouped(inputs), constants=constants)
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
        )
        return [found[group][name] for group, name in names]

    flat = [groups[group][name] for group, name in names]
    found = backends.with_gradient(forward, backward, flat, constants)
    found = dict(zip(outputs, found))
    last = {name: found.pop(name) for name in ("h", "memory")}
    return found, last


def _mover(cell, projected, weights, start, constants, training):
    """What is there per step, and the step that uses it."""
    start = {**start, "memory": backends.own(start["memory"])}
    per_step = {**constants, **projected}
    recurrent = per_step.pop("recurrent_dropout", None)

    def move(state, now):
        return cell.move(
            weights,
            {name: now[name] for name in projected},
            state["h"],
            state["memory"],
            now["count"],
            Noise(now.get("zoneout"), recurrent),
            training,
            live=now.get("live"),
            record=training,
            in_place=True,
        )

    return start, per_step, move


def _infer(cell, projected, weights, start, constants, last_only):
    start, per_step, move = _mover(
        cell, projected, weights, start, constants, False
    )

    def step(state, now):
        moved = move(state, now)
        new = {"h": moved.h, "memory": moved.memory}
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
    last, seen = _scan(step, start, per_step)
    if last_only:
        seen = {name: last.pop(name) for name in SEEN}
    return seen, last


def _forward(cell, projected, weights, start, constants):
    start, per_step, move = _mover(
        cell, projected, weights, start, constants, True
    )
    names = (*SEEN, *TAPE, *(VALUES if cell.gates_tell_gradient else BEFORE))

    def step(state, now):
        moved = move(state, now)
        tape = {name: getattr(moved, name) for name in names}
        tape["slot"] = moved.address.slot
        return {"h": moved.h, "memory": moved.memory}, tape

    return _scan(step, start, per_step, by_hand=True)


@in_own_precision
def _backward(cell, projected, weights, start, tape, d):
    """Gradients of `projected`, `weights` and `start`.

    `d` holds the gradients of what `recur` returns. Inside, a name that
    starts with `d_` is the gradient of the quantity after it.
    """
    way_back = _WayBack(cell, weights, tape.get("recurrent_dropout"))
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


class _WayBack:
    """One step of ARMIN, backwards."""

    def __init__(self, cell, weights, recurrent_dropout):
        self.cell = cell
        self.weights = weights
        self.drop = recurrent_dropout
        self.wide = memory_ops.wide_dtype(cell.compute_dtype)
        # Turned once, not at each step.
        self.turned = {
            name: ops.transpose(weight)
            for name, weight in weights.items()
            if len(weight.shape) == 2
        }

    def empty_sums(self):
        return {
            name: ops.zeros_like(self.weights[name])
            for name in SUMMED
            if name in self.weights
        }

    def step(self, carry, now):
        live, units = now.get("live"), self.cell.units
        d_h_tm1 = []
        d_h = carry["d_h"]
        if live is not None:
            d_h, d_kept = _part(live, d_h)
            d_h_tm1.append(d_kept)
        d_written, d_memory = self._undo_write(carry["d_memory"], now, live)
        memory = backends.put_rows(
            carry["memory"], now["written"], now["replaced"], in_place=True
        )
        found = {}
        if self.cell.has_write_kernel:
            found["d_value"] = d_written
            d_written = ops.matmul(d_written, self.turned["write_kernel"])
        d_h = d_h + d_written
        if "zoneout" in now:
            d_kept, d_h = _part(now["zoneout"], d_h)
            d_h_tm1.append(d_kept)
        d_c, d_r = d_h + now["d_shown"][:, :units], None
        if self.cell.output_read:
            d_r = now["d_shown"][:, units:]

        found["d_state_gates"], d_h, sums = self._undo_new_state(now, d_c)
        d_h_tm1.append(d_h)
        d_gated = now["d_gated"] + ops.matmul(
            found["d_state_gates"], self.turned["recurrent_kernel"]
        )
        found["d_input_gates"], d_both, more = self._undo_gate(now, d_gated)
        sums.update(more)
        d_h, d_r_of_both = ops.split(d_both, [units], axis=-1)
        d_h_tm1.append(d_h)
        d_r = d_r_of_both if d_r is None else d_r + d_r_of_both

        d_scores, d_memory = self._undo_read(memory, d_memory, now, d_r)
        found["d_scores"] = d_scores
        d_dropped_h = ops.matmul(
            ops.cast(d_scores, d_r.dtype),
            self.turned["address_recurrent_kernel"],
        )
        if self.cell.content_addressing:
            found["d_query"], d_memory, sums["match_scale"] = self._undo_match(
                memory, d_memory, now["query"], d_scores
            )
            d_dropped_h = d_dropped_h + ops.matmul(
                found["d_query"], self.turned["query_kernel"]
            )
        if self.drop is not None:
            d_dropped_h = d_dropped_h * self.drop[:, :units]
        for part in d_h_tm1:
            d_dropped_h = d_dropped_h + part
        new = {"memory": memory, "d_h": d_dropped_h, "d_memory": d_memory}
        for name, term in sums.items():
            new[name] = carry[name] + term
        return new, found

    def _undo_write(self, d_memory, now, live):
        """The gradient of what was written, gone from the memory's."""
        d_value = backends.take_rows(d_memory, now["written"])
        left = ops.zeros_like(d_value)
        if live is not None:
            d_value, left = _part(live, d_value)
        d_memory = backends.put_rows(
            d_memory, now["written"], left, in_place=True, after=d_value
        )
        return d_value, d_memory

    def _undo_new_state(self, now, d_c):
        cell, u, sums = self.cell, self.cell.units, {}
        sigma, h_tm1 = cell.recurrent_activation, now["both"][:, :u]
        normal = (None, None, None)
        if "i" in now:
            i, f, g = now["i"], now["f"], now["g"]
        else:
            normal = now["state_gates"]
            if cell.layer_norm:
                normal = self._norm(normal, [u] * 3, "norm")
            normal = ops.split(normal, [u, 2 * u], axis=-1)
            i, f = sigma(normal[0]), sigma(normal[1])
            g = cell.activation(normal[2])
        if cell.layer_norm or cell.state_activation is not LINEAR:
            d_c = self._undo_state_activation(f * h_tm1 + i * g, d_c, sums)
        d_gates = ops.concatenate(
            [
                _undo(sigma, normal[0], i, d_c * g),
                _undo(sigma, normal[1], f, d_c * h_tm1),
                _undo(cell.activation, normal[2], g, d_c * i),
            ],
            axis=-1,
        )
        if cell.layer_norm:
            d_gates = self._undo_norm(
                now["state_gates"], [u] * 3, "norm", d_gates, sums
            )
        return d_gates, d_c * f, sums

    def _undo_state_activation(self, mixed, d_c, sums):
        cell = self.cell
        if not cell.layer_norm:
            return _undo(cell.state_activation, mixed, None, d_c)
        sizes = [cell.units]
        normal = self._norm(mixed, sizes, "state_norm")
        d_c = _undo(cell.state_activation, normal, None, d_c)
        return self._undo_norm(mixed, sizes, "state_norm", d_c, sums)

    def _undo_gate(self, now, d_gated):
        cell, both, sums = self.cell, now["both"], {}
        d_gated = times(d_gated, self.drop)
        normal, g_both = None, now.get("g_both")
        if g_both is None:
            normal = now["input_gates"]
            if cell.layer_norm:
                normal = self._norm(normal, cell.gate_sizes, "gate_norm")
            g_both = cell.recurrent_activation(normal)
        d_gates = _undo(
            cell.recurrent_activation, normal, g_both, d_gated * both
        )
        if cell.layer_norm:
            d_gates = self._undo_norm(
                now["input_gates"],
                cell.gate_sizes,
                "gate_norm",
                d_gates,
                sums,
            )
        d_dropped = ops.matmul(d_gates, self.turned["gate_recurrent_kernel"])
        return d_gates, d_gated * g_both + times(d_dropped, self.drop), sums

    def _norm(self, x, sizes, name):
        gain, bias = f"{name}_gain", f"{name}_bias"
        return layer_norm(x, sizes, self.weights[gain], self.weights[bias])

    def _undo_norm(self, x, sizes, name, d_y, sums):
        gain, bias = f"{name}_gain", f"{name}_bias"
        d_x, sums[gain], sums[bias] = layer_norm_gradient(
            x, sizes, self.weights[gain], d_y
        )
        return d_x

    def _undo_read(self, memory, d_memory, now, d_r):
        """Through r = s M to the scores, and to the rows that were read."""
        relaxed = now["relaxed"]
        if self.cell.addressing == "hard":
            d_memory = backends.add_to_rows(
                d_memory, now["slot"], d_r, in_place=True
            )
        else:
            d_memory = d_memory + _outer(ops.cast(relaxed, d_r.dtype), d_r)
        d_s = memory_ops.match(memory, ops.cast(d_r, self.wide))
        d_s = d_s - ops.sum(relaxed * d_s, axis=-1, keepdims=True)
        return relaxed * d_s, d_memory

    def _undo_match(self, memory, d_memory, query, d_scores):
        """Through scale * M q to q, to the rows, and to the scale."""
        query = ops.cast(query, self.wide)
        d_scale = ops.sum(d_scores * memory_ops.match(memory, query))
        scaled = self.weights["match_scale"] * d_scores
        rows = ops.cast(memory, self.wide)
        d_query = ops.sum(ops.expand_dims(scaled, -1) * rows, axis=1)
        d_rows = ops.cast(_outer(scaled, query), d_memory.dtype)
        return ops.cast(d_query, d_memory.dtype), d_memory + d_rows, d_scale

    def weight_gradients(self, tape, found, sums):
        dropped = times(tape["both"], self.drop)
        dropped_h = dropped[..., : self.cell.units]
        gradients = {
            "address_recurrent_kernel": _product(
                dropped_h, ops.cast(found["d_scores"], dropped_h.dtype)
            ),
            "gate_recurrent_kernel": _product(dropped, found["d_input_gates"]),
            "recurrent_kernel": _product(tape["gated"], found["d_state_gates"]),
        }
        if "d_value" in found:
            h_tm1 = tape["both"][..., : self.cell.units]
            h = ops.concatenate(
                [h_tm1[1:], ops.expand_dims(tape["h"], 0)], axis=0
            )
            gradients["write_kernel"] = _product(h, found["d_value"])
            gradients["write_bias"] = ops.sum(found["d_value"], axis=(0, 1))
        if "d_query" in found:
            gradients["query_kernel"] = _product(dropped_h, found["d_query"])
        gradients.update({name: sums[name] for name in self.empty_sums()})
        return {
            name: ops.cast(gradients[name], weight.dtype)
            for name, weight in self.weights.items()
        }


def _undo(activation, x, y, d_y):
    """The gradient of `x` from that of `y`, before and after an activation.

    Of the usual activations either may be None.
    """
    if activation is LINEAR:
        return d_y
    if activation in GRADIENTS:
        return GRADIENTS[activation](activation(x) if y is None else y, d_y)
    return backends.pullback(activation, x, d_y)


def _part(condition, x):
    """`x` where the condition holds, and `x` where it does not."""
    held = ops.where(condition, x, ops.zeros_like(x))
    return held, x - held


def _outer(weights, vectors):
    return ops.expand_dims(weights, -1) * ops.expand_dims(vectors, 1)


def _product(left, right):
    """Sum over time and batch of outer products."""
    left = ops.reshape(left, (-1, left.shape[-1]))
    right = ops.reshape(right, (-1, right.shape[-1]))
    return ops.matmul(ops.transpose(left), right)


def _scan(step, carry, per_step, reverse=False, by_hand=False):
    """`backends.scan` over dicts; what is None is left out."""
    per_step = {k: v for k, v in per_step.items() if v is not None}
    stacked, kept = (), ()

    def flat_step(state, now):
        nonlocal stacked, kept
        new, found = step(dict(zip(carry, state)), dict(zip(per_step, now)))
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
