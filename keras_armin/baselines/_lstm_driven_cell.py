"""The base class of cells with an LSTM controller."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import noise
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import apply_zoneout
from keras_armin.armin_equations import prepare_inputs
from keras_armin.armin_equations import times
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.gradient_clipping import clip_gradient
from keras_armin.initializers import BlockInitializer
from keras_armin.memory_cell import MemoryCell
from keras_armin.memory_cell import argument_names
from keras_armin.memory_cell import package_class
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.normalization import layer_norm
from keras_armin.types import Tensor
from keras_armin.types import Tensors


class LSTMDrivenCell(MemoryCell):
    """A cell around an LSTM with layer normalisation and zoneout.

        [i, f, o, j] = LN(W [x, h, feedback] + b), each gate independently
        c' = sigma(f) * c + sigma(i) * tanh(j)
        h' = sigma(o) * tanh(LN(c'))

    The state is `c'` itself, not its normalisation. Zoneout then keeps the old
    values of some units of `c` and of `h`.

    A subclass sets `feedback_size`, the width of the feedback that enters the
    LSTM together with `h`, before it builds the LSTM.
    """

    feedback_size = 0

    def __init__(
        self,
        units: int,
        activation: str | Callable | None = "tanh",
        recurrent_activation: str | Callable | None = "sigmoid",
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        layer_norm: bool = False,
        zoneout_cell: float = 0.0,
        zoneout_hidden: float = 0.0,
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
        **kwargs: Any,
    ) -> None:
        given = locals()
        super().__init__(
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            **kwargs,
        )
        self.units = validation.size("units", units)
        self.set_keras_objects(given)
        self.use_bias = validation.flag("use_bias", use_bias)
        self.unit_forget_bias = validation.flag(
            "unit_forget_bias", unit_forget_bias
        )
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.zoneout_cell = validation.rate("zoneout_cell", zoneout_cell)
        self.zoneout_hidden = validation.rate("zoneout_hidden", zoneout_hidden)

    # --- weights ------------------------------------------------------------

    def build_lstm(self) -> None:
        sizes = self._gate_sizes
        self.kernel = self.add_kernel("kernel", "kernel", self.input_dim, sizes)
        self.recurrent_kernel = self.add_kernel(
            "recurrent_kernel", "recurrent", self.recurrent_width, sizes
        )
        if self.use_bias:
            self.bias = self.add_bias(
                "bias",
                self._gate_starts(self.bias_initializer, not self.layer_norm),
            )
        if self.layer_norm:
            self._build_norms()

    def _build_norms(self) -> None:
        zeros, ones = keras.initializers.Zeros(), keras.initializers.Ones()
        width = sum(self._gate_sizes)
        self.norm_gain = self.add_norm("norm_gain", width, ones)
        # A forget bias of 1 in `bias` would be normalised away.
        self.norm_bias = self.add_norm(
            "norm_bias", width, BlockInitializer(self._gate_starts(zeros, True))
        )
        self.state_norm_gain = self.add_norm(
            "state_norm_gain", self.units, ones
        )
        self.state_norm_bias = self.add_norm(
            "state_norm_bias", self.units, zeros
        )

    @property
    def _gate_sizes(self) -> list[int]:
        """Widths of i, f, o and j: gates with the same activation first."""
        return [self.units] * 4

    def _gate_starts(self, initializer: Any, holds_forget_bias: bool) -> list:
        """The width and initializer of each gate of a bias."""
        starts = [(size, initializer) for size in self._gate_sizes]
        if self.unit_forget_bias and holds_forget_bias:
            starts[1] = (self.units, keras.initializers.Ones())
        return starts

    # --- randomness ---------------------------------------------------------

    @property
    def step_draws(self) -> int:
        """Number of random tensors per step."""
        return int(self.zoneout_cell > 0) + int(self.zoneout_hidden > 0)

    def draw_step_noise(self, leading: tuple, seeds: list) -> StepNoise:
        unused = iter(seeds)
        shape = (*leading, self.units)

        def draw(rate: float) -> Tensor:
            return (
                noise.zoneout_mask(shape, rate, next(unused)) if rate else None
            )

        return StepNoise(
            zoneout_cell=draw(self.zoneout_cell),
            zoneout=draw(self.zoneout_hidden),
        )

    @property
    def recurrent_width(self) -> int:
        """`recurrent_dropout` is applied to h and the feedback."""
        return self.units + self.feedback_size

    # --- equations ----------------------------------------------------------

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        return {"gates": affine(inputs, weights["kernel"], weights.get("bias"))}

    def lstm(
        self,
        weights: Tensors,
        projected: Tensors,
        entering: Tensor,
        c_tm1: Tensor,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """The new h and c. `entering` is h, followed by the feedback."""
        gates = self.gates(
            weights,
            projected,
            times(entering, sequence_noise.recurrent),
            step_noise,
        )
        i, f, o, j = self._activate(weights, gates)
        new_c = f * c_tm1 + i * j
        new_h = o * self.activation(self._norm_state(weights, new_c))
        c = apply_zoneout(
            self.zoneout_cell, new_c, c_tm1, step_noise.zoneout_cell, training
        )
        h = apply_zoneout(
            self.zoneout_hidden,
            new_h,
            entering[:, : self.units],
            step_noise.zoneout,
            training,
        )
        return h, c

    def gates(
        self,
        weights: Tensors,
        projected: Tensors,
        entering: Tensor,
        step_noise: StepNoise,
    ) -> Tensor:
        """i, f, o and j before normalisation and activation."""
        return addmm(projected["gates"], entering, weights["recurrent_kernel"])

    def _activate(self, weights: Tensors, gates: Tensor) -> tuple:
        """i, f, o and j, from all of them before normalisation."""
        u = self.units
        if self.layer_norm:
            gates = layer_norm(
                gates,
                self._gate_sizes,
                weights["norm_gain"],
                weights["norm_bias"],
            )
        else:
            gates = clip_gradient(gates)
        gates, j = ops.split(gates, [3 * u], axis=-1)
        gates = self.recurrent_activation(gates)
        i, f, o = ops.split(gates, [u, 2 * u], axis=-1)
        return i, f, o, self.activation(j)

    def _norm_state(self, weights: Tensors, c: Tensor) -> Tensor:
        if not self.layer_norm:
            return c
        return layer_norm(
            c,
            [self.units],
            weights["state_norm_gain"],
            weights["state_norm_bias"],
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self.serialize_arguments(
                argument_names(package_class(type(self)))
            ),
        }


def count_step(pointer: Tensor) -> Tensor:
    """The pointer after one more step."""
    count = memory_ops.pointer_to_count(pointer)
    return memory_ops.count_to_pointer(
        memory_ops.increment(count), pointer.dtype
    )
