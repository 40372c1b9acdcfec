"""The backward pass of one step of ARMIN, for `armin_fused.py`.

Activations are element by element: their slopes, and everything else that does
not depend on later steps, can be computed for several steps at once. The prefix
`d_` denotes a gradient.
"""

import keras

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.armin_equations import ACTIVATION_GRADIENTS
from keras_armin.armin_equations import times
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_factor_backward
from keras_armin.gradient_clipping import clip_gradient_backward
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

# Parts of the tape, and gradients of the outputs.
USED_AS_IS = (
    "query",
    "slot",
    "written",
    "replaced",
    "valid",
    "zoneout",
    "d_c",
    "d_r",
    "d_gated",
)

LINEAR = keras.activations.linear
# Known to work element by element.
ELEMENTWISE = [
    getattr(keras.activations, name)
    for name in (
        "celu",
        "elu",
        "exponential",
        "gelu",
        "hard_shrink",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "leaky_relu",
        "linear",
        "log_sigmoid",
        "mish",
        "relu",
        "relu6",
        "selu",
        "sigmoid",
        "silu",
        "soft_shrink",
        "softplus",
        "softsign",
        "squareplus",
        "tanh",
        "tanh_shrink",
    )
]


def slopes(cell, weights, steps, recurrent_dropout):
    """What the backward pass multiplies gradients with.

    Args:
        steps: Dict of what a step recorded, or several with a leading axis.

    Returns:
        Dict of tensors that replace the gates: the derivatives of the new
        state, `c_by_gates` `(..., batch, 3, units)` by the gates i, f, g
        before activation and `c_by_h` by the old state; those of [h^g, r^g],
        `gated_by_gates` by their gates before activation and `gated_by_both`
        by [h, r]; with a `write_activation`, `of_written`, that of what is
        written. With `layer_norm` they end where a normalisation begins, whose
        inputs are included; `of_state` is then the slope of
        `state_activation`.
    """
    u, h_and_r = cell.units, steps["h_and_r"]
    sigma, tanh = cell.recurrent_activation, cell.activation
    (x_i_f, i_f), (x_g, g), (x_g_h_r, g_h_r) = _gates(cell, weights, steps)
    i, f = ops.split(i_f, [u], axis=-1)
    x_i, x_f = [None] * 2 if x_i_f is None else ops.split(x_i_f, [u], axis=-1)
    h_tm1 = h_and_r[..., :u]
    by_i, by_f, by_g, by_h = g, h_tm1, i, f  # c = i g + f h, without the state
    found = {}
    if cell.layer_norm:
        mixed = cell.mix(i_f, g, h_tm1)
        normal = cell.normalise_state(weights, mixed)
        found = {
            "mixed": mixed,
            "of_state": _slope(cell.state_activation, normal, None),
            "input_gates": steps["input_gates"],
            "state_gates": steps["state_gates"],
        }
    elif cell.state_activation is not LINEAR:
        known = cell.state_activation in ACTIVATION_GRADIENTS
        mixed = None if known else cell.mix(i_f, g, h_tm1)
        c = steps["output_inputs"][..., :u]
        slope = _slope(cell.state_activation, mixed, c)
        by_i, by_f, by_g, by_h = (slope * x for x in (by_i, by_f, by_g, by_h))
    found["c_by_gates"] = _stacked(
        [
            _gradient(sigma, x_i, i, by_i),
            _gradient(sigma, x_f, f, by_f),
            _gradient(tanh, x_g, g, by_g),
        ]
    )
    found["c_by_h"] = by_h
    by_gates = _gradient(sigma, x_g_h_r, g_h_r, h_and_r)
    found["gated_by_gates"] = times(by_gates, recurrent_dropout)
    found["gated_by_both"] = times(g_h_r, recurrent_dropout)
    if "value" in steps:
        found["of_written"] = _slope(
            cell.write_activation, None, steps["value"]
        )
    return found


