import keras
import numpy as np


def raise_no_second_derivatives(*_):
    raise NotImplementedError(
        "The fused gradient of `ARMIN` has no second derivatives. Use "
        "`ARMIN(..., unroll=True)` or `keras.layers.RNN(ARMINCell(...))`, "
        "which have the same weights and are differentiated by the backend."
    )


def leaves(tree):
    """The leaves of nested dicts."""
    if not isinstance(tree, dict):
        return [tree]
    return [leaf for branch in tree.values() for leaf in leaves(branch)]


def map_leaves(function, tree):
    """Nested dicts with `function` applied to each leaf."""
    if not isinstance(tree, dict):
        return function(tree)
    return {name: map_leaves(function, x) for name, x in tree.items()}


def is_float16(dtype):
    return keras.backend.standardize_dtype(dtype) == "float16"


def update_ranks(ranks, slot, slots, ops=keras.ops):
    """With `slots`, the numbers of all slots."""
    # As products: a converter to ONNX would fix the batch size of zeros.
    written = ops.cast(ops.expand_dims(slot, -1) == slots, ranks.dtype)
    own = ops.expand_dims(ops.sum(written * ranks, axis=-1), -1)
    risen = ranks + ops.cast(ranks < own, ranks.dtype)
    return (1 - written) * risen


def concatenate(tensors, out=None):
    return keras.ops.concatenate(tensors, axis=-1)


def multiply(x, y, out=None):
    return x * y


def log_of_one_plus(x, out=None):
    return keras.ops.log(x + 1)


def gate(function, x, term, in_place=False):
    return function(x) * term


def dense(x):
    """Only torch has tensors that are parts of others."""
    return x


def prepared(step, prepare):
    """The step of a `scan` that prepares its inputs by itself."""
    return lambda carry, inputs_t: step(carry, prepare(inputs_t))


def compiled_step(function, model):
    """It is compiled with the loop around it."""
    return function


def num_replicas(variable):
    return 1


def gather_state(variable):
    return np.array(keras.ops.convert_to_numpy(variable.value))


def scatter_state(variable, array):
    variable.assign(keras.ops.cast(array, variable.dtype))


def generator_state():
    return None


def set_generator_state(array):
    """Seeds are variables: nothing to restore."""


class TrainingModeMixin:
    """Only torch has modules with a training mode: nothing to add here."""
