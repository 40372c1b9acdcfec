"""The base class of layers that create their own cell."""

import inspect
from operator import attrgetter
from typing import Any

from keras_armin.annealed_rnn import AnnealedRNN
from keras_armin.annealed_rnn import split_schedules
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_cell import init_parameters

FLAGS = (
    "return_sequences",
    "return_state",
    "go_backwards",
    "stateful",
    "unroll",
    "zero_output_for_mask",
)


class CellLayer(AnnealedRNN):
    """A layer with the arguments of its cell, followed by `FLAGS`.

    A subclass sets `cell_class`, and has the arguments of the cell as
    attributes.
    """

    cell_class: type[MemoryCell]
    cell_name: str
    __signature__: inspect.Signature

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "cell_class" not in vars(cls):
            return
        parameters = init_parameters(cls.cell_class)
        for parameter in parameters:
            of_cell = property(attrgetter(f"cell.{parameter.name}"))
            setattr(cls, parameter.name, of_cell)
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters += [
            inspect.Parameter(name, keyword, default=False, annotation=bool)
            for name in FLAGS
        ]
        rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        cls.__signature__ = inspect.Signature([*parameters, rest])

    def __init__(self, *args, **kwargs):
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        rest = given.pop("kwargs")
        flags = {name: given.pop(name) for name in FLAGS}
        given, schedules = split_schedules(given)
        cell = self.cell_class(
            **given,
            dtype=rest.get("dtype"),
            trainable=rest.get("trainable", True),
            name=self.cell_name,
        )
        super().__init__(cell, **flags, **rest)
        self.set_schedules(schedules)
