"""The base class of all memory layers, for cells of class `MemoryCell`."""

from collections.abc import Mapping
from typing import Any
from typing import Self

import keras
import numpy as np
from keras import ops

from keras_armin import backends
from keras_armin import keras_private
from keras_armin import validation
from keras_armin.keras_private import preserve_float64
from keras_armin.memory_cell import load_by_name
from keras_armin.reference_loop import LoopResult
from keras_armin.reference_loop import run_cell
from keras_armin.reference_loop import where_states
from keras_armin.types import Shape
from keras_armin.types import Tensor


class MemoryRNN(backends.TrainingModeMixin, keras.layers.RNN):
    """`keras.layers.RNN` for cells with a memory.

    It differs from its base class as follows:

    - Noise is drawn for the whole sequence before the loop, and everything
      that depends on the inputs alone is computed there too.
    - A mask attached to the inputs is also used together with
      `initial_state`. The contents of masked steps, including NaN, affect
      neither outputs nor gradients. A masked step repeats the previous
      output: that of the initial state if it is the first step.
    - `stateful=True` carries the state on every backend, including JAX.
      `reset_state()` restores the initial state of the cell.
    - Saved weights do not include the state, so they load with any batch
      size; loading resets the state.
    - `initial_state` may be given in part.
    - With `go_backwards`, the output mask is reversed like the outputs.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: List of state tensors to start from, or a dict of them
            by the names in `cell.state_names`. States that are None, or
            missing in the dict, start from the initial state of the cell,
            also if the layer is stateful.
        mask: Bool tensor of shape `(batch, time)`; `False` skips a step.
        training: bool. Whether to apply noise, dropout and zoneout. On
            PyTorch, `train()` and `eval()` set its default.
        reset: Bool tensor of shape `(batch,)` or `(batch, time)`: samples, or
            steps of samples, that restart from the initial state. Masked
            steps are reset too.
    """

    def build(
        self, sequences_shape: Shape, initial_state_shape: Any = None
    ) -> None:
        self._check_sequences_shape(sequences_shape)
        if not self.cell.built:
            self.cell.build((sequences_shape[0], sequences_shape[2]))
            self.cell.built = True
        if self.stateful and self.states is None:
            self._create_states(sequences_shape[0])

    def _create_states(self, batch_size):
        if batch_size is None:
            raise ValueError(
                f"Layer '{self.name}' has `stateful=True` and so needs a "
                "fixed batch size. Received: `sequences` with an unknown one. "
                "Set it with `keras.Input(batch_shape=(batch, time, "
                "features))` or call the layer on data first."
            )
        self._expected_batch_size = batch_size
        # Tracked, unlike those of the base class, because JAX updates only
        # tracked variables; excluded from `weights` and from saving. Not
        # created by `add_weight`, which takes no layout.
        self.states = [
            keras.Variable(
                "zeros",
                shape=(batch_size, size),
                dtype=self.variable_dtype,
                trainable=False,
                autocast=False,
                layout=_batch_layout(batch_size, size),
                name=f"state_{name}",
            )
            for name, size in zip(self.cell.state_names, self.state_size)
        ]
        self.reset_state()
        # A trained initial state is known only once the weights of the cell
        # are loaded, which is after those of the layer.
        self.cell.stateful_layers.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Before Keras converts or unpacks what is not a tensor.
        for sequences in args[:1] or [kwargs.get("sequences")]:
            self._check_kind(sequences)
        validation.no_indices("reset", kwargs.get("reset"))
        return super().__call__(*args, **kwargs)

    def compute_output_spec(
        self, sequences: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._check_sequences(sequences)
        initial_state = args[0] if args else kwargs.get("initial_state")
        if initial_state is not None:
            self._check_initial_state(initial_state, sequences.shape[0])
        for name in ("mask", "reset"):
            if kwargs.get(name) is not None:
                self._check_flags(name, kwargs[name], sequences)
        return super().compute_output_spec(sequences, *args, **kwargs)

    def compute_mask(self, sequences: Tensor, mask: Tensor) -> Any:
        masks = super().compute_mask(sequences, mask)
        output_mask = masks[0] if self.return_state else masks
        if output_mask is None or not self.go_backwards:
            return masks
        output_mask = ops.flip(output_mask, axis=1)
        return [output_mask, *masks[1:]] if self.return_state else output_mask

    def call(
        self,
        sequences: Tensor,
        initial_state: list | dict | None = None,
        mask: Tensor = None,
        training: bool = False,
        reset: Tensor = None,
    ) -> Any:
        if training:
            self._apply_schedules()
        result = self._run_loop(sequences, initial_state, mask, training, reset)
        if self.stateful:
            for variable, state in zip(self.states, result.states):
                # On JAX a gradient would pass through the variable if the
                # layer is called twice.
                state = ops.stop_gradient(state)
                variable.assign(ops.cast(state, variable.dtype))
        return self._format_outputs(result)

    def _apply_schedules(self):
        """Called before each training step. For layers with schedules."""

    def _format_outputs(self, result):
        if self.return_sequences:
            output = ops.swapaxes(result.outputs, 0, 1)
        elif self.zero_output_for_mask and result.outputs is not None:
            output = result.outputs[-1]
        else:
            output = result.states[0]
        output = ops.cast(output, self.compute_dtype)
        if not self.return_state:
            return output
        states = [ops.cast(s, self.compute_dtype) for s in result.states]
        return output, *states

    @preserve_float64
    def _run_loop(
        self,
        sequences: Tensor,
        initial_state: list | dict | None,
        mask: Tensor,
        training: bool,
        reset: Tensor,
        trace: bool = False,
    ) -> LoopResult:
        self._check_sequences(sequences)
        mask = self._resolve_mask(sequences, mask)
        reset = self._resolve_flags("reset", reset, sequences)
        if self.stateful:
            sequences = self._check_batch_size(sequences)
        start = self._initial_state_for(sequences, initial_state)
        if reset is not None and len(reset.shape) == 1:
            initial = self._cell_initial_state(ops.shape(sequences)[0])
            start, reset = where_states(reset[:, None], initial, start), None
        sequences = ops.cast(sequences, self.cell.compute_dtype)
        sequences, mask, reset = self._to_time_major(sequences, mask, reset)
        if mask is not None:
            # A NaN in a masked step would reach the gradient of the weights,
            # as 0 * NaN.
            sequences = ops.where(
                mask, sequences, ops.zeros((), dtype=sequences.dtype)
            )
        keep_outputs = self.return_sequences or (
            self.zero_output_for_mask and mask is not None
        )
        return self._loop(
            sequences,
            start,
            mask=mask,
            reset=reset,
            training=training,
            zero_output_for_mask=self.zero_output_for_mask,
            keep_outputs=keep_outputs,
            trace=trace,
        )

    def _loop(
        self,
        sequences: Tensor,
        states: list,
        reset: Tensor,
        trace: bool,
        **arguments: Any,
    ) -> LoopResult:
        """Run the cell. A subclass may have a faster implementation."""
        return run_cell(
            self.cell,
            sequences,
            states,
            reset=reset,
            trace=trace,
            unroll=self.unroll,
            **arguments,
        )

    def _initial_state_for(self, sequences, initial_state):
        if initial_state is not None:
            states = self._check_initial_state(
                initial_state, sequences.shape[0]
            )
            if any(state is None for state in states):
                initial = self._cell_initial_state(ops.shape(sequences)[0])
                states = [
                    new if s is None else s for s, new in zip(states, initial)
                ]
        elif self.stateful:
            # Copies: the variables change before the backward pass on torch.
            states = [ops.copy(variable) for variable in self.states]
        else:
            return self._cell_initial_state(ops.shape(sequences)[0])
        return [ops.cast(s, self.cell.compute_dtype) for s in states]

    def _cell_initial_state(self, batch):
        states = self.get_initial_state(batch)
        return [ops.cast(s, self.cell.compute_dtype) for s in states]

    def _to_time_major(self, sequences, mask, reset):
        """Time-major, in the order of processing; masks get a last axis."""

        def to_time_major(x):
            x = ops.swapaxes(x, 0, 1)
            return ops.flip(x, axis=0) if self.go_backwards else x

        def mask_to_time_major(x):
            return None if x is None else ops.expand_dims(to_time_major(x), -1)

        return (
            to_time_major(sequences),
            mask_to_time_major(mask),
            mask_to_time_major(reset),
        )

    def _resolve_mask(self, sequences, mask):
        if mask is None:
            # Keras sets `mask` only for a layer called on a single tensor.
            mask = keras_private.attached_mask(sequences)
        return self._resolve_flags("mask", mask, sequences)

    def _resolve_flags(self, name, value, sequences):
        if value is None:
            return None
        value = ops.cast(value, "bool")
        self._check_flags(name, value, sequences)
        return value

    def get_initial_state(self, batch_size: Any) -> list:
        return list(self.cell.get_initial_state(batch_size=batch_size))

    def reset_state(self) -> None:
        """Restart all samples from the initial state of the cell."""
        if self.states is None:
            return
        initial_state = self.get_initial_state(self._expected_batch_size)
        for variable, value in zip(self.states, initial_state):
            variable.assign(ops.cast(value, variable.dtype))

    def get_state(self) -> dict[str, np.ndarray]:
        """The carried state, as a dict of NumPy arrays by name.

        Under `keras.distribution` and `tf.distribute` it contains the samples
        of all devices, in the order of the batch; if TensorFlow or torch run
        several processes, those of this process.
        """
        self._check_has_state("get_state")
        return {
            name: backends.gather_state(variable)
            for name, variable in zip(self.cell.state_names, self.states)
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, as returned by `get_state()`.

        It may be any mapping, such as a file that `np.load` has opened after
        `np.savez("state.npz", **layer.get_state())`.
        """
        self._check_has_state("set_state")
        names = self.cell.state_names
        is_mapping = isinstance(state, Mapping)
        if not is_mapping or set(state) != set(names):
            got = sorted(state) if is_mapping else type(state)
            raise ValueError(
                f"Argument `state` of layer '{self.name}' must be a dict, or "
                f"another mapping, with the keys {list(names)}. Received: {got}"
            )
        arrays = {name: ops.convert_to_numpy(state[name]) for name in names}
        for (name, array), variable in zip(arrays.items(), self.states):
            batch, size = variable.shape
            expected = batch * backends.num_replicas(variable), size
            self._check_shape(
                f"state[{name!r}]", array, expected, "(batch, size)"
            )
        self.cell.check_state(arrays)
        for array, variable in zip(arrays.values(), self.states):
            backends.scatter_state(variable, array)

    @property
    def weights(self) -> list:
        carried = {id(variable) for variable in self.states or ()}
        return [w for w in super().weights if id(w) not in carried]

    def _own_weights(self):
        carried = {id(variable) for variable in self.states or ()}
        own = self._trainable_variables + self._non_trainable_variables
        return [v for v in own if id(v) not in carried]

    def save_own_variables(self, store: Any) -> None:
        for variable in self._own_weights():
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        load_by_name(self, self._own_weights(), store)

    def _check_sequences(self, sequences):
        self._check_kind(sequences)
        self._check_sequences_shape(sequences.shape)

    def _check_kind(self, sequences):
        advice = backends.padding_advice(sequences)
        if advice is not None:
            raise TypeError(
                f"Argument `sequences` of layer '{self.name}' must be a dense "
                "tensor of shape (batch, time, features). Received: a "
                f"`{type(sequences).__name__}`. {advice}"
            )
        validation.single_tensor("sequences", sequences, self.name)
        if hasattr(sequences, "dtype"):
            validation.real("sequences", sequences, self.name)

    def _check_sequences_shape(self, shape):
        if any(isinstance(size, (list, tuple)) for size in shape):
            validation.single_tensor("sequences", shape, self.name)
        if len(shape) == 2:
            raise ValueError(
                f"Argument `sequences` of layer '{self.name}' must have shape "
                f"(batch, time, features). Received: shape {tuple(shape)}. A "
                "recurrent layer before this one needs "
                "`return_sequences=True`; tokens need a "
                "`keras.layers.Embedding`."
            )
        features = getattr(self.cell, "input_dim", None)
        validation.shape(
            "sequences",
            shape,
            (None, None, features),
            self.name,
            "(batch, time, features)",
        )
        if shape[2] is None:
            raise ValueError(
                f"Argument `sequences` of layer '{self.name}' must have a "
                f"known number of features. Received: shape {tuple(shape)}"
            )
        if self.unroll and shape[1] is None:
            raise ValueError(
                f"Layer '{self.name}' has `unroll=True` and so needs a known "
                "number of time steps. Received: `sequences` of shape "
                f"{tuple(shape)}. Set the length in `keras.Input`, or use "
                "`unroll=False`."
            )
        if shape[1] == 0:
            raise ValueError(
                f"Argument `sequences` of layer '{self.name}' must have at "
                f"least one time step. Received: shape {tuple(shape)}"
            )

    def _check_initial_state(self, initial_state, batch_size):
        """A list, with None for each missing state."""
        return validation.states(
            "initial_state",
            initial_state,
            self.cell.state_names,
            self.state_size,
            batch_size,
            self.name,
            partial=True,
        )

    def _check_flags(self, name, value, sequences):
        meaning, axes = "(batch, time)", 2
        if name == "reset":
            meaning = "(batch,) or (batch, time)"
            axes = 1 if len(value.shape) == 1 else 2
        self._check_shape(name, value, sequences.shape[:axes], meaning)

    def _check_shape(self, name, value, expected, meaning):
        validation.shape(name, value.shape, expected, self.name, meaning)

    def _check_batch_size(self, sequences):
        expected = self._expected_batch_size
        got = sequences.shape[0]
        if got is not None and got != expected:
            raise ValueError(
                f"Layer '{self.name}' has `stateful=True` and carries the "
                f"state of a batch of {expected}: argument `sequences` must "
                f"have that batch size. Received: a batch of {got}"
            )
        return backends.check_batch_size(sequences, expected)

    def _check_has_state(self, method):
        if not self.stateful:
            raise ValueError(
                f"`{method}()` needs a layer with `stateful=True`. Layer "
                f"'{self.name}' keeps no state between calls; use "
                "`return_state=True` and `initial_state` there."
            )
        if self.states is None:
            raise ValueError(
                f"`{method}()` needs a built layer. Call layer "
                f"'{self.name}' on data, or build it, first."
            )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["cell"]
        cell_config = self.cell.get_config()
        for name in ("name", "trainable", "dtype"):
            del cell_config[name]
        return {**config, **cell_config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Self:
        return cls(**config)


def _batch_layout(batch_size, size):
    """Shards states like the batch; None without a distribution."""
    distribution = keras.distribution.distribution()
    if distribution is None or batch_size % distribution.num_model_replicas:
        return None
    return distribution.get_data_layout((batch_size, size))
