"""Distributed training: what `tf.distribute` does differently."""

import keras

from keras_armin import keras_private


def clip_summed_gradients(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Let an optimizer clip the sum of the gradients under `tf.distribute`.

    By default Keras clips the gradients of each replica before it sums them,
    so that `clipnorm`, `clipvalue` and `global_clipnorm` have another effect
    than on a single device. Afterwards they have the same. On JAX and torch
    the sum is what is clipped anyway, and nothing is changed.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, before or after
            `model.compile`, but before training.

    Returns:
        The same optimizer.

    Example:

    >>> optimizer = keras_armin.distribution.clip_summed_gradients(
    ...     keras.optimizers.Adam(1e-3, global_clipnorm=1.0))
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "Argument `optimizer` must be a `keras.optimizers.Optimizer`. "
            f"Received: {optimizer!r} (of type {type(optimizer).__name__})"
        )
    if keras.backend.backend() == "tensorflow":
        # With float16 the one that clips is inside another.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        keras_private.clip_sum_of_replicas(inner)
    return optimizer
