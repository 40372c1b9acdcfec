import tensorflow as tf


def scan(step, states, inputs, unroll=False):
    if unroll or tf.executing_eagerly():
        return _python_loop(step, list(states), inputs)
    return _graph_loop(step, list(states), inputs)


def _python_loop(step, states, inputs):
    per_step = []
    for step_inputs in zip(*(tf.unstack(x) for x in inputs)):
        states, outputs = step(states, list(step_inputs))
        per_step.append(outputs)
    return states, [tf.stack(column) for column in zip(*per_step)]


def _graph_loop(step, states, inputs):
    length = inputs[0].shape[0]
    if length is None:
        length = tf.shape(inputs[0])[0]
    sources = [
        tf.TensorArray(x.dtype, size=length, element_shape=x.shape[1:]).unstack(
            x
        )
        for x in inputs
    ]
    # Only tells the outputs' dtypes and shapes; unused, so it is pruned.
    _, sample = step(states, [x[0] for x in inputs])
    sinks = [
        tf.TensorArray(y.dtype, size=length, element_shape=y.shape)
        for y in sample
    ]
    shapes = [s.shape for s in states]

    def body(time, states, sinks):
        new_states, outputs = step(
            list(states), [source.read(time) for source in sources]
        )
        for new_state, shape in zip(new_states, shapes):
            new_state.set_shape(shape)
        sinks = [sink.write(time, y) for sink, y in zip(sinks, outputs)]
        return time + 1, list(new_states), sinks

    # XLA differentiates only a loop whose number of rounds it knows.
    _, states, sinks = tf.while_loop(
        lambda time, *_: time < length,
        body,
        (tf.constant(0), states, sinks),
        maximum_iterations=length,
    )
    return states, [sink.stack() for sink in sinks]


def check_batch_size(sequences, expected):
    """A graph may meet another batch size than the one it was traced with.

    The static shape cannot be trusted here: a model with a fixed batch size
    sets it whatever comes.
    """
    if tf.executing_eagerly():
        return sequences
    # Its error shows this name and both shapes, under XLA too, where an
    # assertion with a message of ours would be dropped.
    return tf.ensure_shape(
        sequences,
        (expected, *sequences.shape[1:]),
        name=f"stateful_layer_needs_a_batch_size_of_{expected}",
    )
