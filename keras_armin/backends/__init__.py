"""What each backend does differently: a loop over time.

`scan(step, states, inputs, unroll)` runs `step(states, inputs_t)`, which
returns `(new_states, outputs_t)`, along the first axis of `inputs`. States,
inputs and outputs are flat lists of tensors. It returns the last states and
the outputs stacked along a new first axis.
"""

import keras

if keras.backend.backend() == "jax":
    from keras_armin.backends.jax import check_batch_size
    from keras_armin.backends.jax import scan
elif keras.backend.backend() == "tensorflow":
    from keras_armin.backends.tensorflow import check_batch_size
    from keras_armin.backends.tensorflow import scan
elif keras.backend.backend() == "torch":
    from keras_armin.backends.torch import check_batch_size
    from keras_armin.backends.torch import scan
else:
    raise ImportError(
        "keras_armin runs on the Keras backends tensorflow, jax and torch. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}"
    )

__all__ = ["check_batch_size", "scan"]
