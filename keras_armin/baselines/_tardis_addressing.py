"""The addressing of TARDIS, shared by TARDIS and AwTA."""

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import times
from keras_armin.backends import ops
from keras_armin.baselines._heads import NORM_EPSILON
from keras_armin.baselines._heads import unit_rows
from keras_armin.memory_cell import MemoryCell
from keras_armin.normalization import layer_norm
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# Subtracted from the logit of the slot that was read last.
PENALTY = 100.0


class TARDISAddressing(MemoryCell):
    """Logits from a small network applied to each slot.

        logit_i = a tanh(W [x, state, key_i, M_i, u] + b)

    `u` is how often each slot has been read so far. 100 is subtracted from the
    logit of the slot read last. Neither has a gradient.

    A mixin for cells with `units`, `memory_slots` and `memory_dim`, and the
    states `usage` and `last_read`, which compute the part of `x` and `b`.
    """

    def set_addressing(self, key_dim: int, address_units: int | None) -> None:
        self.key_dim = validation.size("key_dim", key_dim)
        self.address_units = validation.size_or_default(
            "address_units", address_units, max(1, self.units // 4)
        )

    @property
    def address_states(self) -> dict[str, int]:
        """Sizes of the states by name: read counts, and the last slot."""
        digits = memory_ops.POINTER_DIGITS
        return {"usage": self.memory_slots * digits, "last_read": digits}

    def build_addressing(self, learn_keys: bool) -> None:
        width = [self.address_units]
        rows = {
            "address_memory_kernel": self.memory_dim,
            "address_key_kernel": self.key_dim,
            "address_usage_kernel": self.memory_slots,
        }
        for name, size in rows.items():
            setattr(self, name, self.add_kernel(name, "kernel", size, width))
        self.address_keys = self.add_weight(
            shape=(self.memory_slots, self.key_dim),
            initializer=keras.initializers.RandomNormal(stddev=1.0),
            trainable=learn_keys,
            name="address_keys",
        )
        self.address_vector = self.add_kernel(
            "address_vector", "kernel", self.address_units, [1]
        )
        if self.layer_norm:
            zeros, ones = keras.initializers.Zeros(), keras.initializers.Ones()
            slots = self.memory_slots
            self.address_norm_gain = self.add_norm(
                "address_norm_gain", slots, ones
            )
            self.address_norm_bias = self.add_norm(
                "address_norm_bias", slots, zeros
            )

    def address_logits(
        self,
        weights: Tensors,
        from_inputs: Tensor,
        from_state: Tensor,
        memory: Tensor,
        usage: Tensor,
        last_read: Tensor,
    ) -> Tensor:
        """Logits `(batch, n)` in float32 or wider.

        `from_inputs` and `from_state` are `(batch, address_units)`; `usage`
        and `last_read` are states.
        """
        wide = memory_ops.wide_dtype(self.compute_dtype)
        used = self._normal_usage(self._counts(usage), wide)
        of_all = ops.cast(from_inputs + from_state, wide) + ops.matmul(
            used, ops.cast(weights["address_usage_kernel"], wide)
        )
        of_each = ops.matmul(memory, weights["address_memory_kernel"])
        of_each = of_each + ops.matmul(
            weights["address_keys"], weights["address_key_kernel"]
        )
        hidden = ops.tanh(ops.expand_dims(of_all, 1) + ops.cast(of_each, wide))
        vector = ops.cast(weights["address_vector"], wide)
        logits = ops.matmul(hidden, vector)[..., 0]
        if self.layer_norm:
            # Before the penalty, which would make all others nearly equal.
            logits = layer_norm(
                logits,
                [self.memory_slots],
                weights["address_norm_gain"],
                weights["address_norm_bias"],
            )
        logits = logits - PENALTY * self._last(last_read, wide)
        return unit_rows(logits) if self.released else logits

    def apply_temperature(
        self, logits: Tensor, gumbel: Tensor, weights: Tensors
    ) -> Tensor:
        """Scores: logits with noise, divided by the temperature."""
        if gumbel is not None:
            gumbel = ops.cast(gumbel, logits.dtype)
            logits = logits + times(gumbel, weights.get("noise_scale"))
        return logits / ops.cast(weights["temperature"], logits.dtype)

    def record_read(self, read: Tensor, usage: Tensor) -> list:
        """The states after a read of a slot `(batch,)`, or by weights."""
        slot = read if len(read.shape) == 1 else ops.argmax(read, -1)
        slot = ops.cast(slot, "int32")
        once = ops.one_hot(slot, self.memory_slots, dtype="int32")
        counts = ops.minimum(self._counts(usage) + once, memory_ops.POINTER_MAX)
        counts = memory_ops.count_to_pointer(counts, usage.dtype)
        size = self.address_states["usage"]
        return [
            ops.reshape(counts, (-1, size)),
            # Zero means that no slot has been read.
            memory_ops.count_to_pointer(slot + 1, usage.dtype),
        ]

    def _counts(self, usage: Tensor) -> Tensor:
        digits = (-1, self.memory_slots, memory_ops.POINTER_DIGITS)
        return memory_ops.pointer_to_count(ops.reshape(usage, digits))

    def _normal_usage(self, counts: Tensor, dtype: str) -> Tensor:
        counts = ops.cast(counts, dtype)
        if self.released:
            return unit_rows(counts)
        centred = counts - ops.expand_dims(ops.mean(counts, -1), -1)
        variance = ops.expand_dims(ops.mean(ops.square(centred), -1), -1)
        return centred * ops.rsqrt(variance + NORM_EPSILON)

    def _last(self, last_read: Tensor, dtype: str) -> Tensor:
        slot = memory_ops.pointer_to_count(last_read) - 1
        return ops.one_hot(slot, self.memory_slots, dtype=dtype)