def _gates(cell, weights, steps):
    """[i, f], g and [g^h, g^r]: before activation, or None, and after it."""
    cut = [2 * cell.units]
    if "i_f_g" in steps:
        i_f, g = ops.split(steps["i_f_g"], cut, axis=-1)
        return (None, i_f), (None, g), (None, steps["g_h_r"])
    gates, x_g_h_r = steps["state_gates"], steps["input_gates"]
    if cell.layer_norm:
        gates = cell.normalise_state_gates(weights, gates)
        x_g_h_r = cell.normalise_input_gates(weights, x_g_h_r)
    x_i_f, x_g = ops.split(gates, cut, axis=-1)
    sigma = cell.recurrent_activation
    return (
        (x_i_f, sigma(x_i_f)),
        (x_g, cell.activation(x_g)),
        (x_g_h_r, sigma(x_g_h_r)),
    )


def _gradient(activation, x, y, d_y):
    """The gradient of `x`, given that of `y = activation(x)`.

    `x` may be None for an activation in `ACTIVATION_GRADIENTS`.
    """
    if activation in ACTIVATION_GRADIENTS:
        return ACTIVATION_GRADIENTS[activation](y, d_y)
    return backends.vjp(activation, x, d_y)


def _slope(activation, x, y):
    """The derivative of an element-wise activation, of `x` or of `y`."""
    if y is None and activation in ACTIVATION_GRADIENTS:
        y = activation(x)
    return _gradient(activation, x, y, ops.ones_like(x if y is None else y))


