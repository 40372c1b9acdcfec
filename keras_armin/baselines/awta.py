"""AwTA: ARMIN with TARDIS addressing."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import validation
from keras_armin.armin_cell import ARMINCell
from keras_armin.backends import ops
from keras_armin.baselines._controlled_cell import VARIANTS
from keras_armin.baselines._tardis_addressing import TARDISAddressing
from keras_armin.memory_cell import CellResult
from keras_armin.memory_cell import argument_names
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors


@keras.saving.register_keras_serializable(package="keras_armin")
class AwTACell(TARDISAddressing, ARMINCell):
    """One step of ARMIN with TARDIS addressing, from the ARMIN paper.

    As `ARMINCell`, except for the logits of the slots:

        logit_i = a tanh(W [x, h, key_i, M_i, u] + b)

    The keys are trained. `u` is how often each slot has been read, with mean
    0 and variance 1. 100 is subtracted from the logit of the slot read last,
    so that it is not read twice in a row. With `layer_norm` the logits are
    normalised before that.

    Args:
        units: int. Size of the hidden state.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        memory_dim: int. Size of a slot. Defaults to `None`: `units`.
        key_dim: int. Size of the key of a slot. Defaults to `16`.
        address_units: int. Width of the network that computes the logits.
            Defaults to `None`: a quarter of `units`.
        variant: `"published"`, or `"released"` for the code behind the
            algorithmic results of the ARMIN paper: `u` is divided by its
            norm, and so are the logits after 100 is subtracted, which leaves
            all others near zero and the choice nearly random. Defaults to
            `"published"`.
        state_activation, output_activation, noise_scale, unit_gate_bias,
            write_activation: See `ARMINCell`. They default to `None`,
            `"tanh"`, `1.0`, `False` and `None`, as in the paper.
        addressing, temperature, activation, recurrent_activation, use_bias,
            unit_forget_bias, write_inputs, learn_initial_state, layer_norm,
            zoneout, content_addressing, output_read, recency_addressing,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `ARMINCell`. `content_addressing` and
            `recency_addressing` must be `False`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, h, memory, pointer, usage, last_read]`, each
            flat: `(batch, size)`. The last two hold how often each slot was
            read, and one plus the slot read last, as digits like `pointer`.
        training: bool. Whether to apply noise, dropout and zoneout.

    Example:

    >>> from keras_armin.baselines import AwTACell
    >>> cell = AwTACell(8, memory_slots=4)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 16)

    Reference:
        - [Li et al., 2019](https://arxiv.org/abs/1906.12087)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | None = None,
        key_dim: int = 16,
        address_units: int | None = None,
        variant: str = "published",
        state_activation: str | Callable | None = None,
        output_activation: str | Callable | None = "tanh",
        noise_scale: float = 1.0,
        recency_addressing: bool = False,
        unit_gate_bias: bool = False,
        write_activation: str | Callable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            units,
            memory_slots,
            memory_dim,
            state_activation=state_activation,
            output_activation=output_activation,
            noise_scale=noise_scale,
            recency_addressing=recency_addressing,
            unit_gate_bias=unit_gate_bias,
            write_activation=write_activation,
            **kwargs,
        )
        self.set_addressing(key_dim, address_units)
        self.variant = validation.choice("variant", variant, VARIANTS)
        for name in ("content_addressing", "recency_addressing"):
            if getattr(self, name):
                raise ValueError(
                    f"Argument `{name}` must be False: this network uses "
                    f"TARDIS addressing. Received: {name}=True"
                )
        self.state_size = [*self.state_size, *self.address_states.values()]

    @property
    def released(self) -> bool:
        return self.variant == "released"

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*super().state_names, *self.address_states)

    @property
    def address_width(self) -> int:
        """Number of address columns: those of the hidden layer."""
        return self.address_units

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        self.build_addressing(learn_keys=True)

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        *of_armin, usage, last_read = states
        projected = {**projected, "usage": usage, "last_read": last_read}
        step = super().step(
            weights,
            projected,
            of_armin,
            step_noise,
            sequence_noise,
            training,
        )
        states = [*step.states, *self.record_read(step.read, usage)]
        return step._replace(states=states)

    def scale_scores(
        self, weights: Tensors, projected: Tensors, gumbel: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Deferred to `_scores`: the logits of TARDIS are not a sum."""
        return weights, {**projected, "gumbel": gumbel}

    def _scores(
        self,
        weights: Tensors,
        projected: Tensors,
        query: Tensor,
        h: Tensor,
        memory: Tensor,
        in_place: bool,
    ) -> Tensor:
        logits = self.address_logits(
            weights,
            projected["address"],
            ops.matmul(h, weights["address_recurrent_kernel"]),
            memory,
            projected["usage"],
            projected["last_read"],
        )
        return self.apply_temperature(logits, projected["gumbel"], weights)

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            **self.serialize_arguments(argument_names(AwTACell)),
        }
        config["temperature"] = self.initial_temperature
        config["noise_scale"] = self.initial_noise_scale
        return config


@keras.saving.register_keras_serializable(package="keras_armin")
class AwTA(MemoryLayer):
    """ARMIN with TARDIS addressing, from the ARMIN paper.

    `AwTA(...)` has the weights of `keras.layers.RNN(AwTACell(...))` and,
    without noise, computes the same numbers. In addition it carries its state
    on every backend if `stateful`, and can reset individual samples.
    `AwTA.cell` is the cell, which holds the weights.

    Args:
        units, memory_slots, memory_dim, key_dim, address_units, variant,
            state_activation, output_activation, noise_scale, unit_gate_bias,
            write_activation: See `AwTACell`.
        addressing, temperature, activation, recurrent_activation, use_bias,
            unit_forget_bias, write_inputs, learn_initial_state, layer_norm,
            zoneout, content_addressing, output_read, recency_addressing,
            kernel_initializer, recurrent_initializer, bias_initializer,
            kernel_regularizer, recurrent_regularizer, bias_regularizer,
            kernel_constraint, recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `ARMINCell`. `temperature` and
            `noise_scale` may be schedules, as for `ARMIN`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Example:

    >>> from keras_armin.baselines import AwTA
    >>> layer = AwTA(8, memory_slots=4)
    >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
    (2, 16)

    Reference:
        - [Li et al., 2019](https://arxiv.org/abs/1906.12087)
    """

    cell: AwTACell
    cell_class = AwTACell
    cell_name = "awta_cell"
