"""The base class of cells with an LSTM controller."""

from collections.abc import Callable
from typing import Any

import keras

from keras_armin import noise
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import apply_zoneout
from keras_armin.armin_equations import prepare_inputs
from keras_armin.armin_equations import times
from keras_armin.backends import addmm
from keras_armin.backends import ops
from keras_armin.baselines._recurrent_cell import RecurrentCell
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Tensor
from keras_armin.types import Tensors


class LSTMDrivenCell(RecurrentCell):
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
        **kwargs: Any,
    ) -> None:
        given = locals()
        super().__init__(**kwargs)
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

    def build_lstm(
        self,
        prefix: str = "",
        inputs: int | None = None,
        recurrent: int | None = None,
        units: int | None = None,
    ) -> None:
        """Weights of an LSTM; `prefix` distinguishes several of them."""
        inputs = self.input_dim if inputs is None else inputs
        units, named = units or self.units, {}
        sizes = [units] * 4
        if inputs:
            named["kernel"] = self.add_kernel(
                f"{prefix}kernel", "kernel", inputs, sizes
            )
        named["recurrent_kernel"] = self.add_kernel(
            f"{prefix}recurrent_kernel",
            "recurrent",
            recurrent or self.recurrent_width,
            sizes,
        )
        if self.use_bias:
            starts = self._gate_starts(
                units, self.bias_initializer, not self.layer_norm
            )
            named["bias"] = self.add_bias(f"{prefix}bias", starts)
        for name, weight in named.items():
            setattr(self, f"{prefix}{name}", weight)
        if self.layer_norm:
            # A forget bias of 1 in `bias` would be normalised away.
            zeros = keras.initializers.Zeros()
            self.build_norm(prefix, self._gate_starts(units, zeros, True))
            self.build_norm(f"{prefix}state_", [(units, zeros)])

    def _gate_starts(
        self, units: int, initializer: Any, holds_forget_bias: bool
    ) -> list:
        """Widths and initializers of i, f, o and j in a bias.

        Gates with the same activation come first.
        """
        starts = [(units, initializer)] * 4
        if self.unit_forget_bias and holds_forget_bias:
            starts[1] = (units, keras.initializers.Ones())
        return starts

    # --- randomness ---------------------------------------------------------

    @property
    def step_draws(self) -> int:
        """Number of random tensors per step."""
        return int(self.zoneout_cell > 0) + int(self.zoneout_hidden > 0)

    def draw_step_noise(self, leading: tuple, seeds: list) -> StepNoise:
        unused = iter(seeds)
        shape = (*leading, self.zoneout_width)

        def draw(rate: float) -> Tensor:
            return (
                noise.zoneout_mask(shape, rate, next(unused)) if rate else None
            )

        return StepNoise(
            zoneout_cell=draw(self.zoneout_cell),
            zoneout=draw(self.zoneout_hidden),
        )

    @property
    def zoneout_width(self) -> int:
        """Number of units that zoneout may keep, of c and of h each."""
        return self.units

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
        return self.update_lstm(
            weights,
            gates,
            entering[:, : self.units],
            c_tm1,
            step_noise,
            training,
        )

    def update_lstm(
        self,
        weights: Tensors,
        gates: Tensor,
        h_tm1: Tensor,
        c_tm1: Tensor,
        step_noise: StepNoise,
        training: bool,
        prefix: str = "",
    ) -> tuple[Tensor, Tensor]:
        """The new h and c, from `gates` before normalisation."""
        i, f, o, j = self._activate(weights, gates, prefix)
        new_c = f * c_tm1 + i * j
        new_h = o * self.activation(self._norm_state(weights, new_c, prefix))
        c = apply_zoneout(
            self.zoneout_cell, new_c, c_tm1, step_noise.zoneout_cell, training
        )
        h = apply_zoneout(
            self.zoneout_hidden, new_h, h_tm1, step_noise.zoneout, training
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

    def _activate(self, weights: Tensors, gates: Tensor, prefix: str) -> tuple:
        """i, f, o and j, from all of them before normalisation."""
        u = gates.shape[-1] // 4
        gates = self.normalise(weights, prefix, gates, 4)
        gates, j = ops.split(gates, [3 * u], axis=-1)
        gates = self.recurrent_activation(gates)
        i, f, o = ops.split(gates, [u, 2 * u], axis=-1)
        return i, f, o, self.activation(j)

    def _norm_state(self, weights: Tensors, c: Tensor, prefix: str) -> Tensor:
        if not self.layer_norm:
            return c
        return self.normalise(weights, f"{prefix}state_", c, 1)
