"""Keras callbacks for training with a memory."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_armin import checks
from keras_armin import keras_private
from keras_armin.cell import MemoryCell
from keras_armin.inspection import MemoryTrace
from keras_armin.inspection import trace_memory
from keras_armin.recurrent import MemoryRNN
from keras_armin.temperature import LOWEST
from keras_armin.temperature import TemperedRNN


class _Annealing(keras.callbacks.Callback):
    """Sets a scalar weight of all cells that have it while a model trains."""

    weight: str

    def __init__(
        self,
        schedule: Callable[[int], Any],
        per: str = "batch",
        initial_step: int = 0,
    ):
        super().__init__()
        if not callable(schedule):
            raise TypeError(
                "Argument `schedule` must be a learning rate schedule or a "
                f"function from an integer to a float. Received: {schedule!r}"
            )
        self.schedule = schedule
        self.per = checks.choice("per", per, ("batch", "epoch"))
        self.step = checks.count("initial_step", initial_step)
        self._first_step_of_epoch = self.step
        self._value = None

    def _cells(self):
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryCell)
            and getattr(layer, self.weight, None) is not None
        ]

    def on_train_begin(self, logs=None):
        self._value = None
        kind = type(self).__name__
        if not self._cells():
            raise ValueError(
                f"`{kind}` found no ARMIN with a `{self.weight}` in the model "
                f"'{self.model.name}', nor another layer with one. "
                + self._advice
            )
        for layer in keras_private.all_layers(self.model):
            if (
                isinstance(layer, TemperedRNN)
                and self.weight in layer.schedules
            ):
                raise ValueError(
                    f"Layer '{layer.name}' follows a schedule of its own for "
                    f"`{self.weight}`. Use that or `{kind}`, not both."
                )

    def on_epoch_begin(self, epoch, logs=None):
        self._first_step_of_epoch = self.step
        if self.per == "epoch":
            self._set(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.per == "batch":
            self._set(self._first_step_of_epoch + batch)

    def on_train_batch_end(self, batch, logs=None):
        self.step = self._first_step_of_epoch + batch + 1

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None and self._value is not None:
            logs[self.weight] = self._value

    def _set(self, step):
        value = float(ops.convert_to_numpy(self.schedule(step)))
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"The `schedule` of `{type(self).__name__}` must give finite "
                f"numbers from 0 on. At step {step} it gave {value}"
            )
        value = max(value, LOWEST[self.weight])
        if value == self._value:
            return
        self._value = value
        # Through `self.model`, which on JAX fetches the variables from the
        # training loop first.
        for cell in self._cells():
            getattr(cell, self.weight).assign(value)


class TemperatureAnnealing(_Annealing):
    """Sets the temperature of every ARMIN in the model while it trains.

    It serves `ARMIN` and a bare `ARMINCell` alike, at any depth of the model,
    and so it does `TARDIS` and `AwTA`.

    Args:
        schedule: A `keras.optimizers.schedules` schedule, or a function from
            an integer to a float. Where it falls below 0.001, as a cosine
            decay to 0, the temperature stays there.
        per: `"batch"` or `"epoch"`: what the schedule counts. Batches are
            counted over the whole training, epochs as `fit` numbers them, so
            with `"epoch"` a continued `fit(initial_epoch=...)` goes on where
            it was. Defaults to `"batch"`. With `steps_per_execution` the
            batches of one execution share the temperature of the first.
        initial_step: int. Number of the first batch. Defaults to `0`.

    The current value is added to the logs of an epoch as `temperature`.
    """

    weight = "temperature"
    _advice = "There is no temperature to set."


class NoiseAnnealing(_Annealing):
    """Sets the `noise_scale` of every ARMIN in the model while it trains.

    It serves `ARMIN` and a bare `ARMINCell` alike, at any depth of the model,
    if they were made with a `noise_scale` above 0; those made with 0 never
    draw noise.

    Args:
        schedule, per, initial_step: As for `TemperatureAnnealing`; the noise
            scale may fall to 0.

    The current value is added to the logs of an epoch as `noise_scale`.
    """

    weight = "noise_scale"
    _advice = "A layer made with `noise_scale=0` never draws noise."


class ValidationState(keras.callbacks.Callback):
    """Keeps validation inside `fit` from disturbing stateful layers.

    Validation starts from the initial state, and training goes on afterwards
    from where it was. Only layers of this package are looked after. Use one
    object for one `fit`.

    Args:
        reset_each_epoch: bool. Also start every epoch from the initial state.
            Defaults to `False`.
    """

    def __init__(self, reset_each_epoch: bool = False):
        super().__init__()
        self.reset_each_epoch = checks.flag(
            "reset_each_epoch", reset_each_epoch
        )
        self._training = False
        self._saved = None

    def _layers(self):
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryRNN) and layer.states is not None
        ]

    def on_train_begin(self, logs=None):
        self._training = True

    def on_train_end(self, logs=None):
        self._training = False

    def on_epoch_begin(self, epoch, logs=None):
        if self.reset_each_epoch:
            for layer in self._layers():
                layer.reset_state()

    def on_test_begin(self, logs=None):
        if not self._training:
            return
        layers = self._layers()
        self._saved = [layer.get_state() for layer in layers]
        for layer in layers:
            layer.reset_state()

    def on_test_end(self, logs=None):
        if self._saved is None:
            return
        for layer, state in zip(self._layers(), self._saved):
            layer.set_state(state)
        self._saved = None


class SlotUsage(keras.callbacks.Callback):
    """Logs how evenly a layer reads its memory, at the end of each epoch.

    Added to the logs, and so to `History`, `CSVLogger` and `TensorBoard`:

    - `slot_usage`: fraction of the slots that were ever the favoured one;
    - `read_entropy`: entropy in bits of the reads taken together, 0 where
      always the same slot is read, log2(memory_slots) where all are read
      alike.

    Put it before the callbacks that are to see these.

    Args:
        layer: The `ARMIN`, or `keras.layers.RNN` around an `ARMINCell`.
        sequences: Inputs of that layer, `(batch, time, features)`; or, with
            `inputs_model`, inputs of that model.
        inputs_model: Model that makes the layer's inputs, such as
            `keras.Model(model.inputs, layer.input)`. Defaults to `None`.
        prefix: str. Put before both names, to tell several layers apart.
            Defaults to `""`.
    """

    def __init__(
        self,
        layer: keras.layers.RNN,
        sequences: Any,
        inputs_model: keras.Model | None = None,
        prefix: str = "",
    ):
        super().__init__()
        self.layer = layer
        self.sequences = sequences
        self.inputs_model = inputs_model
        self.prefix = prefix

    def on_epoch_end(self, epoch, logs=None):
        if logs is None:
            return
        self.model  # noqa: B018 fetches the variables on JAX
        sequences = self.sequences
        if self.inputs_model is not None:
            sequences = self.inputs_model(sequences)
        trace = trace_memory(self.layer, sequences)
        logs[f"{self.prefix}slot_usage"] = slot_usage(trace)
        logs[f"{self.prefix}read_entropy"] = entropy_in_bits(read_share(trace))


def slot_usage(trace: MemoryTrace) -> float:
    """Fraction of the slots that some step favoured."""
    slots = trace.read_weights.shape[-1]
    return np.isin(np.arange(slots), trace.read_slots).sum() / slots


def read_share(trace: MemoryTrace) -> np.ndarray:
    """Fraction of all reads that went to each slot."""
    total = trace.read_weights.sum(axis=(0, 1), dtype="float64")
    return total / total.sum()


def entropy_in_bits(share) -> float:
    used = share[share > 0]
    return float(-(used * np.log2(used)).sum())
