"""The equations of ARMIN, in the order of the paper."""

import math
from typing import Any
from typing import NamedTuple

import keras

from keras_armin import backends
from keras_armin import memory_ops
from keras_armin.backends import activate
from keras_armin.backends import addcmul
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_factor
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.memory_cell import CellResult
from keras_armin.memory_cell import MemoryCell
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.normalization import layer_norm
from keras_armin.types import Tensor
from keras_armin.types import Tensors


class ARMINState(NamedTuple):
    """The states of the cell, in order."""

    output: Any  # (batch, output_size)
    h: Any  # (batch, units)
    memory: Any  # (batch, memory_slots * memory_dim)
    pointer: Any  # (batch, 4): the number of writes, see memory_ops.py
    # (batch, n * digits), with `recency_addressing`: see memory_ops.py
    write_order: Any = None


# The column blocks of `kernel`, in order.
PROJECTED = ("address", "input_gates", "gates")


# Largest exponent of the scale of a content match.
LARGEST_SCALE = 10.0


# Gradients of common activations, computed from their values.
ACTIVATION_GRADIENTS = {
    keras.activations.sigmoid: backends.sigmoid_gradient,
    keras.activations.tanh: backends.tanh_gradient,
}


class Noise(NamedTuple):
    """Noise of a step other than the Gumbel noise of the scores."""

    zoneout: Any = None  # (batch, units), True keeps the old value
    recurrent: Any = None  # (batch, units + r), the mask of dropout


class StepRecord(NamedTuple):
    """The results of a step, and the intermediate values that it records."""

    h: Any  # (batch, units), as it is carried
    memory: Any  # (batch, n, r)
    ranks: Any  # (batch, n): the order of writes, with `recency_addressing`
    c: Any  # (batch, units): the new state before zoneout
    output_gates: Any  # o^h and o^r before normalisation, if they are computed
    value: Any  # (batch, r): what was written
    written: Any  # the slot, or the weights, written to
    replaced: Any  # (batch, r): the row that was overwritten, if asked for
    address: memory_ops.Address
    scores: Any  # (batch, n): the logits, with noise and temperature
    recency: Any  # (batch, n): log(1 + rank), with `recency_addressing`
    query: Any  # (batch, r), with `content_addressing`
    h_and_r: Any  # (batch, units + r): h before the step, and r
    gated: Any  # (batch, units + r): h^g and r^g
    input_gates: Any  # (batch, units + r): g^h and g^r before normalisation
    g_h_r: Any  # (batch, units + r): g^h and g^r
    state_gates: Any  # (batch, 3 units): i, f and g before normalisation
    i_f_g: Any  # (batch, 3 units): i, f and g, if recorded


