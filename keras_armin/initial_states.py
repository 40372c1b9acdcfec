"""Initial states of cells: zeros, constants, or trainable."""

from typing import Any

import numpy as np
from keras import ops

from keras_armin.keras_private import preserve_float64
from keras_armin.memory_cell import MemoryCell
from keras_armin.types import Tensors

# Weights are named `initial_{state}`, with one exception.
_WEIGHT_NAMES = {"h": "initial_state"}


class InitialStates(MemoryCell):
    """Mixin for cells with `learn_initial_state`.

    The cell defines `trainable_initial_states`, a dict by name of pairs: the
    initial value of the weight, a NumPy array that may be smaller than the
    state, and an activation, which returns a vector.
    """

    def build_initial_state(self) -> None:
        if not self.learn_initial_state:
            return
        for name, (start, _) in self.trainable_initial_states.items():
            weight_name = _weight_name(name)
            variable = self.add_weight(
                shape=start.shape,
                initializer=lambda shape, dtype, start=start: ops.cast(
                    start, dtype
                ),
                name=weight_name,
            )
            setattr(self, weight_name, variable)

    def constant_initial_states(self) -> dict[str, np.ndarray]:
        """Initial states that are not zero, as NumPy arrays by name."""
        return {}

    @preserve_float64
    def get_initial_state(self, batch_size: Any = None) -> list:
        states = dict(
            zip(self.state_names, super().get_initial_state(batch_size))
        )
        for name, value in self._initial_rows().items():
            row = ops.cast(value, self.compute_dtype)
            states[name] = states[name] + row
        return list(states.values())

    def _initial_rows(self) -> Tensors:
        rows = {
            name: ops.convert_to_tensor(value)
            for name, value in self.constant_initial_states().items()
        }
        if not self.learn_initial_state:
            return rows
        if not self.built:
            raise ValueError(
                f"Cell '{self.name}' has a trainable initial state and must be "
                "built before `get_initial_state` is called."
            )
        sizes = dict(zip(self.state_names, self.state_size))
        for name, (start, activation) in self.trainable_initial_states.items():
            variable = getattr(self, _weight_name(name))
            learnt = activation(ops.convert_to_tensor(variable))
            missing = sizes[name] - start.size
            rows[name] = ops.pad(learnt, (0, missing)) if missing else learnt
        return rows


def _weight_name(state_name: str) -> str:
    return _WEIGHT_NAMES.get(state_name, f"initial_{state_name}")
