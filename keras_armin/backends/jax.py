import functools

import jax
import keras
from jax import numpy as jnp
from jax.experimental import multihost_utils

from keras_armin.backends import common
from keras_armin.backends.common import raise_no_second_derivatives

ops = keras.ops
# One array, however many devices hold parts of it.
num_replicas = common.num_replicas
scatter_state = common.scatter_state
TrainingModeMixin = common.TrainingModeMixin
is_float16 = common.is_float16
compiled_step = common.compiled_step
concatenate = common.concatenate
dense = common.dense
gate = common.gate
log_of_one_plus = common.log_of_one_plus
multiply = common.multiply
generator_state = common.generator_state
set_generator_state = common.set_generator_state


def scan(
    step,
    carry,
    inputs,
    unroll=False,
    reverse=False,
    differentiable=True,
    unstacked=(),
    prepare=None,
    may_overwrite=None,
):
    if prepare is not None:
        step = common.prepared(step, prepare)
    if unroll and common.leaves(inputs)[0].shape[0] == 1:
        # No loop: outside of a compiled function JAX would recompile it at
        # every call.
        carry, outputs = step(carry, common.map_leaves(lambda x: x[0], inputs))
        return carry, common.map_leaves(lambda x: x[None], outputs)
    return jax.lax.scan(step, carry, inputs, unroll=unroll, reverse=reverse)


def constant(x):
    """Loops capture any tensor on this backend."""
    return x


def arange(n):
    return jax.lax.iota("int32", n)


def floor_divide(x, y):
    return jax.lax.div(*jnp.broadcast_arrays(x, jnp.int32(y)))


def integers(values, like):
    return jnp.asarray(values, dtype="int32")


def argmax_slot(scores):
    # Not `keras.ops.argmax`, which inspects the sign bit of zeros: ONNX
    # Runtime has no operation for that.
    return jnp.argmax(scores, axis=-1).astype("int32")


def writable_copy(x):
    """Tensors are immutable on this backend: nothing to copy."""
    return x


def gather_rows(memory, slot):
    return memory[arange(memory.shape[0]), slot]


def scatter_rows(memory, slot, value, in_place=False, after=None):
    if after is not None:
        # Makes the value depend on `after`. Without an order of read and
        # write XLA would copy the memory at each step.
        value = jnp.where(slot[:, None] >= 0, value, after)
    return memory.at[arange(memory.shape[0]), slot].set(value)


def scatter_then_add_rows(memory, put, value, add, term):
    value = jnp.zeros_like(term) if value is None else value
    memory = scatter_rows(memory, put, value, after=term)
    return memory.at[arange(memory.shape[0]), add].add(term)


def update_ranks(ranks, slot):
    return common.update_ranks(ranks, slot, arange(ranks.shape[-1]))


def matvec(matrices, vectors):
    return jnp.einsum("bnr,br->bn", matrices, vectors)


def addmm(x, inputs, kernel, in_place=False):
    if inputs.ndim > 2:
        # The gradient of a kernel over several axes would copy, transposed,
        # those of the products.
        rows = addmm(0, inputs.reshape(-1, inputs.shape[-1]), kernel)
        return x + rows.reshape(*inputs.shape[:-1], kernel.shape[-1])
    return x + jnp.matmul(inputs, kernel)


def addcmul(x, factor, term, in_place=False):
    return x + factor * term


def rejoin(whole, blocks, in_place=False):
    return ops.concatenate(blocks, axis=-1)


def activate(function, x, in_place=False):
    return function(x)


def sigmoid_gradient(y, d_y):
    return d_y * y * (1 - y)


def tanh_gradient(y, d_y):
    return d_y * (1 - y * y)


def softmax_gradient(y, d_y):
    return y * (d_y - ops.sum(y * d_y, axis=-1, keepdims=True))


def vjp(function, x, d_y):
    """The gradient of `x`, given that of `function(x)`."""
    _, pull = jax.vjp(function, x)
    return pull(d_y)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clip_gradient(x, largest):
    return x


clip_gradient.defvjp(
    lambda x, largest: (x, None),
    lambda largest, _, d_x: (jnp.clip(d_x, -largest, largest),),
)


def run_loop(function, cell, sequences, states, **options):
    return function(cell, sequences, states, **options)


def custom_gradient(forward, backward, inputs, constants):
    @jax.custom_vjp
    def function(inputs, constants):
        return forward(inputs, constants)[0]

    def backwards(residuals, gradients):
        return _first_order_only(backward(residuals, gradients)), None

    function.defvjp(forward, backwards)
    return function(inputs, constants)


@jax.custom_vjp
def _first_order_only(gradients):
    return gradients


_first_order_only.defvjp(
    lambda gradients: (gradients, None), raise_no_second_derivatives
)


def with_vjp(function, gradient):
    differentiable = jax.custom_vjp(function)
    differentiable.defvjp(
        lambda *tensors: (function(*tensors), tensors),
        lambda tensors, d_output: gradient(*tensors, d_output),
    )
    return differentiable


def gradients_are_disabled():
    """JAX runs the backward pass only where a gradient is taken."""
    return False


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing to check."""
    return sequences


def padding_advice(sequences):
    """JAX has dense arrays only."""
    return None


def compiled(function, model, with_xla=True):
    @jax.jit
    def run(values, *arguments):
        # As arguments: otherwise they would be constants of what is compiled.
        weights = list(zip(model.variables, values))
        with keras.StatelessScope(state_mapping=weights):
            return function(*arguments)

    def run_with_weights(*arguments):
        return run([v.value for v in model.variables], *arguments)

    return run_with_weights


def gather_state(variable):
    if variable.value.is_fully_addressable:
        return common.gather_state(variable)
    # Other processes hold the rest.
    return multihost_utils.process_allgather(variable.value, tiled=True)
