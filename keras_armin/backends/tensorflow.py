import keras
import numpy as np
import tensorflow as tf

from keras_armin.backends import common
from keras_armin.backends.common import raise_no_second_derivatives

ops = keras.ops
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
    if unroll or tf.executing_eagerly():
        return _python_loop(step, carry, inputs, reverse, unstacked)
    return _graph_loop(step, carry, inputs, reverse, differentiable, unstacked)


def _python_loop(step, carry, inputs, reverse, unstacked):
    inputs = common.map_leaves(
        lambda x: x if isinstance(x, list) else tf.unstack(x), inputs
    )
    length = len(common.leaves(inputs)[0])
    outputs: list = [None] * length
    for time in reversed(range(length)) if reverse else range(length):
        inputs_t = common.map_leaves(lambda x, t=time: x[t], inputs)
        carry, outputs[time] = step(carry, inputs_t)
    columns = {name: [y[name] for y in outputs] for name in outputs[0]}
    return carry, {
        name: column if name in unstacked else tf.stack(column)
        for name, column in columns.items()
    }


def _graph_loop(step, carry, inputs, reverse, differentiable, unstacked):
    first = next(
        x for x in common.leaves(inputs) if not isinstance(x, tf.TensorArray)
    )
    length = first.shape[0]
    if length is None:
        length = tf.shape(first)[0]
    readers = common.map_leaves(
        lambda x: _reader(x, length, differentiable), inputs
    )

    def run_step(carry, time):
        return step(carry, common.map_leaves(lambda read: read(time), readers))

    # Only to infer the outputs' dtypes and shapes; pruned, as it is unused.
    _, outputs = run_step(carry, 0)
    arrays = {
        name: tf.TensorArray(
            y.dtype, length, element_shape=y.shape, clear_after_read=False
        )
        for name, y in outputs.items()
    }
    shapes = [x.shape for x in tf.nest.flatten(carry)]

    def body(count, carry, arrays):
        time = length - 1 - count if reverse else count
        new_carry, outputs = run_step(carry, time)
        for x, shape in zip(tf.nest.flatten(new_carry), shapes):
            x.set_shape(shape)
        arrays = {
            name: array.write(time, outputs[name])
            for name, array in arrays.items()
        }
        return count + 1, new_carry, arrays

    # XLA differentiates only loops with a known number of iterations.
    _, carry, arrays = tf.while_loop(
        lambda count, *_: count < length,
        body,
        (tf.constant(0), carry, arrays),
        maximum_iterations=length,
    )
    return carry, {
        name: array if name in unstacked else array.stack()
        for name, array in arrays.items()
    }


def _reader(x, length, differentiable):
    """A function that returns step `time` of `x`."""
    if isinstance(x, tf.TensorArray):
        return x.read
    if not differentiable:
        # No copy; but its gradient would be a whole sequence at each step.
        return lambda time: x[time]
    shape = x.shape[1:]
    return tf.TensorArray(x.dtype, length, element_shape=shape).unstack(x).read


def constant(x):
    """Loops capture any tensor on this backend."""
    return x


def arange(n):
    return tf.range(n)


def floor_divide(x, y):
    return x // y


def integers(values, like):
    return tf.constant(values, dtype="int32")


def argmax_slot(scores):
    # Not `keras.ops.argmax`, which inspects the sign bit of zeros: ONNX
    # Runtime has no operation for that.
    return tf.argmax(scores, axis=-1, output_type="int32")


def writable_copy(x):
    """Tensors are immutable on this backend: nothing to copy."""
    return x


def gather_rows(memory, slot):
    return tf.gather(memory, slot, batch_dims=1)


def scatter_rows(memory, slot, value, in_place=False, after=None):
    if after is not None:
        # Makes the value depend on `after`. Without an order of read and
        # write XLA would copy the memory at each step.
        value = tf.where(slot[:, None] >= 0, value, after)
    if memory.shape[0] == 1 and not in_place:
        return _put_in_flat(memory, slot, value)
    return tf.tensor_scatter_nd_update(memory, _row_index(slot), value)


def _put_in_flat(memory, slot, value):
    """For a cell that steps a single sample in a foreign loop.

    Its state is flat, and XLA updates it in place only if the update is flat
    too.
    """
    _, slots, width = memory.shape
    columns = slot * width + tf.range(width)
    index = tf.stack([tf.zeros_like(columns), columns], axis=-1)
    flat = tf.reshape(memory, (1, slots * width))
    flat = tf.tensor_scatter_nd_update(flat, index, value[0])
    return tf.reshape(flat, memory.shape)


