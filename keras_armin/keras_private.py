"""Everything this package uses of Keras that is not public, in one place.

tests/test_keras_private.py fails when one of these changes its behaviour, and
tests/test_distribution.py for `clip_sum_of_replicas`.
"""

import contextlib
import functools
import sys

import keras
from keras.src.backend import get_keras_mask as attached_mask
from keras.src.backend.common import dtypes
from keras.src.backend.common import global_state
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

__all__ = [
    "DropoutRNNCell",
    "all_layers",
    "attached_mask",
    "clip_sum_of_replicas",
    "in_own_precision",
    "is_asked_by_keras",
    "is_training",
    "run_through_graph",
]


def is_training():
    """The `training` value of the layer call under way, None if not known.

    `keras.layers.RNN` prepares a cell before its loop without saying whether
    it trains.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value("training")


def is_asked_by_keras():
    """Whether it is Keras that calls `train()` or `eval()` of a torch module.

    `fit` does on PyTorch. A module hands the call on to those inside it, so
    the one who asks comes after all functions of these names.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("train", "eval"):
        frame = frame.f_back
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith("keras.src.")


def all_layers(model):
    """A model's layers at any depth, cells included, each once."""
    return model._flatten_layers(include_self=True, recursive=True)


def run_through_graph(model, inputs, call):
    """Call a functional model's layers anew, each as `call(layer, *args)`.

    `keras.models.clone_model` does the same, but cannot give the copy inputs
    that the original has not.
    """
    return model._run_through_graph(
        inputs, operation_fn=lambda layer: layer, call_fn=call
    )


def clip_sum_of_replicas(optimizer):
    """Under `tf.distribute`, let an optimizer clip what one device would clip.

    It clips the gradients of each replica and adds them up afterwards, which
    bounds something else. Now it adds them up first.
    """
    clip, add = optimizer._clip_gradients, optimizer._all_reduce_sum_gradients

    def clip_sum(gradients):
        pairs = add([(gradient, None) for gradient in gradients])
        return clip([gradient for gradient, _ in pairs])

    optimizer._clip_gradients = clip_sum
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs


def in_own_precision(method):
    """Let a method of a float64 layer really compute in float64.

    Also a function whose first argument is a layer, or a tensor.

    On JAX and torch most of `keras.ops` turn float64 into float32 without a
    word. Other dtypes, and float64 on a JAX without `JAX_ENABLE_X64`, which
    has none, are left alone.
    """

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        dtype = getattr(self, "compute_dtype", None) or self.dtype
        if keras.backend.standardize_dtype(dtype) != "float64":
            return method(self, *args, **kwargs)
        with _keeping_float64():
            return method(self, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _keeping_float64():
    narrowed = dtypes.BIT64_TO_BIT32_DTYPE
    before = narrowed["float64"]
    available = keras.ops.zeros((), dtype="float64").dtype
    narrowed["float64"] = keras.backend.standardize_dtype(available)
    try:
        yield
    finally:
        narrowed["float64"] = before
