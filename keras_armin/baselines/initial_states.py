"""States that a sequence starts with: zeros, constants, or learnt."""

from keras import ops

from keras_armin.keras_private import in_own_precision


class InitialStates:
    """For a cell with `learn_initial_state`.

    It defines `learnt_states`, a dict from names of states to what the first
    numbers of them start from, a NumPy array, and to an activation.
    """

    def build_initial_state(self):
        if not self.learn_initial_state:
            return
        for name, (start, _) in self.learnt_states.items():
            variable = self.add_weight(
                shape=start.shape,
                initializer=lambda shape, dtype, start=start: ops.cast(
                    start, dtype
                ),
                name=f"initial_{name}",
            )
            setattr(self, f"initial_{name}", variable)

    def constant_states(self):
        """Initial states that are not zero, as NumPy arrays by name."""
        return {}

    @in_own_precision
    def get_initial_state(self, batch_size=None):
        states = dict(
            zip(self.state_names, super().get_initial_state(batch_size))
        )
        for name, value in self._initial_rows().items():
            row = ops.cast(value, self.compute_dtype)
            states[name] = states[name] + row
        return list(states.values())

    def _initial_rows(self):
        rows = {
            name: ops.convert_to_tensor(value)
            for name, value in self.constant_states().items()
        }
        if not self.learn_initial_state:
            return rows
        if not self.built:
            raise ValueError(
                f"Cell '{self.name}' learns its initial state and so has to "
                "be built before `get_initial_state` is called."
            )
        sizes = dict(zip(self.state_names, self.state_size))
        for name, (start, activation) in self.learnt_states.items():
            learnt = activation(
                ops.convert_to_tensor(getattr(self, f"initial_{name}"))
            )
            missing = sizes[name] - len(start)
            rows[name] = ops.pad(learnt, (0, missing))
        return rows
