"""The base class of layers that create their own cell."""

import inspect
from operator import attrgetter
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_armin import validation
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_cell import init_parameters
from keras_armin.memory_rnn import MemoryRNN
from keras_armin.types import Shape

FLAGS = (
    "return_sequences",
    "return_state",
    "go_backwards",
    "stateful",
    "unroll",
    "zero_output_for_mask",
)

# Arguments that may be schedules, and the smallest values they may take: a
# temperature of 0 would give NaN.
MINIMUM = {"temperature": 1e-3, "noise_scale": 0.0, "slope": 1e-3}
_CHECKS = {
    "temperature": validation.positive,
    "noise_scale": validation.not_negative,
    "slope": validation.positive,
}
_TAKES = {
    "temperature": "above 0",
    "noise_scale": "of at least 0",
    "slope": "above 0",
}


class MemoryLayer(MemoryRNN):
    """A layer with the arguments of its cell, followed by `FLAGS`.

    A subclass sets `cell_class` and `cell_name`, and has the arguments of the
    cell as attributes. `temperature`, `noise_scale` and `slope`, if the cell
    has them, may be schedules.
    """

    cell_class: type[MemoryCell]
    cell_name: str
    signature: inspect.Signature

    temperature_schedule: LearningRateSchedule | None = None
    noise_scale_schedule: LearningRateSchedule | None = None
    slope_schedule: LearningRateSchedule | None = None
    temperature_step: keras.Variable | None = None
    noise_scale_step: keras.Variable | None = None
    slope_step: keras.Variable | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "cell_class" not in vars(cls):
            return
        parameters = init_parameters(cls.cell_class)
        for parameter in parameters:
            of_cell = property(
                attrgetter(f"cell.{parameter.name}"),
                doc=f"See `{cls.cell_class.__name__}`.",
            )
            setattr(cls, parameter.name, of_cell)
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters += [
            inspect.Parameter(name, keyword, default=False, annotation=bool)
            for name in FLAGS
        ]
        rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        cls.signature = inspect.Signature([*parameters, rest])
        if "__init__" not in vars(cls):
            # For `help`.
            cls.__signature__ = cls.signature

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        rest = arguments.pop("kwargs")
        flags = {name: arguments.pop(name) for name in FLAGS}
        arguments, schedules = _split_schedules(arguments)
        cell = self.cell_class(
            **arguments,
            dtype=rest.get("dtype"),
            trainable=rest.get("trainable", True),
            name=self.cell_name,
        )
        super().__init__(cell, **flags, **rest)
        for name, schedule in schedules.items():
            setattr(self, f"{name}_schedule", schedule)
        if "noise_scale" in schedules:
            cell.has_noise = True

    @property
    def schedules(self) -> dict[str, LearningRateSchedule]:
        """The schedules of the layer, by the name of the weight they set."""
        found = {name: getattr(self, f"{name}_schedule") for name in MINIMUM}
        return {name: x for name, x in found.items() if x is not None}

    def build(
        self, sequences_shape: Shape, initial_state_shape: Any = None
    ) -> None:
        super().build(sequences_shape, initial_state_shape)
        for name in self.schedules:
            step = self.add_weight(
                shape=(),
                initializer="zeros",
                dtype="int",
                trainable=False,
                name=f"{name}_step",
            )
            setattr(self, f"{name}_step", step)

    def _apply_schedules(self) -> None:
        for name, schedule in self.schedules.items():
            variable = getattr(self.cell, name)
            step = getattr(self, f"{name}_step")
            value = ops.cast(schedule(step.value), variable.dtype)
            variable.assign(ops.maximum(value, MINIMUM[name]))
            step.assign_add(1)

    def load_own_variables(self, store: Any) -> None:
        # Layers with and without schedules load each other's weights.
        for variable in self._own_weights():
            if variable.name in store.keys():
                variable.assign(store[variable.name])

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name, schedule in self.schedules.items():
            config[name] = keras.optimizers.schedules.serialize(schedule)
        return config


def _split_schedules(arguments: dict[str, Any]) -> tuple[dict, dict]:
    """Split arguments into initial numbers and schedules.

    A schedule may also be given as its config.
    """
    numbers, schedules = dict(arguments), {}
    for name in MINIMUM:
        if name not in arguments:
            continue
        schedule = _as_schedule(arguments[name])
        if schedule is None:
            takes = (
                f"a finite number {_TAKES[name]}, or an instance of a "
                "schedule of `keras.optimizers.schedules`"
            )
            numbers[name] = _CHECKS[name](name, arguments[name], takes)
        else:
            first = float(ops.convert_to_numpy(schedule(0)))
            numbers[name] = max(first, MINIMUM[name])
            schedules[name] = schedule
    return numbers, schedules


def _as_schedule(value: Any) -> LearningRateSchedule | None:
    if isinstance(value, dict):
        return keras.optimizers.schedules.deserialize(value)
    if isinstance(value, LearningRateSchedule):
        return value
    return None
