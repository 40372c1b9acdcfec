"""Logs of how a layer uses its memory."""

from typing import Any

import keras
import numpy as np

from keras_armin.inspection import MemoryTrace
from keras_armin.inspection import trace_memory


class SlotUsage(keras.callbacks.Callback):
    """Logs how evenly a layer reads its memory, at the end of each epoch.

    Added to the logs, and so to `History`, `CSVLogger` and `TensorBoard`:

    - `slot_usage`: fraction of the slots that had the largest read weight at
      any step;
    - `read_entropy`: entropy in bits of all reads, 0 if the same slot is
      always read, log2(memory_slots) if all slots are read equally often.

    List it before the callbacks that use these logs.

    Args:
        layer: The `ARMIN`, or `keras.layers.RNN` around an `ARMINCell`.
        sequences: Inputs of that layer, `(batch, time, features)`; or, with
            `inputs_model`, inputs of that model.
        inputs_model: Model that computes the inputs of the layer, such as
            `keras.Model(model.inputs, layer.input)`. Defaults to `None`.
        prefix: str. Prefix of both names, to distinguish several layers.
            Defaults to `""`.
    """

    def __init__(
        self,
        layer: keras.layers.RNN,
        sequences: Any,
        inputs_model: keras.Model | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.sequences = sequences
        self.inputs_model = inputs_model
        self.prefix = prefix

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is None:
            return
        self.model  # noqa: B018 syncs the variables on JAX
        sequences = self.sequences
        if self.inputs_model is not None:
            sequences = self.inputs_model(sequences)
        trace = trace_memory(self.layer, sequences)
        logs[f"{self.prefix}slot_usage"] = slot_usage(trace)
        logs[f"{self.prefix}read_entropy"] = entropy_in_bits(read_share(trace))


def slot_usage(trace: MemoryTrace) -> float:
    """Fraction of the slots that had the largest read weight at any step."""
    slots = trace.read_weights.shape[-1]
    return np.isin(np.arange(slots), trace.read_slots).sum() / slots


def read_share(trace: MemoryTrace) -> np.ndarray:
    """Fraction of all reads that went to each slot."""
    total = trace.read_weights.sum(axis=(0, 1), dtype="float64")
    return total / total.sum()


def entropy_in_bits(share: np.ndarray) -> float:
    used = share[share > 0]
    return float(-(used * np.log2(used)).sum())
