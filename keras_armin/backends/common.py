import keras
import numpy as np


def refuse_second_derivatives(*_):
    raise NotImplementedError(
        "The fast way in which `ARMIN` trains has no second derivatives. Use "
        "`ARMIN(..., unroll=True)` or `keras.layers.RNN(ARMINCell(...))`, "
        "which have the same weights and leave gradients to the backend."
    )


def copies(variable):
    return 1


def gather(variable):
    return np.array(keras.ops.convert_to_numpy(variable.value))


def scatter(variable, array):
    variable.assign(keras.ops.cast(array, variable.dtype))


class ModeOfModule:
    """Layers are no modules here: nothing but `training` says the mode."""