def _stacked(tensors):
    """Stack along a new axis before the last."""
    joined = ops.concatenate(tensors, axis=-1)
    shape = ops.shape(tensors[0])
    return ops.reshape(joined, (*shape[:-1], len(tensors), shape[-1]))


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

    def prepare(self, steps):
        """The inputs of `step`, from the tape of one or of several steps."""
        found = {name: x for name, x in steps.items() if name in USED_AS_IS}
        found["relaxed"] = memory_ops.softmax(steps["scores"])
        return {**found, **slopes(self.cell, self.weights, steps, self.drop)}

    def step(self, carry, now):
        cell, valid = self.cell, now.get("valid")
        sums: dict = {}
        d_h, d_memory = carry["d_h"], carry["d_memory"]
        kept = []
        if valid is not None:
            d_h, d_kept = _split_by_mask(valid, d_h)
            kept.append(d_kept)

        # The write.
        d_written, d_left = backends.gather_rows(d_memory, now["written"]), None
        if valid is not None:
            d_written, d_left = _split_by_mask(valid, d_written)
        found = {}
        if cell.has_write_kernel:
            if "of_written" in now:
                d_written = d_written * now["of_written"]
            found["d_value"] = clip_gradient_backward(d_written)
            d_h = addmm(d_h, found["d_value"], self.transposed["write_kernel"])
        else:
            d_h = d_h + d_written
        memory = backends.scatter_rows(
            carry["memory"], now["written"], now["replaced"], in_place=True
        )
        d_h = clip_gradient_backward(d_h)
        if "zoneout" in now:
            d_kept, d_h = _split_by_mask(now["zoneout"], d_h)
            kept.append(d_kept)
        elif self.kept_share:
            kept.append(self.kept_share * d_h)
            d_h = (1 - self.kept_share) * d_h

        # Eq. 7 to 3: the new state.
        d_gates, d_h = self._new_state_backward(now, d_h + now["d_c"], sums)
        found["d_state_gates"] = d_gates
        d_gated = addmm(
            now["d_gated"], d_gates, self.transposed["recurrent_kernel"]
        )
        found["d_input_gates"], d_both = self._input_gates_backward(
            now, d_gated, sums
        )
        d_h_of_both, d_r = ops.split(d_both, [cell.units], axis=-1)
        d_h = d_h + d_h_of_both
        if "d_r" in now:
            d_r = d_r + now["d_r"]

        # Eq. 10 and 9: the read.
        d_memory = self._memory_gradient(d_memory, now, d_left, d_r)
        d_scores = clip_gradient_backward(
            memory_ops.read_backward(memory, now["relaxed"], d_r)
        )
        found["d_scores"] = d_scores
        if cell.content_addressing:
            found["d_query"], d_memory, sums["match_scale"] = (
                self._match_backward(memory, d_memory, now["query"], d_scores)
            )
        d_h = self._scores_backward(d_h, d_scores, found.get("d_query"))
        for part in kept:
            d_h = d_h + part
        new = {"memory": memory, "d_h": d_h, "d_memory": d_memory}
        for name, term in sums.items():
            new[name] = carry[name] + term
        return new, found

    def _memory_gradient(self, d_memory, now, d_left, d_r):
        """Remove the gradient of the write, add that of the read."""
        if self.reads_one_row:
            return backends.scatter_then_add_rows(
                d_memory, now["written"], d_left, now["slot"], d_r
            )
        if d_left is None:
            d_left = ops.zeros_like(d_r)
        d_memory = backends.scatter_rows(
            d_memory, now["written"], d_left, in_place=True, after=d_r
        )
        return d_memory + _outer(ops.cast(now["relaxed"], d_r.dtype), d_r)

    def _new_state_backward(self, now, d_c, sums):
        """Gradients of i, f and g before activation, and of the old state."""
        units = self.cell.units
        if self.cell.layer_norm:
            d_c = self._norm_backward(
                now["mixed"], [units], "state_norm", d_c * now["of_state"], sums
            )
        # Before the gates: their row may be what `c_by_h` is a part of.
        d_h = d_c * now["c_by_h"]
        row = self._row(now, "d_state_gates")
        d_gates = backends.multiply(
            ops.expand_dims(d_c, 1),
            now["c_by_gates"],
            None if row is None else ops.reshape(row, (-1, 3, units)),
        )
        d_gates = ops.reshape(d_gates, (-1, 3 * units))
        if self.cell.layer_norm:
            d_gates = self._norm_backward(
                now["state_gates"], [units] * 3, "norm", d_gates, sums
            )
        return d_gates, d_h

    def _input_gates_backward(self, now, d_gated, sums):
        """Gradients of g^h and g^r before activation, and of [h, r]."""
        # Before the gates, likewise.
        d_both = d_gated * now["gated_by_both"]
        d_gates = backends.multiply(
            d_gated, now["gated_by_gates"], self._row(now, "d_input_gates")
        )
        if self.cell.layer_norm:
            d_gates = self._norm_backward(
                now["input_gates"],
                self.cell.gate_sizes,
                "gate_norm",
                d_gates,
                sums,
            )
        kernel = self.transposed["gate_recurrent_kernel"]
        if self.drop is None:
            return d_gates, addmm(d_both, d_gates, kernel, in_place=True)
        return d_gates, d_both + ops.matmul(d_gates, kernel) * self.drop

    def _row(self, now, name):
        """Where to store an output. With layer norm, inputs may be there."""
        return None if self.cell.layer_norm else now.get("rows", {}).get(name)

    def _norm_backward(self, x, sizes, name, d_y, sums):
        gain, bias = f"{name}_gain", f"{name}_bias"
        d_x, sums[gain], sums[bias] = layer_norm_backward(
            x, sizes, self.weights[gain], d_y
        )
        return d_x

    def _scores_backward(self, d_h, d_scores, d_query):
        """Add the gradients of h in the scores and in the query."""
        products = [(self._product_gradient(d_scores), "address_recurrent")]
        if d_query is not None:
            products.append((d_query, "query"))
        if self.drop is None:
            for d, name in products:
                kernel = self.transposed[f"{name}_kernel"]
                d_h = addmm(d_h, d, kernel, in_place=True)
            return d_h
        drop = self.drop[:, : self.cell.units]
        for d, name in products:
            d_h = d_h + drop * ops.matmul(d, self.transposed[f"{name}_kernel"])
        return d_h

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
