"""The base class of all memory cells: noise, weights, saving."""

import inspect
import weakref
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin import backends
from keras_armin import keras_private
from keras_armin import noise
from keras_armin import validation
from keras_armin.initializers import BlockInitializer
from keras_armin.keras_private import preserve_float64
from keras_armin.memory_ops import check_pointer
from keras_armin.memory_ops import pointer_to_count
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors

# Modules that get and serialize the arguments with these suffixes.
_KERAS_MODULES = {
    "activation": keras.activations,
    "initializer": keras.initializers,
    "regularizer": keras.regularizers,
    "constraint": keras.constraints,
}


class CellResult(NamedTuple):
    """The results of one step of a cell."""

    states: list  # the output first
    read: Any = None  # the slot, (batch,), or weights, (batch, slots)
    written: Any = None  # the same for the write


class MemoryCell(
    backends.TrainingModeMixin, keras_private.DropoutRNNCell, keras.layers.Layer
):
    """Base class of RNN cells with a memory, and of their baselines.

    A subclass has the attributes `units`, `output_size` and `state_size`, with
    a memory also `memory_slots` and `memory_dim`, and defines:

    - `state_names`: names of the states, the output first and one of them
      `pointer`, the number of writes;
    - `step_draws`: number of random tensors per step, and
      `draw_step_noise(leading, seeds)`, which draws them;
    - `recurrent_width`: the width to which `recurrent_dropout` is applied;
    - `project(weights, inputs, sequence_noise)`: everything that depends on
      the inputs alone, for any leading axes, as a dict of tensors;
    - `step(weights, projected, states, step_noise, sequence_noise,
      training)`: the equations, as a `CellResult`.
    """

    memory_slots: int = 0
    # Does not affect inference: optional in a weights file.
    optional_weights: tuple[str, ...] = ("noise_scale",)
    wide_weights: tuple[str, ...] = ("temperature", "noise_scale")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls is not package_class(cls):
            return
        # For `help`: cells pass shared arguments to their bases as `**kwargs`.
        rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        cls.__signature__ = inspect.Signature([*init_parameters(cls), rest])

    def __init__(
        self,
        dropout: float,
        recurrent_dropout: float,
        seed: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dropout = validation.rate("dropout", dropout)
        self.recurrent_dropout = validation.rate(
            "recurrent_dropout", recurrent_dropout
        )
        self.seed = validation.seed("seed", seed)
        self.seed_generator = keras.random.SeedGenerator(
            None if self.seed is None else noise.derive_seed(self.seed)
        )
        self.input_dim: Any = None  # an int once the cell is built
        # Layers whose state is reset when weights have been loaded. Weak, or
        # Keras would take them for layers inside the cell.
        self.stateful_layers: weakref.WeakSet = weakref.WeakSet()
        self._prepared: tuple[Tensor, SequenceNoise] | None = None

    def set_keras_objects(self, given: dict[str, Any]) -> None:
        """Set activations, initializers, regularizers and constraints.

        Other arguments in the dict `given` are ignored.
        """
        for name, value in given.items():
            module = _keras_module(name)
            if module is not None:
                setattr(self, name, module.get(value))

    def set_input_shape(self, input_shape: Shape) -> None:
        if any(isinstance(size, (list, tuple)) for size in input_shape):
            raise ValueError(
                f"Argument `inputs` of layer '{self.name}' must be one tensor, "
                "and so must be the input of a `keras.layers.RNN` around it. "
                f"Received: several, of shapes such as {input_shape[-1]}. "
                "Use `keras.layers.Concatenate` to join them; states are "
                "passed as `initial_state=[...]`."
            )
        validation.shape(
            "inputs",
            input_shape,
            (None, self.input_dim),
            self.name,
            "(batch, features)",
        )
        self.input_dim = input_shape[-1]

    @preserve_float64
    def get_initial_state(self, batch_size: Any = None) -> list:
        return [
            ops.zeros((batch_size, size), dtype=self.compute_dtype)
            for size in self.state_size
        ]

    @preserve_float64
    def call(
        self, inputs: Tensor, states: list, training: bool = False
    ) -> tuple[Tensor, list]:
        self._check_step(inputs, states)
        inputs = ops.cast(inputs, self.compute_dtype)
        step_noise, sequence_noise = self._noise_for_step(states, training)
        weights = self.weight_tensors()
        result = self.step(
            weights,
            self.project(weights, inputs, sequence_noise),
            states,
            step_noise,
            sequence_noise,
            training,
        )
        return result.states[0], result.states

    def weight_tensors(self) -> Tensors:
        """All weights as tensors, cast to the compute dtype.

        `wide_weights` are not cast. Keras itself casts only inside `__call__`.
        """

        def read(variable: keras.Variable) -> Tensor:
            if variable.name in self.wide_weights:
                # A copy: a schedule may change the variable before the
                # backward pass on torch.
                return ops.copy(variable)
            return ops.cast(variable, self.compute_dtype)

        return {
            variable.name: backends.constant(read(variable))
            for variable in self.weights
        }

    @property
    def trace_width(self) -> int:
        """Width of what a step reads and writes; 0 if it cannot be traced."""
        return self.memory_slots

    # --- noise --------------------------------------------------------------

    def draw_noise(
        self, time: Any, batch: Any
    ) -> tuple[StepNoise, SequenceNoise]:
        """Noise for a whole sequence, time-major."""
        seeds = [self.seed_generator] * self.step_draws
        step_noise = self.draw_step_noise((time, batch), seeds)
        return step_noise, self._draw_sequence_noise(batch)

    def _draw_sequence_noise(self, batch: Any) -> SequenceNoise:
        def mask(rate: float, size: int) -> Tensor:
            if not rate:
                return None
            return noise.dropout_mask(
                (batch, size), rate, self.compute_dtype, self.seed_generator
            )

        return SequenceNoise(
            mask(self.dropout, self.input_dim),
            mask(self.recurrent_dropout, self.recurrent_width),
        )

    def _noise_for_step(
        self, states: list, training: bool
    ) -> tuple[StepNoise, SequenceNoise]:
        """Noise for a single step in a foreign loop."""
        if not training:
            return StepNoise(), SequenceNoise()
        batch = ops.shape(states[0])[0]
        call_seed, sequence_noise = self._prepared or self._prepare(batch)
        if not self.step_draws:
            return StepNoise(), sequence_noise
        pointer = states[self.state_names.index("pointer")]
        count = pointer_to_count(pointer)
        seeds = [
            noise.step_seed(call_seed, count, draw, self.step_draws)
            for draw in range(self.step_draws)
        ]
        return self.draw_step_noise((batch,), seeds), sequence_noise

    def _prepare(self, batch: Any) -> tuple[Tensor, SequenceNoise]:
        """A seed and the dropout masks for one sequence."""
        call_seed = self.seed_generator.next() if self.step_draws else None
        return call_seed, self._draw_sequence_noise(batch)

    def get_dropout_mask(self, step_input: Tensor) -> None:
        """Called by `keras.layers.RNN` before its loop: prepares the noise."""
        self._prepared = None
        # If it is unknown whether this is training, draw to be safe.
        if keras_private.is_training() is not False:
            self._prepared = self._prepare(ops.shape(step_input)[0])

    def get_recurrent_dropout_mask(self, step_input: Tensor) -> None:
        """Prepared by `get_dropout_mask`."""

    def reset_dropout_mask(self) -> None:
        """Called by `keras.layers.RNN` after its loop."""
        self._prepared = None

    def reset_recurrent_dropout_mask(self) -> None:
        """Done by `reset_dropout_mask`."""

    # --- weights ------------------------------------------------------------

    def add_norm(
        self, name: str, size: int, initializer: Any
    ) -> keras.Variable:
        return self.add_weight(
            shape=(size,), initializer=initializer, name=name
        )

    def add_scalar(
        self, name: str, value: float, trainable: bool = False
    ) -> keras.Variable:
        return self.add_weight(
            shape=(),
            # `keras.initializers.Constant` would round to float32 first.
            initializer=lambda shape, dtype: ops.convert_to_tensor(
                value, dtype=dtype
            ),
            trainable=trainable,
            autocast=False,
            name=name,
        )

    def add_kernel(
        self, name: str, kind: str, rows: int, sizes: list[int]
    ) -> keras.Variable:
        """A kernel of column blocks.

        `kind` selects its initializer, regularizer and constraint.
        """
        initializer = getattr(self, f"{kind}_initializer")
        return self._add_blocks(
            name, kind, (rows, sum(sizes)), [(s, initializer) for s in sizes]
        )

    def add_bias(self, name: str, blocks: list) -> keras.Variable:
        width = sum(size for size, _ in blocks)
        return self._add_blocks(name, "bias", (width,), blocks)

    def _add_blocks(
        self, name: str, kind: str, shape: tuple, blocks: list
    ) -> keras.Variable:
        return self.add_weight(
            shape=shape,
            # The number of weights so far distinguishes this weight from
            # others with the same initializer.
            initializer=BlockInitializer(blocks, path=[len(self.weights)]),
            regularizer=getattr(self, f"{kind}_regularizer"),
            constraint=getattr(self, f"{kind}_constraint"),
            name=name,
        )

    def save_own_variables(self, store: Any) -> None:
        for variable in self.weights:
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        load_by_name(self, self.weights, store, optional=self.optional_weights)
        for layer in self.stateful_layers:
            layer.reset_state()

    def serialize_arguments(self, names: list[str]) -> dict[str, Any]:
        """The config of the arguments `names`."""

        def serialized(name: str) -> Any:
            value, module = getattr(self, name), _keras_module(name)
            return value if module is None else module.serialize(value)

        return {name: serialized(name) for name in names}

    # --- checks -------------------------------------------------------------

    def check_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise if a dict of NumPy arrays is not a valid state."""
        check_pointer(arrays["pointer"])

    def _check_step(self, inputs: Tensor, states: list) -> None:
        validation.shape(
            "inputs",
            inputs.shape,
            (None, self.input_dim),
            self.name,
            "(batch, features)",
        )
        validation.real("inputs", inputs, self.name)
        validation.states(
            "states",
            states,
            self.state_names,
            self.state_size,
            inputs.shape[0],
            self.name,
        )


def package_class(cls: type) -> type:
    """The class itself, or its first base class in this package."""
    package = f"{__package__}."
    return next(c for c in cls.__mro__ if c.__module__.startswith(package))


def init_parameters(cls: type) -> list[inspect.Parameter]:
    """Parameters of a cell: its own first, then those of its bases.

    Bases count as long as `**kwargs` are passed on to them.
    """
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__[: cls.__mro__.index(MemoryCell)]:
        if "__init__" in vars(base):
            own = inspect.signature(vars(base)["__init__"]).parameters
            found = {**found, **own, **found}
            if "kwargs" not in own:
                break
    return [p for name, p in found.items() if name not in ("self", "kwargs")]


def argument_names(cls: type) -> list[str]:
    """Names of the arguments of a cell, in order."""
    return [parameter.name for parameter in init_parameters(cls)]


def _keras_module(argument: str) -> Any:
    return _KERAS_MODULES.get(argument.rsplit("_", 1)[-1])


def load_by_name(
    layer: keras.layers.Layer,
    variables: list,
    store: Any,
    optional: tuple[str, ...] = (),
) -> None:
    """Assign `variables` from a store, by name.

    Those in `optional` may be missing on either side.
    """
    expected = {variable.name: variable for variable in variables}
    if (set(store.keys()) ^ set(expected)) - set(optional):
        raise ValueError(
            f"The weights file does not match layer '{layer.name}'. The layer "
            f"has the weights {sorted(expected)}; the file holds "
            f"{sorted(store.keys())}. Were both created with the same "
            "arguments?"
        )
    for name, variable in expected.items():
        if name in store.keys():
            variable.assign(store[name])
