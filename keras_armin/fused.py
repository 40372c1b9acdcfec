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
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.keras_private import in_own_precision
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise

# Of what `ARMINCell.move` returns: what the output is computed from, and what
# is kept beside it for the way back.
SEEN = ("c", "r", "gated")
TAPE = (
    "query",
    "scores",
    "written",
    "replaced",
    "input_gates",
    "state_gates",
)

GATE_NORMS = ("gate_norm_gain", "gate_norm_bias")
STATE_NORMS = ("norm_gain", "norm_bias", "state_norm_gain", "state_norm_bias")


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
            of writes before each step; where there are any `gumbel`,
            `zoneout` and `live` per step, and `recurrent_dropout`.
        training: If true, the gradient is the hand-written one below, else it
            is left to the backend.
        last_only: At inference: keep what the last live step has seen only.

    Returns:
        `c`, `r` and `gated` of all steps; the last `h` and `memory`.
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
        everything = {**seen, **last}
        kept = tuple(everything)
        return [everything[k] for k in outputs], list(everything.values())

    def backward(inputs, constants, residuals, gradients):
        found = _backward(
            cell,
            **grouped(inputs),
            constants=constants,
            tape=dict(zip(kept, residuals)),
            d=dict(zip(outputs, gradients)),
        )
        return [found[group][name] for group, name in names]

    flat = [groups[group][name] for group, name in names]
    found = backends.with_gradient(forward, backward, flat, constants)
    found = dict(zip(outputs, found))
    last = {name: found.pop(name) for name in ("h", "memory")}
    return found, last


def _mover(cell, projected, weights, constants, training):
    """What is there per step, and the step that uses it."""
    per_step = {**constants, **projected}
    sequence = SequenceNoise(recurrent=per_step.pop("recurrent_dropout", None))

    def move(state, now):
        return cell.move(
            weights,
            {name: now[name] for name in projected},
            state["h"],
            state["memory"],
            now["count"],
            Noise(StepNoise(now.get("gumbel"), now.get("zoneout")), sequence),
            training,
            live=now.get("live"),
            keep_replaced=training,
            straight_through=False,
        )

    return per_step, move


def _infer(cell, projected, weights, start, constants, last_only):
    per_step, move = _mover(cell, projected, weights, constants, False)

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
        start = {**start, "c": c, "r": r, "gated": gated}
    last, seen = _scan(step, start, per_step)
    if last_only:
        seen = {name: last.pop(name) for name in SEEN}
    return seen, last


def _forward(cell, projected, weights, start, constants):
    per_step, move = _mover(cell, projected, weights, constants, True)

    def step(state, now):
        moved = move(state, now)
        tape = {
            "h_tm1": state["h"],
            "slot": moved.address.slot,
            **{name: getattr(moved, name) for name in (*SEEN, *TAPE)},
        }
        return {"h": moved.h, "memory": moved.memory}, tape

    return _scan(step, start, per_step)


@in_own_precision
def _backward(cell, projected, weights, start, constants, tape, d):
    """Gradients of `projected`, `weights` and `start`.

    `d` holds the gradients of what `recur` returns. Inside, a name that
    starts with `d_` is the gradient of the quantity after it.
    """
    way_back = _WayBack(cell, weights, constants.get("recurrent_dropout"))
    per_step = {
        **{name: constants.get(name) for name in ("zoneout", "live")},
        **{k: v for k, v in tape.items() if k not in ("c", "h", "memory")},
        **{f"d_{name}": d[name] for name in SEEN},
    }
    carry = {
        "memory": tape["memory"],
        "d_h": d["h"],
        "d_memory": d["memory"],
        **way_back.empty_sums(),
    }
    first, found = _scan(way_back.step, carry, per_step, reverse=True)
    return {
        "projected": _projected_gradients(projected, found),
        "weights": way_back.weight_gradients(tape, found, first),
        "start": {"h": first["d_h"], "memory": first["d_memory"]},
    }


def _projected_gradients(projected, found):
    columns = ("d_logits", "d_input_gates", "d_state_gates")
    sources = {"write": "d_value", "query": "d_query"}
    gradients = {
        name: found[source]
        for name, source in sources.items()
        if name in projected
    }
    kernel = ops.concatenate([found[name] for name in columns], axis=-1)
    return {"kernel": kernel, **gradients}


