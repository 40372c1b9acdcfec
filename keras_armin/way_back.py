"""One step of ARMIN backwards, for `fused.py`.

A name that starts with `d_` is the gradient of the quantity after it.
"""

import keras

from keras_armin import backends
from keras_armin import memory as memory_ops
from keras_armin.armin_equations import GRADIENTS
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.bounds import bound
from keras_armin.bounds import undo_bounded_factor
from keras_armin.normalization import layer_norm
from keras_armin.normalization import layer_norm_gradient

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


class WayBack:
    """Undoes what `ARMINCell.move` did, in the opposite order.

    Args:
        cell: `ARMINCell`.
        weights: Those that `move` had.
        recurrent_dropout: Its mask, or None.
        training: What `move` had.
    """

    def __init__(self, cell, weights, recurrent_dropout, training):
        self.cell = cell
        self.weights = weights
        self.drop = recurrent_dropout
        self.reads_one_row = cell.addressing == "hard" or not training
        # While training, a mask says which units are kept.
        self.kept_share = 0.0 if training else cell.zoneout
        self.wide = memory_ops.wide_dtype(cell.compute_dtype)
        # Turned once, not at each step.
        self.turned = {
            name: ops.transpose(weight)
            for name, weight in weights.items()
            if len(weight.shape) == 2
        }

    def empty_sums(self):
        return {
            name: ops.zeros_like(ops.cast(self.weights[name], self.wide))
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
        d_written, d_left = self._undo_write(carry["d_memory"], now, live)
        found = {}
        if self.cell.has_write_kernel:
            d_written = self._undo_write_activation(carry, now, d_written)
            found["d_value"] = d_written = bound(d_written)
            d_written = ops.matmul(d_written, self.turned["write_kernel"])
        memory = backends.put_rows(
            carry["memory"],
            now["written"],
            now["replaced"],
            in_place=True,
            after=found.get("d_value"),
        )
        d_h = bound(d_h + d_written)
        if "zoneout" in now:
            d_kept, d_h = _part(now["zoneout"], d_h)
            d_h_tm1.append(d_kept)
        elif self.kept_share:
            d_h_tm1.append(self.kept_share * d_h)
            d_h = (1 - self.kept_share) * d_h
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

        d_memory = self._memory_gradient(carry["d_memory"], now, d_left, d_r)
        d_scores = bound(memory_ops.read_gradient(memory, now["relaxed"], d_r))
        found["d_scores"] = d_scores
        d_dropped_h = ops.matmul(
            self._of_product(d_scores),
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
        """The gradient of what was written, and what is left of its row."""
        d_value = backends.take_rows(d_memory, now["written"])
        if live is None:
            return d_value, ops.zeros_like(d_value)
        return _part(live, d_value)

    def _undo_write_activation(self, carry, now, d_written):
        activation = self.cell.write_activation
        if activation is LINEAR:
            return d_written
        # What was written is still there. Where a mask kept it from being
        # written, the gradient is zero.
        value = backends.take_rows(carry["memory"], now["written"])
        return GRADIENTS[activation](value, d_written)

    def _memory_gradient(self, d_memory, now, d_left, d_r):
        """Take out what was written, bring in what was read."""
        if self.reads_one_row:
            return backends.put_then_add(
                d_memory, now["written"], d_left, now["slot"], d_r
            )
        d_memory = backends.put_rows(
            d_memory, now["written"], d_left, in_place=True, after=d_r
        )
        return d_memory + _outer(ops.cast(now["relaxed"], d_r.dtype), d_r)

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

    def _of_product(self, d_scores):
        """From the scores to the product of h with its kernel."""
        scale = self.weights.get("score_scale")
        if scale is None:
            return d_scores
        return ops.cast(d_scores * scale, self.cell.compute_dtype)

    def _undo_match(self, memory, d_memory, query, d_scores):
        """Through scale * M q to q, to the rows, and to the scale."""
        kept, query = query, ops.cast(query, self.wide)
        d_scale = bound(ops.sum(d_scores * memory_ops.match(memory, query)))
        scaled = self.weights["match_scale"] * d_scores
        rows = ops.cast(memory, self.wide)
        d_query = ops.sum(ops.expand_dims(scaled, -1) * rows, axis=1)
        d_rows = ops.cast(_outer(scaled, query), d_memory.dtype)
        d_query = ops.cast(d_query, d_memory.dtype)
        d_query = bound(undo_bounded_factor(kept, d_query))
        return d_query, d_memory + d_rows, d_scale

    def weight_gradients(self, tape, found, sums):
        dropped = times(tape["both"], self.drop)
        dropped_h = dropped[..., : self.cell.units]
        gradients = {
            "address_recurrent_kernel": _product(
                dropped_h, self._of_product(found["d_scores"])
            ),
            "gate_recurrent_kernel": _product(dropped, found["d_input_gates"]),
            "recurrent_kernel": _product(tape["gated"], found["d_state_gates"]),
        }
        if "score_scale" in self.weights:
            kernel = self.weights["address_recurrent_kernel"]
            product = ops.cast(ops.matmul(dropped_h, kernel), self.wide)
            gradients["score_scale"] = ops.sum(found["d_scores"] * product)
        if "d_value" in found:
            h_tm1 = tape["both"][..., : self.cell.units]
            h = ops.concatenate(
                [h_tm1[1:], ops.expand_dims(tape["h"], 0)], axis=0
            )
            gradients["write_kernel"] = _product(h, found["d_value"])
            gradients["write_bias"] = ops.sum(found["d_value"], axis=(0, 1))
        if "d_query" in found:
            gradients["query_kernel"] = _product(dropped_h, found["d_query"])
        if "recency_scale" in self.weights:
            gradients["recency_scale"] = ops.sum(
                found["d_scores"] * tape["recency"]
            )
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
    return held, ops.where(condition, ops.zeros_like(x), x)


def _outer(weights, vectors):
    return ops.expand_dims(weights, -1) * ops.expand_dims(vectors, 1)


def _product(left, right):
    """Sum over time and batch of outer products."""
    left = ops.reshape(left, (-1, left.shape[-1]))
    right = ops.reshape(right, (-1, right.shape[-1]))
    return ops.matmul(ops.transpose(left), right)
