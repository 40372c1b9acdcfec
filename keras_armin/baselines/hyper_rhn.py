"""The recurrent highway hypernetwork."""

from typing import Any

import keras

from keras_armin import memory_ops
from keras_armin import validation
from keras_armin.armin_equations import affine
from keras_armin.armin_equations import prepare_inputs
from keras_armin.backends import ops
from keras_armin.baselines._recurrent_cell import count_step
from keras_armin.baselines.rhn import RHNCell
from keras_armin.memory_cell import CellResult
from keras_armin.memory_layer import MemoryLayer
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from keras_armin.types import Shape
from keras_armin.types import Tensor
from keras_armin.types import Tensors


@keras.saving.register_keras_serializable(package="keras_armin")
class HyperRHNCell(RHNCell):
    """One step of a recurrent highway hypernetwork.

    Two recurrent highway networks of the same depth see the input. Each layer
    of the small one scales the rows of the kernels of a layer of the other,
    those of h and of t alike:

        s^_l = highway layer l of the small network
        z_l = P_l s^_l + p_l
        h_l = tanh(z_l * (W_H x [l = 1] + R_Hl s_{l-1}) + b_Hl)
        t_l = sigma(z_l * (W_T x [l = 1] + R_Tl s_{l-1}) + b_Tl)
        s_l = h_l * t_l + s_{l-1} * (1 - t_l)

    The publication leaves open how weights start. Here `p = 1`, with which the
    main network is an `RHN`, P is small, and the bias of t starts at -2 in both
    networks, as in `RHNCell`; in the authors' code P, p and all biases are
    random numbers around 0. With `layer_norm`, which is not in the publication,
    both networks are normalised as in `RHNCell`.

    Args:
        units: int. Size of the state, which is the output.
        hyper_units: int. Size of the state of the small network. Defaults to
            `128`.
        depth, coupled, transform_bias, activation, recurrent_activation,
            use_bias, layer_norm, kernel_initializer, recurrent_initializer,
            bias_initializer, kernel_regularizer, recurrent_regularizer,
            bias_regularizer, kernel_constraint, recurrent_constraint,
            bias_constraint, dropout, recurrent_dropout, seed: Of both
            networks, see `RHNCell`. `recurrent_dropout` is applied to the
            main network. Kernel and bias arguments apply to `P` and `p` too,
            except initializers.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List `[output, hyper, pointer]`; `pointer` counts steps.
        training: bool. Whether to apply dropout.

    Example:

    >>> from keras_armin.baselines import HyperRHNCell
    >>> rnn = keras.layers.RNN(HyperRHNCell(8, hyper_units=4))
    >>> tuple(rnn(np.zeros((2, 5, 3), "float32")).shape)
    (2, 8)

    Reference:
        - [Suarez, 2017](https://papers.nips.cc/paper/6919)
    """

    state_names = ("output", "hyper", "pointer")

    def __init__(
        self, units: int, hyper_units: int = 128, **kwargs: Any
    ) -> None:
        super().__init__(units, **kwargs)
        self.hyper_units = validation.size("hyper_units", hyper_units)
        self.state_size = [
            self.units,
            self.hyper_units,
            memory_ops.POINTER_DIGITS,
        ]

    def build(self, input_shape: Shape) -> None:
        self.set_input_shape(input_shape)
        self.build_highway("", self.units)
        self.build_highway("hyper_", self.hyper_units)
        blocks = [(self.units, keras.initializers.RandomNormal(stddev=0.01))]
        ones = [(self.units, keras.initializers.Ones())]
        for layer in range(1, self.depth + 1):
            shape = (self.hyper_units, self.units)
            name = f"scale_kernel_{layer}"
            kernel = self._add_blocks(name, "kernel", shape, blocks)
            setattr(self, name, kernel)
            name = f"scale_bias_{layer}"
            setattr(self, name, self.add_bias(name, ones))
        self.built = True

    def project(
        self,
        weights: Tensors,
        inputs: Tensor,
        sequence_noise: SequenceNoise = SequenceNoise(),
    ) -> Tensors:
        """Everything that depends on `inputs` `(..., features)` alone."""
        inputs = prepare_inputs(inputs, sequence_noise)
        return {
            name: ops.matmul(inputs, weights[f"{prefix}kernel"])
            for name, prefix in (("inputs", ""), ("hyper", "hyper_"))
        }

    def step(
        self,
        weights: Tensors,
        projected: Tensors,
        states: list,
        step_noise: StepNoise,
        sequence_noise: SequenceNoise,
        training: bool,
    ) -> CellResult:
        s, hyper, pointer = states
        small = self.highway(weights, "hyper_", projected["hyper"], hyper)
        s = self.highway(
            weights,
            "",
            projected["inputs"],
            s,
            sequence_noise.recurrent,
            [self._scale(weights, *x) for x in enumerate(small, 1)],
        )[-1]
        return CellResult([s, small[-1], count_step(pointer)])

    def _scale(self, weights: Tensors, layer: int, small: Tensor) -> Tensor:
        """z, once for each of h, t and c."""
        kernel, bias = (
            weights[f"scale_{kind}_{layer}"] for kind in ("kernel", "bias")
        )
        return ops.concatenate([affine(small, kernel, bias)] * self.blocks, -1)


@keras.saving.register_keras_serializable(package="keras_armin")
class HyperRHN(MemoryLayer):
    """A recurrent highway hypernetwork.

    `HyperRHN(...)` has the weights of `keras.layers.RNN(HyperRHNCell(...))`
    and computes the same numbers. In addition it carries its state on every
    backend if `stateful`, and can reset individual samples.

    Args:
        units, hyper_units, depth, coupled, transform_bias, activation,
            recurrent_activation, use_bias, layer_norm, kernel_initializer,
            recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint,
            recurrent_constraint, bias_constraint, dropout,
            recurrent_dropout, seed: See `HyperRHNCell`.
        return_sequences, return_state, go_backwards, stateful, unroll,
            zero_output_for_mask: See `LayerNormLSTM`.

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state, mask, training, reset: See `LayerNormLSTM`.

    Reference:
        - [Suarez, 2017](https://papers.nips.cc/paper/6919)
    """

    cell: HyperRHNCell
    cell_class = HyperRHNCell
    cell_name = "hyper_rhn_cell"