class _WayBack:
    """One step of ARMIN, backwards."""

    def __init__(self, cell, weights, recurrent_dropout):
        self.cell = cell
        self.weights = weights
        self.wide = memory_ops.wide_dtype(cell.compute_dtype)
        self.drop_h, self.drop_r = cell.split_recurrent_mask(recurrent_dropout)
        # Turned once, not at each step.
        self.turned = {
            name: ops.transpose(weight)
            for name, weight in weights.items()
            if len(weight.shape) == 2
        }
        norms = cell.layer_norm
        self.gate_norms = GATE_NORMS if norms else ()
        self.state_norms = STATE_NORMS if norms else ()

    def empty_sums(self):
        """Gradients that are added up along the way."""
        names = [*self.gate_norms, *self.state_norms]
        if self.cell.content_addressing:
            names.append("content_scale")
        return {name: ops.zeros_like(self.weights[name]) for name in names}

    def step(self, carry, now):
        found = {}
        d_h, live = carry["d_h"], now.get("live")
        d_kept = None
        if live is not None:
            d_kept = ops.where(live, ops.zeros_like(d_h), d_h)
            d_h = d_h - d_kept

        d_value, d_memory = self._undo_write(carry["d_memory"], now, live)
        memory = backends.put_rows(
            carry["memory"], now["written"], now["replaced"]
        )
        if self.cell.has_write_kernel:
            found["d_value"] = d_value
            d_value = ops.matmul(d_value, self.turned["write_kernel"])
        d_c, d_h = self._undo_zoneout(now, d_h + d_value)
        d_state_gates, d_h_of_state, sums = self._undo_new_state(now, d_c)
        found["d_state_gates"] = d_state_gates
        d_gated = now["d_gated"] + ops.matmul(
            d_state_gates, self.turned["recurrent_kernel"]
        )
        d_input_gates, d_h_of_gate, d_r, more = self._undo_gate(now, d_gated)
        found["d_input_gates"] = d_input_gates
        d_both = ops.matmul(d_input_gates, self.turned["gate_recurrent_kernel"])
        d_h_of_both, d_r_of_both = ops.split(d_both, [self.cell.units], axis=-1)
        d_r = now["d_r"] + d_r + times(d_r_of_both, self.drop_r)

        d_logits, d_memory = self._undo_read(memory, d_memory, now, d_r)
        d_logits_narrow = ops.cast(d_logits, d_r.dtype)
        found["d_logits"] = d_logits_narrow
        d_dropped_h = d_h_of_both + ops.matmul(
            d_logits_narrow, self.turned["address_recurrent_kernel"]
        )
        sums.update(more)
        if self.cell.content_addressing:
            d_query, d_memory, sums["content_scale"] = self._undo_match(
                memory, d_memory, now, d_logits
            )
            found["d_query"] = d_query
            d_dropped_h = d_dropped_h + ops.matmul(
                d_query, self.turned["query_kernel"]
            )
        d_h_tm1 = d_h_of_state + d_h_of_gate + times(d_dropped_h, self.drop_h)
        for part in (d_h, d_kept):
            d_h_tm1 = d_h_tm1 if part is None else d_h_tm1 + part
        new = {"memory": memory, "d_h": d_h_tm1, "d_memory": d_memory}
        for name, term in sums.items():
            new[name] = carry[name] + term
        return new, found

    def _undo_write(self, d_memory, now, live):
        """The gradient of what was written, gone from the memory's."""
        slot = now["written"]
        d_value = backends.take_rows(d_memory, slot)
        nothing = ops.zeros_like(d_value)
        left = nothing
        if live is not None:
            left = ops.where(live, nothing, d_value)
            d_value = d_value - left
        return d_value, backends.put_rows(d_memory, slot, left)

    def _undo_zoneout(self, now, d_h):
        """Gradients of c, and of the hidden state that was kept."""
        keep_old = now.get("zoneout")
        if keep_old is None:
            return now["d_c"] + d_h, None
        nothing = ops.zeros_like(d_h)
        d_new = ops.where(keep_old, nothing, d_h)
        return now["d_c"] + d_new, d_h - d_new

    def _undo_new_state(self, now, d_c):
        def new_state(gates, h_tm1, *norms):
            norms = dict(zip(self.state_norms, norms))
            return [self.cell.new_state(norms, gates, h_tm1)]

        norms = [self.weights[name] for name in self.state_norms]
        d_gates, d_h, *d_norms = backends.pullback(
            new_state, [now["state_gates"], now["h_tm1"], *norms], [d_c]
        )
        return d_gates, d_h, dict(zip(self.state_norms, d_norms))

    def _undo_gate(self, now, d_gated):
        def gate(gates, h_tm1, r, *norms):
            norms = dict(zip(self.gate_norms, norms))
            return list(self.cell.gate(norms, gates, h_tm1, r))

        d_h, d_r = ops.split(d_gated, [self.cell.units], axis=-1)
        d_gated = [times(d_h, self.drop_h), times(d_r, self.drop_r)]
        norms = [self.weights[name] for name in self.gate_norms]
        inputs = [now["input_gates"], now["h_tm1"], now["r"], *norms]
        d_gates, d_h, d_r, *d_norms = backends.pullback(gate, inputs, d_gated)
        return d_gates, d_h, d_r, dict(zip(self.gate_norms, d_norms))

    def _undo_read(self, memory, d_memory, now, d_r):
        """Through r = s M to the logits, and to the rows that were read."""
        relaxed = memory_ops.softmax(now["scores"])
        if self.cell.addressing == "hard":
            d_memory = backends.add_to_rows(d_memory, now["slot"], d_r)
        else:
            d_memory = d_memory + _outer(ops.cast(relaxed, d_r.dtype), d_r)
        d_s = memory_ops.match(memory, ops.cast(d_r, self.wide))
        d_s = d_s - ops.sum(relaxed * d_s, axis=-1, keepdims=True)
        temperature = ops.cast(self.weights["temperature"], self.wide)
        return relaxed * d_s / temperature, d_memory

    def _undo_match(self, memory, d_memory, now, d_logits):
        """Through scale * M q to q, to the rows, and to the scale."""
        query = ops.cast(now["query"], self.wide)
        scaled = self.cell.match_scale(self.weights) * d_logits
        d_scale = ops.sum(scaled * memory_ops.match(memory, query))
        rows = ops.cast(memory, self.wide)
        d_query = ops.sum(ops.expand_dims(scaled, -1) * rows, axis=1)
        d_rows = ops.cast(_outer(scaled, query), d_memory.dtype)
        content_scale = self.weights["content_scale"]
        return (
            ops.cast(d_query, d_memory.dtype),
            d_memory + d_rows,
            ops.cast(d_scale, content_scale.dtype),
        )

    def weight_gradients(self, tape, found, sums):
        dropped_h = times(tape["h_tm1"], self.drop_h)
        dropped_r = times(tape["r"], self.drop_r)
        d_gates = found["d_input_gates"]
        gradients = {
            "address_recurrent_kernel": _product(dropped_h, found["d_logits"]),
            "gate_recurrent_kernel": ops.concatenate(
                [_product(dropped_h, d_gates), _product(dropped_r, d_gates)],
                axis=0,
            ),
            "recurrent_kernel": _product(tape["gated"], found["d_state_gates"]),
            # scores = (logits + noise) / temperature
            "temperature": -ops.sum(
                ops.cast(found["d_logits"], self.wide) * tape["scores"]
            ),
        }
        if "d_value" in found:
            h = ops.concatenate(
                [tape["h_tm1"][1:], ops.expand_dims(tape["h"], 0)], axis=0
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


def _outer(weights, vectors):
    return ops.expand_dims(weights, -1) * ops.expand_dims(vectors, 1)


def _product(left, right):
    """Sum over time and batch of outer products."""
    left = ops.reshape(left, (-1, left.shape[-1]))
    right = ops.reshape(right, (-1, right.shape[-1]))
    return ops.matmul(ops.transpose(left), right)


def _scan(step, carry, per_step, reverse=False):
    """`backends.scan` over dicts; what is None is left out."""
    per_step = {k: v for k, v in per_step.items() if v is not None}
    kept = ()

    def flat_step(state, now):
        nonlocal kept
        new, found = step(dict(zip(carry, state)), dict(zip(per_step, now)))
        found = {k: v for k, v in found.items() if v is not None}
        kept = tuple(found)
        return [new[name] for name in carry], list(found.values())

    last, found = backends.scan(
        flat_step,
        list(carry.values()),
        list(per_step.values()),
        reverse=reverse,
    )
    return dict(zip(carry, last)), dict(zip(kept, found))
