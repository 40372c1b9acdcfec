"""ARMIN: the Auto-addressing and Recurrent Memory Integrating Network."""

from collections.abc import Callable
from typing import Any
from typing import Self

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_armin import backends
from keras_armin.armin_backward import ELEMENTWISE
from keras_armin.armin_backward import LINEAR
from keras_armin.armin_cell import DEFAULTS_0_1
from keras_armin.armin_cell import ARMINCell
from keras_armin.armin_equations import ACTIVATION_GRADIENTS
from keras_armin.armin_fused import run_armin
from keras_armin.memory_layer import MemoryLayer
from keras_armin.reference_loop import LoopResult
from keras_armin.types import Tensor


@keras.saving.register_keras_serializable(package="keras_armin")
class ARMIN(MemoryLayer):
    """A recurrent layer with an external memory.

    `ARMIN(...)` has the weights of `keras.layers.RNN(ARMINCell(...))` and,
    without noise, computes the same numbers. In addition it carries its state
    on every backend if `stateful`, accepts schedules for `temperature` and
    `noise_scale`, and can reset individual samples. `ARMIN.cell` is the cell,
    which holds the weights.

    It is faster than the bare cell and needs far less memory to train: its
    fused gradient restores the memory row by row instead of storing it for
    every step. That applies to `"hard"` and `"relaxed"` addressing;
    `addressing="soft"`, `unroll=True`, a `reset` of individual steps, a
    `write_activation` other than `None`, `"tanh"` and `"sigmoid"`, and
    activations that are not element-wise functions of `keras.activations` fall
    back to the reference loop. The fused gradient has no second derivatives,
    the reference loop does.

    Import `keras_armin` before loading a saved model. Otherwise Keras raises
    `Could not locate class 'ARMIN'`.

    Args:
        units: int. Size of the hidden state.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        temperature: float, or a `keras.optimizers.schedules` schedule. The
            step of a schedule is the weight `temperature_step`, which
            increases by one at each call with `training=True`; the weight
            `temperature` of the cell holds the current value. Values below
            0.001, as of a cosine decay to 0, are replaced by 0.001. Defaults
            to `1.0`.
        noise_scale: float, or a schedule as for `temperature`, whose step is
            the weight `noise_scale_step`. Defaults to `0.0`.
        return_sequences: bool. Return the outputs of all steps instead of the
            last. Defaults to `False`.
        return_state: bool. Also return the last `output`, `h`, `memory` and
            `pointer`, and with `recency_addressing` the `write_order`.
            Defaults to `False`.
        go_backwards: bool. Process the sequence from its end, and return the
            outputs in that order. Defaults to `False`.
        stateful: bool. Start each batch from the last state of the previous
            batch. Defaults to `False`.
        unroll: bool. Unroll the loop into one copy of the code per step.
            Defaults to `False`.
        zero_output_for_mask: bool. Output zeros at masked steps instead of
            the previous output. Defaults to `False`.
        memory_dim, addressing, activation, recurrent_activation,
            state_activation, output_activation, use_bias, unit_forget_bias,
            write_inputs, learn_initial_state, layer_norm, zoneout,
            content_addressing, output_read, recency_addressing,
            unit_gate_bias, write_activation, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `ARMINCell`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: List of states to start from, as `return_state=True`
            returns them, or a dict of them by name, such as `{"h": h}`.
            States that are `None` in the list or missing in the dict start
            from the initial state of the cell, also if the layer is stateful.
        mask: Bool tensor of shape `(batch, time)`; `False` skips a step.
        training: bool. Whether to apply noise, dropout and zoneout. On
            PyTorch, `train()` and `eval()` of the layer, or of a module around
            it, set its default; until then it is `False`. They do not affect
            layers in functional and `Sequential` models, which receive
            `training` from the model.
        reset: Bool tensor of shape `(batch,)` or `(batch, time)`: samples, or
            steps of samples, that restart from the initial state.

    Notes:
        Speed and memory. Noise and everything that depends on the inputs alone
        is computed before the loop, and the output, on which no later step
        depends, after it. The gradient is written by hand: an overwrite is
        undone by putting back the one row it replaced, so that the memory is
        not kept for every step, and the gradient of each weight is one matrix
        product after the loop. `keras.layers.RNN(ARMINCell(...))` is the
        reference loop; both agree to 1e-10 in float64, in values and in all
        gradients, on every backend. At inference one row is read and one is
        replaced. `examples/RESULTS.md` has measurements.

        Second derivatives. The hand-written gradient has none: asking for them
        raises a `NotImplementedError` that says what to use instead
        (`addressing="soft"`, `unroll=True`, a `reset` of single steps and
        `keras.layers.RNN(ARMINCell(...))` have them). On JAX forward-mode
        derivatives of it, and of all layers of this package, are refused by
        JAX, since gradients are bounded in the backward pass.

        State. `return_state=True` returns the output and then `output`, `h`,
        `memory`, `pointer` and, with `recency_addressing`, `write_order`, of
        shapes `(batch, output_size)`, `(batch, units)`,
        `(batch, memory_slots * memory_dim)`, `(batch, 4)` and
        `(batch, memory_slots)`; above 128 slots `write_order` has two digits a
        slot. `pointer` is the number of writes so far in four base-128 digits,
        least significant first. Both are exact in every dtype.

        Stateful. The state is carried through `fit`, `evaluate` and `predict`
        on every backend, with gradients cut between batches, and also from one
        epoch to the next: `callbacks.ValidationState(reset_each_epoch=True)`
        restarts each epoch from the initial state. Saved files hold no state:
        a `.weights.h5` file loads into a model built for another batch size,
        and loading resets the state; a `.keras` file keeps its batch size.
        Nothing bounds the state of the paper's cell: do not carry it for long.
        A wrong batch size raises a `ValueError`; inside a TensorFlow graph it
        is an `InvalidArgumentError` that names the check
        `stateful_layer_needs_a_batch_size_of_N` and both shapes, or in `fit`
        the loss, if that is first to notice.

        Limitations of the backends. float64 on JAX needs `JAX_ENABLE_X64=1`.
        On JAX an error inside `fit`, `evaluate` or `predict` leaves any Keras
        model without its variables: save first if a wrong batch may come. On
        PyTorch, `jit_compile=True` is `torch.compile`, which needs a C++
        compiler and a minute or two for the first update. It compiles ten
        steps of the loop at a time, for sequences of any length, and pays
        where layers are small and training is long. With
        `torch.compile(fullgraph=True)` use `unroll=True`.

        For algorithmic tasks, relaxed reads with an annealed temperature and a
        bounded state learn best:

        >>> layer = keras_armin.ARMIN(
        ...     100,
        ...     memory_slots=51,
        ...     memory_dim=32,
        ...     addressing="relaxed",
        ...     temperature=keras.optimizers.schedules.PolynomialDecay(
        ...         2.0, 3000, 0.3
        ...     ),
        ...     noise_scale=1.0,
        ...     recency_addressing=False,
        ...     unit_gate_bias=False,
        ...     write_inputs=True,
        ...     write_activation=None,
        ...     learn_initial_state=True,
        ...     return_sequences=True,
        ... )

    Example:

    >>> layer = keras_armin.ARMIN(8, memory_slots=4)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 12)

    Reference:
        - [Li et al., 2019](https://arxiv.org/abs/1906.12087)
    """

    cell: ARMINCell
    cell_class = ARMINCell
    cell_name = "armin_cell"

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | str | None = "half",
        addressing: str = "hard",
        temperature: float | LearningRateSchedule = 1.0,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        state_activation: str | Callable | None = "tanh",
        output_activation: str | Callable | None = None,
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        write_inputs: bool = False,
        learn_initial_state: bool = False,
        layer_norm: bool = False,
        zoneout: float = 0.0,
        content_addressing: bool = False,
        output_read: bool = True,
        noise_scale: float | LearningRateSchedule = 0.0,
        recency_addressing: bool = True,
        unit_gate_bias: bool = True,
        write_activation: str | Callable | None = "tanh",
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        zero_output_for_mask: bool = False,
        **kwargs: Any,
    ) -> None:
        given = locals()
        names = [name for name in self.signature.parameters if name != "kwargs"]
        super().__init__(**{name: given[name] for name in names}, **kwargs)

    def _loop(
        self,
        sequences: Tensor,
        states: list,
        reset: Tensor,
        trace: bool,
        **arguments: Any,
    ) -> LoopResult:
        """The fused loop where it applies, otherwise the reference loop.

        The fused backward pass reverts writes of single slots, and cannot
        revert a reset.
        """
        fast = self.addressing != "soft" and not self.unroll
        fast = fast and reset is None and not trace
        needs_no_gradient = (
            not arguments["training"] and backends.gradients_are_disabled()
        )
        if fast and (needs_no_gradient or self._supports_custom_gradient()):
            return backends.run_loop(
                run_armin, self.cell, sequences, states, **arguments
            )
        return super()._loop(
            sequences, states, reset=reset, trace=trace, **arguments
        )

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Self:
        return cls(**{**DEFAULTS_0_1, **config})

    def _supports_custom_gradient(self) -> bool:
        # The backward pass keeps the written value, not what the activation
        # was applied to.
        if self.write_activation not in (LINEAR, *ACTIVATION_GRADIENTS):
            return False
        activations = (
            self.activation,
            self.recurrent_activation,
            self.state_activation,
        )
        return all(activation in ELEMENTWISE for activation in activations)
