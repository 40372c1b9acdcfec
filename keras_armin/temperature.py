"""Temperatures that follow a schedule while a layer trains."""

from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_armin import checks
from keras_armin.recurrent import MemoryRNN

# What a schedule may fall to: dividing by 0 would give NaN.
LOWEST_TEMPERATURE = 1e-3
_TAKES = (
    "a finite number above 0, or an instance of a schedule of "
    "`keras.optimizers.schedules`"
)


class TemperedRNN(MemoryRNN):
    """A layer whose cell may have a temperature, which may have a schedule."""

    temperature_schedule: LearningRateSchedule | None = None
    temperature_step: keras.Variable | None = None

    def build(self, sequences_shape, initial_state_shape=None):
        super().build(sequences_shape, initial_state_shape)
        if self.temperature_schedule is not None:
            self.temperature_step = self.add_weight(
                shape=(),
                initializer="zeros",
                dtype="int",
                trainable=False,
                name="temperature_step",
            )

    def call(
        self,
        sequences: Any,
        initial_state: list | None = None,
        mask: Any = None,
        training: bool = False,
        reset: Any = None,
    ) -> Any:
        if training and self.temperature_schedule is not None:
            self._follow_schedule()
        return super().call(sequences, initial_state, mask, training, reset)

    def _follow_schedule(self):
        temperature = self.cell.temperature
        value = self.temperature_schedule(self.temperature_step.value)
        value = ops.cast(value, temperature.dtype)
        temperature.assign(ops.maximum(value, LOWEST_TEMPERATURE))
        self.temperature_step.assign_add(1)

    def load_own_variables(self, store):
        # Whether the temperature follows a schedule is no part of the
        # contract: either kind of layer loads what the other saved.
        has_step = self.temperature_step is not None
        if has_step == ("temperature_step" in store.keys()):
            super().load_own_variables(store)

    def get_config(self):
        config = super().get_config()
        if self.temperature_schedule is not None:
            config["temperature"] = keras.optimizers.schedules.serialize(
                self.temperature_schedule
            )
        return config


def split_schedule(temperature):
    """The temperature to start with, and its schedule, if it has one."""
    schedule = _as_schedule(temperature)
    if schedule is None:
        return checks.positive("temperature", temperature, _TAKES), None
    return float(ops.convert_to_numpy(schedule(0))), schedule


def _as_schedule(temperature):
    if isinstance(temperature, dict):
        return keras.optimizers.schedules.deserialize(temperature)
    if isinstance(temperature, LearningRateSchedule):
        return temperature
    return None
