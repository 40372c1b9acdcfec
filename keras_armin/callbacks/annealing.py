"""Schedules for scalar weights of the cells."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_armin import keras_private
from keras_armin import validation
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_layer import MINIMUM
from keras_armin.memory_layer import MemoryLayer


class _Annealing(keras.callbacks.Callback):
    """Sets a scalar weight of all cells in a model during training."""

    weight: str

    def __init__(
        self,
        schedule: Callable[[int], Any],
        per: str = "batch",
        initial_step: int = 0,
    ) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(
                "Argument `schedule` must be a learning rate schedule or a "
                f"function from an integer to a float. Received: {schedule!r}"
            )
        self.schedule = schedule
        self.per = validation.choice("per", per, ("batch", "epoch"))
        self.step = validation.count("initial_step", initial_step)
        self._first_step_of_epoch = self.step
        self._value: float | None = None

    def _cells(self) -> list[MemoryCell]:
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryCell)
            and getattr(layer, self.weight, None) is not None
        ]

    def on_train_begin(self, logs: dict | None = None) -> None:
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
                isinstance(layer, MemoryLayer)
                and self.weight in layer.schedules
            ):
                raise ValueError(
                    f"Layer '{layer.name}' has its own schedule for "
                    f"`{self.weight}`. Use either that or `{kind}`."
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._first_step_of_epoch = self.step
        if self.per == "epoch":
            self._set(epoch)

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        if self.per == "batch":
            self._set(self._first_step_of_epoch + batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.step = self._first_step_of_epoch + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None and self._value is not None:
            logs[self.weight] = self._value

    def _set(self, step: int) -> None:
        value = float(ops.convert_to_numpy(self.schedule(step)))
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"The `schedule` of `{type(self).__name__}` must return finite "
                f"numbers of at least 0. Received: {value} at step {step}"
            )
        value = max(value, MINIMUM[self.weight])
        if value == self._value:
            return
        self._value = value
        # Through `self.model`, which on JAX syncs the variables from the
        # training loop first.
        for cell in self._cells():
            getattr(cell, self.weight).assign(value)


class TemperatureAnnealing(_Annealing):
    """Sets the temperature of every ARMIN in the model during training.

    It applies to `ARMIN`, `TARDIS` and `AwTA` layers and their bare cells, at
    any depth of the model.

    Args:
        schedule: A `keras.optimizers.schedules` schedule, or a function from
            an integer to a float. Values below 0.001, as of a cosine decay to
            0, are replaced by 0.001.
        per: `"batch"` or `"epoch"`: the unit of the schedule. Batches are
            counted over the whole training, epochs as `fit` numbers them, so
            that with `"epoch"` a `fit(initial_epoch=...)` continues the
            schedule. Defaults to `"batch"`. With `steps_per_execution` the
            batches of one execution share the temperature of the first.
        initial_step: int. Number of the first batch. Defaults to `0`.

    The current value is added to the logs of an epoch as `temperature`.
    """

    weight = "temperature"
    _advice = "There is no temperature to set."


class NoiseAnnealing(_Annealing):
    """Sets the `noise_scale` of every ARMIN in the model during training.

    It applies to `ARMIN` layers and bare `ARMINCell`s at any depth of the
    model that were created with a `noise_scale` above 0; those created with 0
    never draw noise.

    Args:
        schedule, per, initial_step: As for `TemperatureAnnealing`; the noise
            scale may fall to 0.

    The current value is added to the logs of an epoch as `noise_scale`.
    """

    weight = "noise_scale"
    _advice = "A layer created with `noise_scale=0` never draws noise."


class SlopeAnnealing(_Annealing):
    """Sets the `slope` of every HM-LSTM in the model during training.

    Args:
        schedule, per, initial_step: As for `TemperatureAnnealing`.

    The current value is added to the logs of an epoch as `slope`.
    """

    weight = "slope"
    _advice = "There is no slope to set."
