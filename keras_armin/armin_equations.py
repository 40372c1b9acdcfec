"""The equations of ARMIN, in the order of the paper."""

import math
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_armin import memory as memory_ops
from keras_armin.cell import Step
from keras_armin.noise import SequenceNoise
from keras_armin.normalization import layer_norm


class ARMINState(NamedTuple):
    """The states of the cell, in order."""

    output: Any  # (batch, output_size)
    h: Any  # (batch, units)
    memory: Any  # (batch, memory_slots * memory_dim)
    pointer: Any  # (batch, 4): the number of writes, see memory.py


class Projection(NamedTuple):
    """Columns of the projected inputs, in the order of `kernel`."""

    address: Any
    input_gates: Any
    gates: Any


class ARMINEquations:
    """What `ARMINCell` computes, from its arguments and given weights.

    Nothing here creates a weight, draws a random number or keeps a state.
    """

    def project(self, weights, inputs, sequence_noise=SequenceNoise()):
        """Everything that depends on `inputs` `(..., features)` alone."""
        if sequence_noise.inputs is not None:
            inputs = inputs * sequence_noise.inputs
        kernel = ops.matmul(inputs, weights["kernel"])
        projected = {"kernel": _plus(kernel, weights.get("bias"))}
        rows = self.input_dim
        if self.write_inputs:
            projected["write"] = ops.matmul(
                inputs, weights["write_kernel"][:rows]
            )
        if self.content_addressing:
            projected["query"] = ops.matmul(
                inputs, weights["query_kernel"][:rows]
            )
        return projected

    def step(
        self, weights, projected, states, step_noise, sequence_noise, training
    ) -> Step:
        """Equations 3 to 10 of the paper, then the write."""
        state = ARMINState(*states)
        h_tm1 = state.h
        memory = ops.reshape(
            state.memory, (-1, self.memory_slots, self.memory_dim)
        )
        count = memory_ops.pointer_to_count(state.pointer)
        x = self._split_projection(projected["kernel"])
        drop_h, drop_r = self._split_recurrent_mask(sequence_noise.recurrent)

        address = self._address(
            weights,
            x.address,
            projected,
            _times(h_tm1, drop_h),
            memory,
            step_noise.gumbel,
        )
        r = memory_ops.read(memory, address)
        gated_h, gated_r = self._input_gates(
            weights, x.input_gates, h_tm1, r, drop_h, drop_r
        )
        c, output = self._integrate(
            weights, x.gates, h_tm1, r, gated_h, gated_r
        )
        h = self._zoneout(c, h_tm1, step_noise.zoneout, training)
        value = self._written_value(weights, projected, h)
        memory, written = self._write(memory, address, count, value)
        flat = ops.reshape(memory, (-1, self.memory_slots * self.memory_dim))
        pointer = memory_ops.count_to_pointer(
            memory_ops.advance(count), h.dtype
        )
        read = address.slot if address.weights is None else address.weights
        return Step([output, h, flat, pointer], read, written)

    def _split_projection(self, projected):
        """Columns: address | g^h g^r | i f g o^h o^r."""
        gates = self.memory_slots + sum(self._gate_sizes)
        return Projection(
            *ops.split(projected, [self.memory_slots, gates], axis=-1)
        )

    def _split_recurrent_mask(self, mask):
        if mask is None:
            return None, None
        return ops.split(mask, [self.units], axis=-1)

    def _address(self, weights, x, projected, h, memory, gumbel):
        """Eq. 9: where to read, in float32 at least."""
        logits = x + ops.matmul(h, weights["address_recurrent_kernel"])
        wide = memory_ops.wide_dtype(self.compute_dtype)
        logits = ops.cast(logits, wide)
        if self.content_addressing:
            query = projected["query"] + ops.matmul(
                h, weights["query_kernel"][self.input_dim :]
            )
            query = ops.expand_dims(ops.cast(query, wide), 1)
            match = ops.sum(ops.cast(memory, wide) * query, axis=-1)
            scale = ops.exp(ops.cast(weights["content_scale"], wide))
            logits = logits + scale * match / math.sqrt(self.memory_dim)
        if gumbel is not None:
            gumbel = ops.cast(gumbel, wide)
        temperature = ops.cast(weights["temperature"], wide)
        return memory_ops.address(logits, temperature, self.addressing, gumbel)

    def _input_gates(self, weights, x, h, r, drop_h, drop_r):
        """Eq. 3 to 5: what of the hidden state and of r takes part."""
        both = ops.concatenate([_times(h, drop_h), _times(r, drop_r)], axis=-1)
        gates = x + ops.matmul(both, weights["gate_recurrent_kernel"])
        if self.layer_norm:
            gates = layer_norm(
                gates,
                self._gate_sizes,
                weights["gate_norm_gain"],
                weights["gate_norm_bias"],
            )
        g_h, g_r = ops.split(gates, [self.units], axis=-1)
        gated_h = self.recurrent_activation(g_h) * h
        gated_r = self.recurrent_activation(g_r) * r
        return _times(gated_h, drop_h), _times(gated_r, drop_r)

    def _integrate(self, weights, x, h_tm1, r, gated_h, gated_r):
        """Eq. 6 to 8: the new hidden state and the output."""
        gated = ops.concatenate([gated_h, gated_r], axis=-1)
        gates = x + ops.matmul(gated, weights["recurrent_kernel"])
        if self.layer_norm:
            gates = layer_norm(
                gates,
                self._five_gate_sizes,
                weights["norm_gain"],
                weights["norm_bias"],
            )
        u, sigma = self.units, self.recurrent_activation
        i, f, g, o_h, *o_r = ops.split(
            gates, [u, 2 * u, 3 * u, 4 * u][: 3 + self.output_read], axis=-1
        )
        c = sigma(f) * h_tm1 + sigma(i) * self.activation(g)
        if self.layer_norm:
            c = layer_norm(
                c, [u], weights["state_norm_gain"], weights["state_norm_bias"]
            )
        c = self.state_activation(c)
        output = sigma(o_h) * self.output_activation(c)
        if self.output_read:
            read = sigma(*o_r) * self.output_activation(r)
            output = ops.concatenate([output, read], axis=-1)
        return c, output

    def _zoneout(self, new, old, keep_old, training):
        if not self.zoneout:
            return new
        if training:
            return ops.where(keep_old, old, new)
        return self.zoneout * old + (1 - self.zoneout) * new

    def _written_value(self, weights, projected, h):
        if not self.has_write_kernel:
            return h
        value = ops.matmul(h, weights["write_kernel"][-self.units :])
        if self.write_inputs:
            value = value + projected["write"]
        return _plus(value, weights.get("write_bias"))

    def _write(self, memory, address, count, value):
        """The new memory, and the slot or the weights written to."""
        if address.slot is None:
            weights = memory_ops.soft_write_weights(count, address.weights)
            return memory_ops.blend(memory, weights, value), weights
        slot = memory_ops.write_slot(count, address.slot, self.memory_slots)
        return memory_ops.overwrite(memory, slot, value), slot


def _plus(x, bias):
    return x if bias is None else x + bias


def _times(x, mask):
    return x if mask is None else x * mask
