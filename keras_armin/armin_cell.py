"""The cell of ARMIN: arguments, weights and noise."""

from collections.abc import Callable
from typing import Any
from typing import Self

import keras
import numpy as np
from keras import ops

from keras_armin import memory_ops
from keras_armin import noise
from keras_armin import validation
from keras_armin.armin_equations import ARMINEquations
from keras_armin.armin_equations import ARMINState
from keras_armin.initial_states import InitialStates
from keras_armin.initializers import BlockInitializer
from keras_armin.memory_cell import argument_names
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor

ADDRESSING = ("hard", "relaxed", "soft")

# Reads then begin among the oldest slots.
INITIAL_RECENCY_SCALE = 2.0

# The arguments of the paper's own network.
PAPER = {
    "addressing": "hard",
    "temperature": 1.0,
    "noise_scale": 1.0,
    "state_activation": None,
    "output_activation": "tanh",
    "recency_addressing": False,
    "content_addressing": False,
    "unit_gate_bias": False,
    "memory_dim": None,
    "write_activation": None,
}

# Values of arguments that are missing in configs of version 0.1.
DEFAULTS_0_1 = {
    "noise_scale": 1.0,
    "recency_addressing": False,
    "unit_gate_bias": False,
    "write_activation": None,
}


@keras.saving.register_keras_serializable(package="keras_armin")
class ARMINCell(InitialStates, ARMINEquations):
    """One step of ARMIN, a recurrent network with an external memory.

    Beside its hidden state `h` the cell keeps `memory_slots` vectors, its
    memory `M`. It picks one slot from the input and `h` alone, mixes what it
    read into `h` through element-wise gates, outputs both, and overwrites the
    slot it read. In the paper's notation:

        s = gumbel_softmax(W_s [x, h] + b_s)                        Eq. 9
        r = s M                                                     Eq. 10
        [g^h, g^r] = sigma(W_ig [x, h, r] + b_ig)                   Eq. 3
        h^g, r^g = g^h * h, g^r * r                                 Eq. 4, 5
        [i, f, g, o^h, o^r] = [sigma, sigma, tanh, sigma, sigma](
            W_go [x, h^g, r^g] + b_go)                              Eq. 6
        h' = f * h + i * g                                          Eq. 7
        output = [o^h * tanh(h'), o^r * tanh(r)]                    Eq. 8
        M[slot] = h'

    By default it differs from the paper (see examples/RESULTS.md): the best
    slot is read, without noise, while training too; slots written long ago are
    preferred at first (`recency_addressing`); tanh bounds the state,
    h' = tanh(f * h + i * g), in place of the output; the input gates start
    more open (`unit_gate_bias`); and slots are half as wide as the state, with
    tanh(W_w h' + b_w) written to them (`memory_dim`, `write_activation`). The
    paper's own cell is `ARMINCell(units, **keras_armin.PAPER)`.

    The first `memory_slots` steps fill the slots in order, whatever was read;
    after that the slot just read is overwritten. Empty slots hold zeros, or
    learnt rows, and can be read.

    Use it in `keras.layers.RNN`, or use the layer `ARMIN`, which has the same
    weights, computes the same numbers, and has more options.

    Args:
        units: int. Size of the hidden state.
        memory_slots: int. Number of vectors in memory. Defaults to `20`.
        memory_dim: int, `None` or `"half"`. Size of a slot: `None` is `units`,
            `"half"` is `units / 2`, rounded up. Where it differs from `units`,
            what is written is a learnt linear map of the hidden state, through
            `write_activation`. Defaults to `"half"`.
        addressing: `"hard"`, `"relaxed"` or `"soft"`. `"hard"` reads the slot
            with the largest score, with the gradient of a softmax read.
            `"relaxed"` reads with the softmax itself, to be annealed by
            lowering `temperature`, and overwrites the slot with the largest
            weight. Both read the best slot, without noise, at inference.
            `"soft"` reads with a softmax, never with noise, and once the
            memory is full moves every slot towards the new value by its read
            weight; at inference too. Defaults to `"hard"`.
        temperature: float. Divides the address logits (and their noise). Kept
            in the non-trainable scalar weight `temperature`, so that it can
            be changed while training: see
            `keras_armin.callbacks.TemperatureAnnealing`. Defaults to `1.0`.
        activation: Activation of the candidate `g`. Defaults to `"tanh"`.
        recurrent_activation: Activation of all gates, element by element.
            Defaults to `"sigmoid"`.
        state_activation: Applied to the new hidden state before it is output
            and carried. `None`, as in the paper, leaves the state unbounded.
            Defaults to `"tanh"`.
        output_activation: Applied to the hidden state and to what was read
            for the output, element by element. It is `"tanh"` in the paper,
            whose state is unbounded. Defaults to `None`.
        use_bias: bool. Defaults to `True`.
        unit_forget_bias: bool. Start the forget gate's bias at 1. Defaults to
            `True`.
        write_inputs: bool. What is written is a learnt linear map of the
            input and the hidden state. Defaults to `False`.
        learn_initial_state: bool. Train the hidden state and the memory that
            a sequence starts with. Both start at zero. Defaults to `False`.
        layer_norm: bool. Normalise the two input gates, the five gates and
            the new state, independently. Defaults to `False`.
        zoneout: float in [0, 1). Rate at which a unit of the hidden state
            keeps its old value, after the output has been computed. At
            inference the expectation is used. Defaults to `0.0`.
        content_addressing: bool. Beyond the paper: add to the address logits
            a match between a learnt query and what the slots hold. Defaults
            to `False`.
        output_read: bool. Whether the output has the half that comes from
            memory. Defaults to `True`.
        noise_scale: float. Multiplies the Gumbel noise that `"hard"` and
            `"relaxed"` add to the scores while training. `1` is the paper.
            With `0` nothing is drawn, and training and inference make the
            same reads. Above 0 it is kept in the non-trainable scalar weight
            `noise_scale`: see `keras_armin.callbacks.NoiseAnnealing`.
            Defaults to `0.0`.
        recency_addressing: bool. Beyond the paper: add to the score of each
            slot `recency_scale * log(1 + rank)`, where `rank` counts the other
            slots written since it was, and `recency_scale` is a trainable
            scalar that starts at 2. Reads then begin among the oldest slots.
            Empty slots count as older than all others. Defaults to `True`.
        unit_gate_bias: bool. Start the biases of the two input gates `g^h` and
            `g^r` at 1, which lets more of `h` and `r` through. Defaults to
            `True`.
        write_activation: Applied to what is written where it is a learnt map
            (`memory_dim`, `write_inputs`), to bound the memory as
            `state_activation` bounds the state. Defaults to `"tanh"`.
        kernel_initializer, kernel_regularizer, kernel_constraint: For
            `kernel`, and `write_kernel` and `query_kernel` where they exist.
            The initializer defaults to `"glorot_uniform"`.
        recurrent_initializer, recurrent_regularizer, recurrent_constraint:
            For `address_recurrent_kernel`, `gate_recurrent_kernel` and
            `recurrent_kernel`. The initializer defaults to `"orthogonal"`.
        bias_initializer, bias_regularizer, bias_constraint: For `bias`, and
            `write_bias` where it exists. The initializer defaults to
            `"zeros"`.
        dropout: float in [0, 1). Fraction of the inputs to drop, the same
            ones at each step of a sequence. Defaults to `0.0`.
        recurrent_dropout: float in [0, 1). Fraction of the hidden state and of
            what was read to drop where they enter matrix products. Defaults
            to `0.0`.
        seed: int. Seed of the noise and of dropout. Defaults to `None`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, h, memory, pointer, write_order]` of shapes
            `(batch, output_size)`, `(batch, units)`,
            `(batch, memory_slots * memory_dim)`, `(batch, 4)` and
            `(batch, memory_slots * digits)`. `pointer` holds the number of
            writes so far as base-128 digits, least significant first.
            `write_order`, which only `recency_addressing` has, holds the order
            in which the slots were written, with one digit a slot up to 128
            slots.
        training: bool. Whether to apply noise, dropout and zoneout.

    Notes:
        Called outside of a `keras.layers.RNN`, the cell does not know where a
        sequence starts: each call draws new dropout masks.

        Gradients do not depend on `training`: a read of a single slot has the
        gradient of a softmax read at inference too. A model that does not pass
        on `training` therefore still learns where to read, but without noise,
        dropout and zoneout, as any Keras layer would.

        `keras.layers.RNN` has limitations that a bare cell shares and the
        layer `ARMIN` does not: a stack of one cell fails on JAX; `unroll` with
        masks is wrong on PyTorch and JAX; a mask attached to the inputs is
        dropped if `initial_state` is given; NaN in masked steps reaches the
        gradients; `stateful` has no effect in `fit` on JAX; and
        `reset_state()` sets zeros even if the initial state is learned. A
        bare cell has no step to count a schedule by: use
        `keras_armin.callbacks.TemperatureAnnealing` there.

        Weights, for other programs. A `.weights.h5` file holds each of them
        under its name, as in `layers/armin/cell/vars/kernel`. With
        n = `memory_slots`, h = `units` and r = `memory_dim`, blocks of columns
        and of rows are in this order:

        - `kernel`: `(inputs, n + (h + r) + (4h + r))`; columns address, g^h,
          g^r, i, f, g, o^h, o^r. `bias` has the same columns.
        - `address_recurrent_kernel`: `(h, n)`.
        - `gate_recurrent_kernel`: `(h + r, h + r)`; columns g^h, g^r; rows
          h, r.
        - `recurrent_kernel`: `(h + r, 4h + r)`; columns i, f, g, o^h, o^r;
          rows gated h, gated r.
        - `write_kernel`: `(h, r)`, or `(inputs + h, r)` with `write_inputs`,
          and `write_bias`: `(r,)`. Only if `memory_dim` differs from `units`,
          or with `write_inputs`.
        - `gate_norm_gain`, `gate_norm_bias`: `(h + r,)`; `norm_gain`,
          `norm_bias`: `(4h + r,)`; `state_norm_gain`, `state_norm_bias`:
          `(h,)`. With `layer_norm`.
        - `query_kernel`: `(inputs + h, r)`, `content_scale`: `()`. With
          `content_addressing`.
        - `recency_scale`: `()`. With `recency_addressing`.
        - `initial_state`: `(h,)`, applied through tanh, and
          `initial_memory`: `(n, r)`. With `learn_initial_state`.
        - `temperature`, `noise_scale`: `()`. Not trained; the second only if
          it is above 0.

        `output_read=False` leaves the columns of o^r out. The numbers of
        parameters agree with the paper: with an embedding of 50 symbols in
        128 dimensions and a softmax over 50,
        `ARMIN(500, 20, layer_norm=True, **PAPER)` has 4,028,530 trainable
        parameters and `ARMIN(800, 20, layer_norm=True, **PAPER)` 9,800,230.

        Differences from the authors' code: their `tau` multiplies the logits,
        `temperature` divides them. Inference reads the best slot; their
        permuted MNIST code keeps sampling. Their hard sample marks every slot
        that equals the maximum; here a read is one-hot even if there are ties.
        Their cell for algorithmic tasks is `PAPER` with `addressing="soft"`,
        `state_activation="tanh"`, `output_activation=None`,
        `write_inputs=True` and `learn_initial_state=True`; its learned initial
        state starts at random values there, at zero here.

    Example:

    >>> cell = keras_armin.ARMINCell(8, memory_slots=4)
    >>> rnn = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 5, 12)

    Reference:
        - [Li et al., 2019](https://arxiv.org/abs/1906.12087)
    """

    def __init__(
        self,
        units: int,
        memory_slots: int = 20,
        memory_dim: int | str | None = "half",
        addressing: str = "hard",
        temperature: float = 1.0,
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
        noise_scale: float = 0.0,
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
        self.memory_slots = validation.size("memory_slots", memory_slots)
        self.memory_dim = validation.memory_dim(memory_dim, self.units)
        self.addressing = validation.choice(
            "addressing", addressing, ADDRESSING
        )
        self.initial_temperature = validation.cell_scalar(
            "temperature", temperature, validation.positive
        )
        self.initial_noise_scale = validation.cell_scalar(
            "noise_scale", noise_scale, validation.not_negative
        )
        # Also set by a layer with a schedule for the noise.
        self.has_noise = self.initial_noise_scale > 0
        self.set_keras_objects(given)
        self.use_bias = validation.flag("use_bias", use_bias)
        self.unit_forget_bias = validation.flag(
            "unit_forget_bias", unit_forget_bias
        )
        self.write_inputs = validation.flag("write_inputs", write_inputs)
        self.learn_initial_state = validation.flag(
            "learn_initial_state", learn_initial_state
        )
        self.layer_norm = validation.flag("layer_norm", layer_norm)
        self.zoneout = validation.rate("zoneout", zoneout)
        self.content_addressing = validation.flag(
            "content_addressing", content_addressing
        )
        self.output_read = validation.flag("output_read", output_read)
        self.recency_addressing = validation.flag(
            "recency_addressing", recency_addressing
        )
        self.unit_gate_bias = validation.flag("unit_gate_bias", unit_gate_bias)
        self.output_size = self.units + self.memory_dim * self.output_read
        self.state_size = [
            self.output_size,
            self.units,
            self.memory_slots * self.memory_dim,
            memory_ops.POINTER_DIGITS,
        ]
        if self.recency_addressing:
            digits = memory_ops.order_digits(self.memory_slots)
            self.state_size.append(self.memory_slots * digits)
        self.temperature = None
        self.noise_scale = None

    @property
    def state_names(self) -> tuple[str, ...]:
        names = ARMINState._fields
        return names if self.recency_addressing else names[:-1]

    @property
    def has_write_kernel(self) -> bool:
        return self.write_inputs or self.memory_dim != self.units

    @property
    def address_width(self) -> int:
        """Number of address columns: one logit per slot."""
        return self.memory_slots

    @property
    def gate_sizes(self) -> list[int]:
        """Widths of g^h and g^r."""
        return [self.units, self.memory_dim]

    @property
    def five_gate_sizes(self) -> list[int]:
        """Widths of i, f, g, o^h and, where it is output, o^r."""
        return [self.units] * 4 + [self.memory_dim] * self.output_read

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self._build_kernels()
        self._build_write_map()
        if self.layer_norm:
            self._build_norms()
        if self.content_addressing:
            self.query_kernel = self.add_kernel(
                "query_kernel",
                "kernel",
                self.input_dim + self.units,
                [self.memory_dim],
            )
            self.content_scale = self.add_weight(
                shape=(), initializer="zeros", name="content_scale"
            )
        self.build_initial_state()
        if self.recency_addressing:
            self.recency_scale = self.add_scalar(
                "recency_scale", INITIAL_RECENCY_SCALE, trainable=True
            )
        self.temperature = self.add_scalar(
            "temperature", self.initial_temperature
        )
        if self.needs_gumbel:
            self.noise_scale = self.add_scalar(
                "noise_scale", self.initial_noise_scale
            )
        self.built = True

    def _build_kernels(self) -> None:
        gates, five = self.gate_sizes, self.five_gate_sizes
        both = self.units + self.memory_dim
        self.kernel = self.add_kernel(
            "kernel",
            "kernel",
            self.input_dim,
            [self.address_width, *gates, *five],
        )
        self.address_recurrent_kernel = self.add_kernel(
            "address_recurrent_kernel",
            "recurrent",
            self.units,
            [self.address_width],
        )
        self.gate_recurrent_kernel = self.add_kernel(
            "gate_recurrent_kernel", "recurrent", both, gates
        )
        self.recurrent_kernel = self.add_kernel(
            "recurrent_kernel", "recurrent", both, five
        )
        if self.use_bias:
            bias = [
                (size, self.bias_initializer)
                for size in (self.address_width, *gates, *five)
            ]
            ones = keras.initializers.Ones()
            if self.unit_gate_bias and not self.layer_norm:
                bias[1 : 1 + len(gates)] = [(size, ones) for size in gates]
            if self.unit_forget_bias and not self.layer_norm:
                forget = 1 + len(gates) + 1
                bias[forget] = (self.units, ones)
            self.bias = self.add_bias("bias", bias)

    def _build_write_map(self) -> None:
        if not self.has_write_kernel:
            return
        inputs = self.input_dim if self.write_inputs else 0
        self.write_kernel = self.add_kernel(
            "write_kernel", "kernel", inputs + self.units, [self.memory_dim]
        )
        if self.use_bias:
            self.write_bias = self.add_bias(
                "write_bias", [(self.memory_dim, self.bias_initializer)]
            )

    def _build_norms(self) -> None:
        gates, five = sum(self.gate_sizes), sum(self.five_gate_sizes)
        zeros, ones = keras.initializers.Zeros(), keras.initializers.Ones()
        self.gate_norm_gain = self.add_norm("gate_norm_gain", gates, ones)
        # A bias of 1 in `bias` would be normalised away.
        self.gate_norm_bias = self.add_norm(
            "gate_norm_bias", gates, ones if self.unit_gate_bias else zeros
        )
        self.norm_gain = self.add_norm("norm_gain", five, ones)
        forget = ones if self.unit_forget_bias else zeros
        starts = [zeros, forget] + [zeros] * (len(self.five_gate_sizes) - 2)
        self.norm_bias = self.add_norm(
            "norm_bias",
            five,
            BlockInitializer(list(zip(self.five_gate_sizes, starts))),
        )
        self.state_norm_gain = self.add_norm(
            "state_norm_gain", self.units, ones
        )
        self.state_norm_bias = self.add_norm(
            "state_norm_bias", self.units, zeros
        )

    @property
    def trainable_initial_states(self) -> dict[str, tuple]:
        def tanh(x: Tensor) -> Tensor:
            # The same inside a call, which casts weights, and outside.
            return ops.tanh(ops.cast(x, self.compute_dtype))

        return {
            "h": (np.zeros(self.units), tanh),
            "memory": (
                np.zeros((self.memory_slots, self.memory_dim)),
                ops.ravel,
            ),
        }

    # --- randomness ---------------------------------------------------------

    @property
    def needs_gumbel(self) -> bool:
        return self.addressing != "soft" and self.has_noise

    @property
    def step_draws(self) -> int:
        """Number of random tensors per step."""
        return int(self.needs_gumbel) + int(self.zoneout > 0)

    def draw_step_noise(self, leading: tuple, seeds: list) -> StepNoise:
        unused = iter(seeds)
        gumbel = zoneout = None
        if self.needs_gumbel:
            gumbel = noise.gumbel((*leading, self.memory_slots), next(unused))
        if self.zoneout:
            shape = (*leading, self.units)
            zoneout = noise.zoneout_mask(shape, self.zoneout, next(unused))
        return StepNoise(gumbel, zoneout)

    @property
    def recurrent_width(self) -> int:
        """`recurrent_dropout` is applied to h and r."""
        return self.units + self.memory_dim

    def check_state(self, arrays: dict[str, np.ndarray]) -> None:
        super().check_state(arrays)
        if self.recency_addressing:
            memory_ops.check_order(arrays["write_order"], self.memory_slots)

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            **self.serialize_arguments(cell_arguments()),
        }
        config["temperature"] = self.initial_temperature
        config["noise_scale"] = self.initial_noise_scale
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**DEFAULTS_0_1, **config})

    def load_own_variables(self, store: Any) -> None:
        if self.recency_addressing and "recency_scale" not in store.keys():
            raise ValueError(
                f"The weights file does not match cell '{self.name}', which "
                "has a `recency_scale`. If the file was written by version 0.1 "
                "with its defaults, create this layer with "
                "`**keras_armin.PAPER`; otherwise with "
                "`recency_addressing=False`."
            )
        super().load_own_variables(store)


def cell_arguments() -> list[str]:
    """Names of the cell's own arguments, in order."""
    return argument_names(ARMINCell)
