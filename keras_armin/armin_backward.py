"""The backward pass of one step of ARMIN, for `armin_fused.py`.

The prefix `d_` denotes a gradient.
"""

import keras

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.armin_equations import ACTIVATION_GRADIENTS
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_factor_backward
from keras_armin.gradient_clipping import clip_gradient_backward
from keras_armin.normalization import layer_norm
from keras_armin.normalization import layer_norm_backward

# Weights whose gradients are summed step by step.
ACCUMULATED = (
    "gate_norm_gain",
    "gate_norm_bias",
    "norm_gain",
    "norm_bias",
    "state_norm_gain",
    "state_norm_bias",
    "match_scale",
)

LINEAR = keras.activations.linear


class BackwardPass:
    """The backward pass of `ARMINCell.recurrent_step`.

    Args:
        cell: `ARMINCell`.
        weights, training: As passed to `recurrent_step`.
        recurrent_dropout: The dropout mask, or None.
    """

    def __init__(self, cell, weights, recurrent_dropout, training):
        self.cell = cell
        self.weights = weights
        self.drop = recurrent_dropout
        self.reads_one_row = cell.addressing == "hard" or not training
        # While training, a mask selects the units that are kept.
        self.kept_share = 0.0 if training else cell.zoneout
        self.wide = memory_ops.wide_dtype(cell.compute_dtype)
        # Transposed once instead of at each step.
        self.transposed = {
            name: ops.transpose(weight)
            for name, weight in weights.items()
            if len(weight.shape) == 2
        }

    def zero_sums(self):
        return {
            name: ops.zeros_like(ops.cast(self.weights[name], self.wide))
            for name in ACCUMULATED
            if name in self.weights
        }

    def step(self, carry, now):
        valid, units = now.get("valid"), self.cell.units
        d_h_tm1 = []
        d_h = carry["d_h"]
        if valid is not None:
            d_h, d_kept = _split_by_mask(valid, d_h)
            d_h_tm1.append(d_kept)
        d_written, d_left = self._write_backward(carry["d_memory"], now, valid)
        found = {}
        if self.cell.has_write_kernel:
            d_value = self._write_activation_backward(carry, now, d_written)
            found["d_value"] = d_value = clip_gradient_backward(d_value)
            d_written = ops.matmul(d_value, self.transposed["write_kernel"])
        memory = backends.scatter_rows(
            carry["memory"],
            now["written"],
            now["replaced"],
            in_place=True,
            after=found.get("d_value"),
        )
        d_h = clip_gradient_backward(d_h + d_written)
        if "zoneout" in now:
            d_kept, d_h = _split_by_mask(now["zoneout"], d_h)
            d_h_tm1.append(d_kept)
        elif self.kept_share:
            d_h_tm1.append(self.kept_share * d_h)
            d_h = (1 - self.kept_share) * d_h
        d_c, d_r = d_h + now["d_output_inputs"][:, :units], None
        if self.cell.output_read:
            d_r = now["d_output_inputs"][:, units:]

        found["d_state_gates"], d_h, sums = self._new_state_backward(now, d_c)
        d_h_tm1.append(d_h)
        d_gated = now["d_gated"] + ops.matmul(
            found["d_state_gates"], self.transposed["recurrent_kernel"]
        )
        found["d_input_gates"], d_both, more = self._input_gates_backward(
            now, d_gated
        )
        sums.update(more)
        d_h, d_r_of_both = ops.split(d_both, [units], axis=-1)
        d_h_tm1.append(d_h)
        d_r = d_r_of_both if d_r is None else d_r + d_r_of_both

        d_memory = self._memory_gradient(carry["d_memory"], now, d_left, d_r)
        d_scores = clip_gradient_backward(
            memory_ops.read_backward(memory, now["relaxed"], d_r)
        )
        found["d_scores"] = d_scores
        d_dropped_h = ops.matmul(
            self._product_gradient(d_scores),
            self.transposed["address_recurrent_kernel"],
        )
        if self.cell.content_addressing:
            found["d_query"], d_memory, sums["match_scale"] = (
                self._match_backward(memory, d_memory, now["query"], d_scores)
            )
            d_dropped_h = d_dropped_h + ops.matmul(
                found["d_query"], self.transposed["query_kernel"]
            )
        if self.drop is not None:
            d_dropped_h = d_dropped_h * self.drop[:, :units]
        for part in d_h_tm1:
            d_dropped_h = d_dropped_h + part
        new = {"memory": memory, "d_h": d_dropped_h, "d_memory": d_memory}
        for name, term in sums.items():
            new[name] = carry[name] + term
        return new, found

    def _write_backward(self, d_memory, now, valid):
        """The gradient of the written value, and the remainder of its row."""
        d_value = backends.gather_rows(d_memory, now["written"])
        if valid is None:
            return d_value, ops.zeros_like(d_value)
        return _split_by_mask(valid, d_value)

    def _write_activation_backward(self, carry, now, d_written):
        activation = self.cell.write_activation
        if activation is LINEAR:
            return d_written
        # The memory still holds the written value. At masked steps, where
        # nothing was written, the gradient is zero.
        value = backends.gather_rows(carry["memory"], now["written"])
        return _activation_backward(activation, None, value, d_written)

    def _memory_gradient(self, d_memory, now, d_left, d_r):
        """Remove the gradient of the write, add that of the read."""
        if self.reads_one_row:
            return backends.scatter_then_add_rows(
                d_memory, now["written"], d_left, now["slot"], d_r
            )
        d_memory = backends.scatter_rows(
            d_memory, now["written"], d_left, in_place=True, after=d_r
        )
        return d_memory + _outer(ops.cast(now["relaxed"], d_r.dtype), d_r)

    def _new_state_backward(self, now, d_c):
        cell, u = self.cell, self.cell.units
        sums: dict = {}
        sigma, h_tm1 = cell.recurrent_activation, now["h_and_r"][:, :u]
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
            d_c = self._state_activation_backward(f * h_tm1 + i * g, d_c, sums)
        d_gates = ops.concatenate(
            [
                _activation_backward(sigma, normal[0], i, d_c * g),
                _activation_backward(sigma, normal[1], f, d_c * h_tm1),
                _activation_backward(cell.activation, normal[2], g, d_c * i),
            ],
            axis=-1,
        )
        if cell.layer_norm:
            d_gates = self._norm_backward(
                now["state_gates"], [u] * 3, "norm", d_gates, sums
            )
        return d_gates, d_c * f, sums

    def _state_activation_backward(self, mixed, d_c, sums):
        cell = self.cell
        if not cell.layer_norm:
            return _activation_backward(cell.state_activation, mixed, None, d_c)
        sizes = [cell.units]
        normal = self._norm(mixed, sizes, "state_norm")
        d_c = _activation_backward(cell.state_activation, normal, None, d_c)
        return self._norm_backward(mixed, sizes, "state_norm", d_c, sums)

    def _input_gates_backward(self, now, d_gated):
        cell, h_and_r = self.cell, now["h_and_r"]
        sums: dict = {}
        d_gated = times(d_gated, self.drop)
        normal, g_h_r = None, now.get("g_h_r")
        if g_h_r is None:
            normal = now["input_gates"]
            if cell.layer_norm:
                normal = self._norm(normal, cell.gate_sizes, "gate_norm")
            g_h_r = cell.recurrent_activation(normal)
        d_gates = _activation_backward(
            cell.recurrent_activation, normal, g_h_r, d_gated * h_and_r
        )
        if cell.layer_norm:
            d_gates = self._norm_backward(
                now["input_gates"],
                cell.gate_sizes,
                "gate_norm",
                d_gates,
                sums,
            )
        d_dropped = ops.matmul(
            d_gates, self.transposed["gate_recurrent_kernel"]
        )
        return d_gates, d_gated * g_h_r + times(d_dropped, self.drop), sums

    def _norm(self, x, sizes, name):
        gain, bias = f"{name}_gain", f"{name}_bias"
        return layer_norm(x, sizes, self.weights[gain], self.weights[bias])

    def _norm_backward(self, x, sizes, name, d_y, sums):
        gain, bias = f"{name}_gain", f"{name}_bias"
        d_x, sums[gain], sums[bias] = layer_norm_backward(
            x, sizes, self.weights[gain], d_y
        )
        return d_x

    def _product_gradient(self, d_scores):
        """The gradient of the product of h and its kernel in the scores."""
        scale = self.weights.get("score_scale")
        if scale is None:
            return d_scores
        return ops.cast(d_scores * scale, self.cell.compute_dtype)

    def _match_backward(self, memory, d_memory, query, d_scores):
        """The gradients of the query, the rows and the scale."""
        kept, query = query, ops.cast(query, self.wide)
        d_scale = clip_gradient_backward(
            ops.sum(d_scores * memory_ops.match(memory, query))
        )
        scaled = self.weights["match_scale"] * d_scores
        rows = ops.cast(memory, self.wide)
        d_query = ops.sum(ops.expand_dims(scaled, -1) * rows, axis=1)
        d_rows = ops.cast(_outer(scaled, query), d_memory.dtype)
        d_query = ops.cast(d_query, d_memory.dtype)
        d_query = clip_gradient_backward(clip_factor_backward(kept, d_query))
        return d_query, d_memory + d_rows, d_scale

    def weight_gradients(self, tape, found, sums):
        dropped = times(tape["h_and_r"], self.drop)
        dropped_h = dropped[..., : self.cell.units]
        gradients = {
            "address_recurrent_kernel": _sum_of_outer_products(
                dropped_h, self._product_gradient(found["d_scores"])
            ),
            "gate_recurrent_kernel": _sum_of_outer_products(
                dropped, found["d_input_gates"]
            ),
            "recurrent_kernel": _sum_of_outer_products(
                tape["gated"], found["d_state_gates"]
            ),
        }
        if "score_scale" in self.weights:
            kernel = self.weights["address_recurrent_kernel"]
            product = ops.cast(ops.matmul(dropped_h, kernel), self.wide)
            gradients["score_scale"] = ops.sum(found["d_scores"] * product)
        if "d_value" in found:
            h_tm1 = tape["h_and_r"][..., : self.cell.units]
            h = ops.concatenate(
                [h_tm1[1:], ops.expand_dims(tape["h"], 0)], axis=0
            )
            gradients["write_kernel"] = _sum_of_outer_products(
                h, found["d_value"]
            )
            gradients["write_bias"] = ops.sum(found["d_value"], axis=(0, 1))
        if "d_query" in found:
            gradients["query_kernel"] = _sum_of_outer_products(
                dropped_h, found["d_query"]
            )
        if "recency_scale" in self.weights:
            gradients["recency_scale"] = ops.sum(
                found["d_scores"] * tape["recency"]
            )
        gradients.update({name: sums[name] for name in self.zero_sums()})
        return {
            name: ops.cast(gradients[name], weight.dtype)
            for name, weight in self.weights.items()
        }


def _activation_backward(activation, x, y, d_y):
    """The gradient of `x`, given that of `y = activation(x)`.

    For the activations in `ACTIVATION_GRADIENTS` either may be None.
    """
    if activation is LINEAR:
        return d_y
    if activation in ACTIVATION_GRADIENTS:
        return ACTIVATION_GRADIENTS[activation](
            activation(x) if y is None else y, d_y
        )
    return backends.vjp(activation, x, d_y)


def _split_by_mask(condition, x):
    """`x` where the condition is true, and `x` where it is false."""
    held = ops.where(condition, x, ops.zeros_like(x))
    return held, ops.where(condition, ops.zeros_like(x), x)


def _outer(weights, vectors):
    return ops.expand_dims(weights, -1) * ops.expand_dims(vectors, 1)


def _sum_of_outer_products(left, right):
    """Sum over time and batch of outer products."""
    left = ops.reshape(left, (-1, left.shape[-1]))
    right = ops.reshape(right, (-1, right.shape[-1]))
    return ops.matmul(ops.transpose(left), right)