class ARMINEquations(MemoryCell):
    """The equations of `ARMINCell` as pure functions of given weights."""

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(batch, features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        columns = affine(inputs, weights["kernel"], weights.get("bias"))
        columns = ops.split(columns, self._column_ends, axis=-1)
        return {
            **dict(zip(PROJECTED, columns)),
            **self._project_further(weights, inputs),
        }

    def project_sequence(self, weights: Tensors, inputs: Tensor) -> Tensors:
        """As `project`, for prepared inputs `(time, batch, features)`.

        One product for each tensor that a step needs: splitting a common
        product would copy everything, also in the backward pass.
        """
        kernels = ops.split(weights["kernel"], self._column_ends, axis=-1)
        biases = [None] * len(kernels)
        if "bias" in weights:
            biases = ops.split(weights["bias"], self._column_ends, axis=-1)
        columns = {
            name: affine(inputs, kernel, bias)
            for name, kernel, bias in zip(PROJECTED, kernels, biases)
        }
        return {**columns, **self._project_further(weights, inputs)}

    @property
    def _column_ends(self):
        """Columns of `kernel`: address | g^h g^r | i f g o^h o^r."""
        return [self.address_width, self.address_width + sum(self.gate_sizes)]

    @property
    def projected_names(self) -> list[str]:
        """The keys of what `project` returns."""
        further = {"write": self.write_inputs, "query": self.content_addressing}
        return [*PROJECTED, *(k for k, wanted in further.items() if wanted)]

    def _project_further(self, weights, inputs):
        return {
            name: ops.matmul(
                inputs, weights[f"{name}_kernel"][: self.input_dim]
            )
            for name in self.projected_names[len(PROJECTED) :]
        }

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        """Equations 3 to 10 of the paper, then the write."""
        state = ARMINState(*states)
        count = memory_ops.pointer_to_count(state.pointer)
        weights, projected = self.scale_scores(
            weights, projected, step_noise.gumbel
        )
        record = self.recurrent_step(
            weights,
            projected,
            {
                "h": state.h,
                "memory": self.unflatten_memory(state.memory),
                "ranks": self.unpack_write_order(state.write_order),
            },
            count,
            Noise(step_noise.zoneout, sequence_noise.recurrent),
            training,
        )
        r = record.h_and_r[:, self.units :]
        output = self.output(
            weights, record.output_gates, self.output_inputs(record.c, r)
        )
        dtype = record.h.dtype
        count = memory_ops.increment(count)
        pointer = memory_ops.count_to_pointer(count, dtype)
        memory = self.flatten_memory(record.memory)
        states = [output, record.h, memory, pointer]
        if self.recency_addressing:
            states.append(memory_ops.ranks_to_order(record.ranks, dtype))
        weights, slot, _ = record.address
        read = slot if weights is None else weights
        return CellResult(states, read, record.written)

    def split_output_weights(self, weights: Tensors) -> tuple[Tensors, Tensors]:
        """Split columns of the recurrence from columns of the output.

        No step depends on the output of another, so the two output gates can
        be computed separately from the other three.
        """
        gates = 3 * self.units
        columns = self.address_width + sum(self.gate_sizes) + gates
        cuts = {
            "kernel": columns,
            "bias": columns,
            "recurrent_kernel": gates,
            "norm_gain": gates,
            "norm_bias": gates,
        }
        of_state, of_output = dict(weights), {}
        for name, cut in cuts.items():
            if name in weights:
                of_state[name] = backends.dense(weights[name][..., :cut])
                of_output[name] = weights[name][..., cut:]
        return of_state, of_output

    def recurrent_weights(self, weights: Tensors) -> Tensors:
        """The weights of `recurrent_step`, without the rows of `project`."""
        elsewhere = ("kernel", "bias", "initial_state", "initial_memory")
        used = {k: v for k, v in weights.items() if k not in elsewhere}
        for name in ("write_kernel", "query_kernel"):
            if name in used:
                used[name] = used[name][-self.units :]
        return used

    @property
    def backward_needs_gate_values_only(self) -> bool:
        """Whether the backward pass needs the gates after activation only."""
        activations = {self.recurrent_activation, self.activation}
        return not self.layer_norm and activations <= set(ACTIVATION_GRADIENTS)

    def unflatten_memory(self, memory: Tensor) -> Tensor:
        return ops.reshape(memory, (-1, self.memory_slots, self.memory_dim))

    def flatten_memory(self, memory: Tensor) -> Tensor:
        return ops.reshape(memory, (-1, self.memory_slots * self.memory_dim))

    def unpack_write_order(self, write_order: Tensor) -> Tensor:
        """The ranks of the slots, as floats, or None."""
        if not self.recency_addressing:
            return None
        wide = memory_ops.wide_dtype(self.compute_dtype)
        return memory_ops.order_to_ranks(write_order, self.memory_slots, wide)

    def recurrent_step(
        self,
        weights: Tensors,
        projected: Tensors,
        state: Tensors,
        count: Tensor,
        noise: Noise,
        training: bool,
        valid: Tensor = None,
        record: bool = False,
        in_place: bool = False,
        rows: Tensors | None = None,
    ) -> StepRecord:
        """One step without the output, on which no later step depends.

        Args:
            weights, projected: As returned by `scale_scores`.
            state: Dict of `h` `(batch, units)`, `memory` `(batch, n, r)` and,
                with `recency_addressing`, `ranks` `(batch, n)`, the order of
                writes.
            count: int32 `(batch,)`, the number of writes so far.
            valid: bool `(batch, 1)`; `False` keeps the state.
            record: Whether the step is part of a custom gradient: the record
                includes the row that was overwritten, and hard reads do not
                define a straight-through gradient.
            in_place: Whether `memory` and `projected` may be overwritten.
            rows: Dict of tensors in which to store `recency`, `h_and_r` and
                `gated`.
        """
        rows = rows or {}
        h_tm1, memory, ranks = state["h"], state["memory"], state.get("ranks")
        drop = noise.recurrent

        # Eq. 9 and 10: the read.
        scores, query, recency = self._score_slots(
            weights, projected, h_tm1, memory, ranks, drop, in_place, rows
        )
        address = memory_ops.address(
            scores, self.addressing, training, straight_through=not record
        )
        r = memory_ops.read(memory, address)

        # Eq. 3 to 7: the new state. Where gates are activated in place, the
        # backward pass does not need them before activation.
        activate_in_place = in_place and self.backward_needs_gate_values_only
        h_and_r = backends.concatenate([h_tm1, r], rows.get("h_and_r"))
        dropped = times(h_and_r, drop)
        input_gates = addmm(
            projected["input_gates"],
            dropped,
            weights["gate_recurrent_kernel"],
            in_place,
        )
        g_h_r = self.input_gates(weights, input_gates, activate_in_place)
        gated = backends.multiply(g_h_r, dropped, rows.get("gated"))
        gates = self.integrate(weights, projected["gates"], gated, in_place)
        state_gates, output_gates = self._split_gates(gates)
        i_f, g = self.state_gates(weights, state_gates, activate_in_place)
        i_f_g = None
        if record:
            i_f_g = backends.rejoin(state_gates, [i_f, g], activate_in_place)
        c = self.new_state(weights, self.mix(i_f, g, h_tm1))
        h = apply_zoneout(self.zoneout, c, h_tm1, noise.zoneout, training)
        # The gradients of all later steps pass here.
        h = clip_gradient(h)

        # The write.
        value = self._written_value(weights, projected, h)
        memory, written, replaced = self._write(
            memory, address, count, value, valid, record, in_place
        )
        return StepRecord(
            h=h if valid is None else ops.where(valid, h, h_tm1),
            memory=memory,
            ranks=self._update_ranks(ranks, written, valid),
            c=c,
            output_gates=output_gates,
            value=value,
            written=written,
            replaced=replaced,
            address=address,
            scores=scores,
            recency=recency,
            query=query,
            h_and_r=h_and_r,
            gated=gated,
            input_gates=input_gates,
            g_h_r=g_h_r,
            state_gates=state_gates,
            i_f_g=i_f_g,
        )

    def scale_scores(
        self, weights: Tensors, projected: Tensors, gumbel: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Apply noise and temperature, at least in float32.

        Scores are (z_a + h U_a + content match + recency + noise) /
        temperature, Eq. 9 before its softmax. What does not depend on h is
        computed here, for all steps at once: `projected["address"]`,
        `weights["address_recurrent_kernel"]`, `weights["match_scale"]` and
        `weights["recency_scale"]` are divided by the temperature; in half
        precision there is `weights["score_scale"]` instead of a scaled kernel.
        """
        wide = memory_ops.wide_dtype(self.compute_dtype)
        weights = dict(weights)
        temperature = ops.cast(weights.pop("temperature"), wide)
        kernel = weights["address_recurrent_kernel"]
        address = ops.cast(projected["address"], wide)
        noise_scale = weights.pop("noise_scale", None)
        if gumbel is not None and noise_scale is not None:
            noise_scale = ops.cast(noise_scale, wide)
            address = address + noise_scale * ops.cast(gumbel, wide)
        if wide == self.compute_dtype:
            weights["address_recurrent_kernel"] = kernel / temperature
        else:
            # A half precision kernel might overflow.
            weights["score_scale"] = 1 / temperature
        if self.content_addressing:
            scale = ops.cast(weights.pop("content_scale"), wide)
            scale = ops.exp(ops.clip(scale, -LARGEST_SCALE, LARGEST_SCALE))
            scale = scale / math.sqrt(self.memory_dim)
            weights["match_scale"] = scale / temperature
        if self.recency_addressing:
            scale = ops.cast(weights["recency_scale"], wide)
            weights["recency_scale"] = scale / temperature
        return weights, {**projected, "address": address / temperature}

    def _score_slots(
        self, weights, projected, h, memory, ranks, drop, in_place, rows
    ):
        """The scores, the query and the recency of the slots."""
        h = h if drop is None else h * drop[:, : self.units]
        query = self._query(weights, projected, h)
        scores = self._scores(weights, projected, query, h, memory, in_place)
        recency = None
        if ranks is not None:
            recency = backends.log_of_one_plus(ranks, rows.get("recency"))
            scores = addcmul(
                scores, weights["recency_scale"], recency, in_place
            )
        return clip_gradient(scores), query, recency

    def _query(self, weights, projected, h):
        if not self.content_addressing:
            return None
        rows = weights["query_kernel"][-self.units :]
        query = clip_gradient(addmm(projected["query"], h, rows))
        return clip_factor(query)

    def _scores(self, weights, projected, query, h, memory, in_place):
        address = projected["address"]
        kernel = weights["address_recurrent_kernel"]
        wide = memory_ops.wide_dtype(self.compute_dtype)
        if wide == self.compute_dtype:
            scores = addmm(address, h, kernel, in_place)
        else:
            product = ops.cast(ops.matmul(h, kernel), wide)
            scores = address + product * weights["score_scale"]
        if query is None:
            return scores
        match = memory_ops.match(memory, ops.cast(query, wide))
        return scores + clip_gradient(weights["match_scale"]) * match

    def input_gates(
        self, weights: Tensors, gates: Tensor, in_place: bool
    ) -> Tensor:
        """Eq. 3: the gates g^h and g^r of [h, r]."""
        if self.layer_norm:
            gates = self.normalise_input_gates(weights, gates)
        return activate(self.recurrent_activation, gates, in_place)

    def normalise_input_gates(self, weights: Tensors, gates: Tensor) -> Tensor:
        return layer_norm(
            gates,
            self.gate_sizes,
            weights["gate_norm_gain"],
            weights["gate_norm_bias"],
        )

    def integrate(
        self, weights: Tensors, x: Tensor, gated: Tensor, in_place: bool = False
    ) -> Tensor:
        """Eq. 6 without activations, for the gates in `weights`."""
        return addmm(x, gated, weights["recurrent_kernel"], in_place)

    def output_gates(
        self, weights: Tensors, inputs: Tensor, gated: Tensor
    ) -> Tensor:
        """o^h and o^r of Eq. 6, from prepared inputs and the output weights."""
        x = affine(inputs, weights["kernel"], weights.get("bias"))
        return self.integrate(weights, x, gated)

    def _split_gates(self, gates):
        """The gates of the state, and of the output if they are computed."""
        if gates.shape[-1] == 3 * self.units:
            return gates, None
        return ops.split(gates, [3 * self.units], axis=-1)

    def state_gates(
        self, weights: Tensors, gates: Tensor, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """[i, f] and g of Eq. 6."""
        if self.layer_norm:
            gates = self.normalise_state_gates(weights, gates)
        i_f, g = ops.split(gates, [2 * self.units], axis=-1)
        return (
            activate(self.recurrent_activation, i_f, in_place),
            activate(self.activation, g, in_place),
        )

    def normalise_state_gates(self, weights: Tensors, gates: Tensor) -> Tensor:
        u = self.units
        return layer_norm(
            gates,
            [u] * 3,
            weights["norm_gain"][: 3 * u],
            weights["norm_bias"][: 3 * u],
        )

    def mix(self, i_f: Tensor, g: Tensor, h_tm1: Tensor) -> Tensor:
        """f * h + i * g of Eq. 7."""
        i, f = ops.split(i_f, [self.units], axis=-1)
        return addcmul(f * h_tm1, i, g, in_place=True)

    def new_state(self, weights: Tensors, mixed: Tensor) -> Tensor:
        """Eq. 7: the new hidden state."""
        if self.layer_norm:
            mixed = self.normalise_state(weights, mixed)
        return self.state_activation(mixed)

    def normalise_state(self, weights: Tensors, mixed: Tensor) -> Tensor:
        return layer_norm(
            mixed,
            [self.units],
            weights["state_norm_gain"],
            weights["state_norm_bias"],
        )

    def output(
        self,
        weights: Tensors,
        gates: Tensor,
        output_inputs: Tensor,
        in_place: bool = False,
    ) -> Tensor:
        """Eq. 8, for any leading axes.

        `in_place`: whether `gates` may be overwritten.
        """
        if self.layer_norm:
            sizes = self.five_gate_sizes[3:]
            gates = layer_norm(
                gates,
                sizes,
                weights["norm_gain"][-sum(sizes) :],
                weights["norm_bias"][-sum(sizes) :],
            )
        return backends.gate(
            self.recurrent_activation,
            gates,
            self.output_activation(output_inputs),
            in_place,
        )

    def output_inputs(self, c: Tensor, r: Tensor) -> Tensor:
        """What the output shows: the new state and what was read."""
        return ops.concatenate([c, r], axis=-1) if self.output_read else c

    def _written_value(self, weights, projected, h):
        if not self.has_write_kernel:
            return h
        rows = weights["write_kernel"][-self.units :]
        value = affine(h, rows, weights.get("write_bias"))
        value = value + projected["write"] if self.write_inputs else value
        return self.write_activation(clip_gradient(value))

    def _write(self, memory, address, count, value, valid, record, in_place):
        """The new memory, the slot or weights of the write, the old row."""
        if address.slot is None:
            weights = memory_ops.soft_write_weights(count, address.weights)
            return memory_ops.blend(memory, weights, value), weights, None
        slot = memory_ops.write_slot(count, address.slot, self.memory_slots)
        replaced = None
        if record or valid is not None:
            replaced = memory_ops.row(memory, slot)
        if valid is not None:
            # Rewriting the old row is cheaper than selecting whole memories.
            value = ops.where(valid, value, replaced)
        memory = memory_ops.overwrite(
            memory, slot, value, in_place, after=replaced
        )
        return memory, slot, replaced

    def _update_ranks(self, ranks, written, valid):
        if ranks is None:
            return None
        slot = written
        if len(written.shape) == 2:
            # A distributed write counts for the slot with the largest weight.
            slot = backends.argmax_slot(written)
        new = memory_ops.update_ranks(ranks, slot)
        return new if valid is None else ops.where(valid, new, ranks)


def prepare_inputs(inputs: Tensor, sequence_noise: SequenceNoise) -> Tensor:
    """The inputs, clipped and with dropout, for products with kernels."""
    # The gradient of a kernel is proportional to them, and is multiplied with
    # them again after the next update.
    return times(clip_factor(backends.dense(inputs)), sequence_noise.inputs)


def affine(inputs: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    if bias is None:
        return ops.matmul(inputs, kernel)
    return addmm(bias, inputs, kernel)


def times(x: Tensor, mask: Tensor) -> Tensor:
    return x if mask is None else x * mask


def apply_zoneout(
    rate: float, new: Tensor, old: Tensor, zoneout_mask: Tensor, training: bool
) -> Tensor:
    """Units keep their old value; at inference the expectation is used."""
    if not rate:
        return new
    if training:
        return ops.where(zoneout_mask, old, new)
    return rate * old + (1 - rate) * new
