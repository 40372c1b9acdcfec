import contextlib
import functools

import jax
import keras
from jax import numpy as jnp
from jax.experimental import multihost_utils

from keras_armin.backends import common
from keras_armin.backends.common import refuse_second_derivatives

ops = keras.ops
# One array, however many devices hold parts of it.
copies = common.copies
scatter = common.scatter
ModeOfModule = common.ModeOfModule


def scan(step, states, inputs, unroll=False, reverse=False, by_hand=False):
    def body(carry, x):
        states, outputs, kept = step(carry, x)
        return states, (outputs, kept)

    if unroll and inputs[0].shape[0] == 1:
        # No loop: outside of a compiled function JAX would compile it anew
        # for every call.
        states, results = body(list(states), [x[0] for x in inputs])
        outputs, kept = jax.tree.map(lambda x: x[None], results)
        return states, outputs, kept
    states, (outputs, kept) = jax.lax.scan(
        body, list(states), list(inputs), unroll=unroll, reverse=reverse
    )
    return states, outputs, kept


def constant(x):
    """Nothing has to be done here for a loop to take a weight."""
    return x


def count_up(n):
    return jax.lax.iota("int32", n)


def quotient(x, y):
    return jax.lax.div(*jnp.broadcast_arrays(x, jnp.int32(y)))


def integers(values, like):
    return jnp.asarray(values, dtype="int32")


def best_slot(scores):
    # Not by `keras.ops`: its argmax looks at the bits of floats, for the sign
    # of a zero, and ONNX Runtime has no operation for that.
    return jnp.argmax(scores, axis=-1).astype("int32")


def own(x):
    """No tensor is ever changed here: nothing to copy."""
    return x


def take_rows(memory, slot):
    return memory[count_up(memory.shape[0]), slot]


def put_rows(memory, slot, value, in_place=False, after=None):
    if after is not None:
        # Makes the value depend on `after`. XLA would else not know which
        # comes first, and copy the memory at each step to be safe.
        value = jnp.where(slot[:, None] >= 0, value, after)
    return memory.at[count_up(memory.shape[0]), slot].set(value)


def put_then_add(memory, put, value, add, term):
    memory = put_rows(memory, put, value, after=term)
    return memory.at[count_up(memory.shape[0]), add].add(term)


def matvec(matrices, vectors):
    return jnp.einsum("bnr,br->bn", matrices, vectors)


def plus_product(x, inputs, kernel, in_place=False):
    return x + jnp.matmul(inputs, kernel)


def activate(function, x, in_place=False):
    return function(x)


def sigmoid_gradient(y, d_y):
    return d_y * y * (1 - y)


def tanh_gradient(y, d_y):
    return d_y * (1 - y * y)


def pullback(function, x, d_y):
    """The gradient of `x`, from that of `function(x)`."""
    _, pull = jax.vjp(function, x)
    return pull(d_y)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clip_gradient(x, largest):
    return x


clip_gradient.defvjp(
    lambda x, largest: (x, None),
    lambda largest, _, d_x: (jnp.clip(d_x, -largest, largest),),
)


def can_go_back_by_hand():
    return True


def without_autocast(x):
    """Nothing on this backend casts behind one's back."""
    return contextlib.nullcontext()


def with_gradient(forward, backward, inputs, constants):
    @jax.custom_vjp
    def function(inputs, constants):
        return forward(inputs, constants)[0]

    def forwards(inputs, constants):
        outputs, residuals = forward(inputs, constants)
        return outputs, (inputs, residuals)

    def backwards(saved, gradients):
        return _once(backward(*saved, gradients)), None

    function.defvjp(forwards, backwards)
    return function(list(inputs), constants)


@jax.custom_vjp
def _once(gradients):
    return gradients


_once.defvjp(lambda gradients: (gradients, None), refuse_second_derivatives)


def custom_gradient(function, gradient):
    differentiable = jax.custom_vjp(function)
    differentiable.defvjp(
        lambda *tensors: (function(*tensors), tensors),
        lambda tensors, d_output: gradient(*tensors, d_output),
    )
    return differentiable


def is_never_differentiated():
    """JAX runs the way back only where a gradient is taken."""
    return False


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing is left to check."""
    return sequences


def how_to_pad(sequences):
    """JAX has dense arrays only."""
    return None


def gather(variable):
    if variable.value.is_fully_addressable:
        return common.gather(variable)
    # Other processes hold the rest.
    return multihost_utils.process_allgather(variable.value, tiled=True)