def scatter_then_add_rows(memory, put, value, add, term):
    """A single update, since each one copies the memory on this backend."""
    value = tf.zeros_like(term) if value is None else value
    same = (put == add)[:, None]
    put_row = value + tf.where(same, term, tf.zeros_like(term))
    add_row = tf.where(same, put_row, gather_rows(memory, add) + term)
    index = tf.concat([_row_index(put), _row_index(add)], axis=0)
    rows = tf.concat([put_row, add_row], axis=0)
    return tf.tensor_scatter_nd_update(memory, index, rows)


def _row_index(slot):
    return tf.stack([tf.range(tf.shape(slot)[0]), slot], axis=-1)


def update_ranks(ranks, slot):
    return common.update_ranks(ranks, slot, arange(ranks.shape[-1]))


def matvec(matrices, vectors):
    return tf.linalg.matvec(matrices, vectors)


def addmm(x, inputs, kernel, in_place=False):
    return x + ops.matmul(inputs, kernel)


def addcmul(x, factor, term, in_place=False):
    return x + factor * term


def rejoin(whole, blocks, in_place=False):
    return ops.concatenate(blocks, axis=-1)


def activate(function, x, in_place=False):
    return function(x)


def sigmoid_gradient(y, d_y):
    return tf.raw_ops.SigmoidGrad(y=y, dy=d_y)


def tanh_gradient(y, d_y):
    return tf.raw_ops.TanhGrad(y=y, dy=d_y)


def softmax_gradient(y, d_y):
    return y * (d_y - ops.sum(y * d_y, axis=-1, keepdims=True))


def vjp(function, x, d_y):
    """The gradient of `x`, given that of `function(x)`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x, d_y, unconnected_gradients="zero")


def clip_gradient(x, largest):
    @tf.custom_gradient
    def same(x):
        def gradient(d_x):
            return tf.clip_by_value(d_x, -largest, largest)

        return tf.identity(x), gradient

    return same(x)


def run_loop(function, cell, sequences, states, **options):
    return function(cell, sequences, states, **options)


def custom_gradient(forward, backward, inputs, constants):
    @tf.custom_gradient
    def function(inputs):
        outputs, residuals = forward(inputs, constants)

        def gradient(*gradients):
            gradients = tf.nest.pack_sequence_as(outputs, gradients)
            found = backward(residuals, gradients)
            return _first_order_only(*tf.nest.flatten(found))

        return outputs, gradient

    return function(inputs)


@tf.custom_gradient
def _first_order_only(*gradients):
    return gradients, raise_no_second_derivatives


def with_vjp(function, gradient):
    @tf.custom_gradient
    def differentiable(*tensors):
        output = function(*tensors)
        return output, lambda d_output: gradient(*tensors, d_output)

    return differentiable


def gradients_are_disabled():
    """A graph may be differentiated after it was traced."""
    return False


def check_batch_size(sequences, expected):
    """A graph may receive a batch size other than the one it was traced with.

    The static shape cannot be trusted: a model with a fixed batch size sets it
    regardless of the data.
    """
    if tf.executing_eagerly():
        return sequences
    # Its error shows this name and both shapes, also under XLA, which drops
    # assertions.
    return tf.ensure_shape(
        sequences,
        (expected, *sequences.shape[1:]),
        name=f"stateful_layer_needs_a_batch_size_of_{expected}",
    )


def padding_advice(sequences):
    is_ragged = isinstance(sequences, tf.RaggedTensor)
    # `keras.Input(..., ragged=True)` sets this attribute.
    if not is_ragged and not getattr(sequences, "ragged", False):
        return None
    return (
        "Ragged data is padded with `x.to_tensor()`, before it enters a model, "
        "and its lengths become a mask: `layer(x.to_tensor(), "
        "mask=tf.sequence_mask(x.row_lengths()))`."
    )


def _of_replicas(variable):
    """The variables of the replicas in this process, in order.

    States have no aggregation, so each replica assigns its own variable.
    """
    value = variable.value
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values
    return [value]


def compiled(function, model, with_xla=False):
    return tf.function(function, jit_compile=with_xla)


def num_replicas(variable):
    return len(_of_replicas(variable))


def gather_state(variable):
    return np.concatenate([x.numpy() for x in _of_replicas(variable)])


def scatter_state(variable, array):
    replicas = _of_replicas(variable)
    if len(replicas) == 1:
        common.scatter_state(variable, array)
        return
    for replica, part in zip(replicas, np.split(array, len(replicas))):
        replica.assign(tf.cast(part, replica.dtype))
