"""All uses of private Keras API, in one place.

tests/package/test_keras_private.py fails if one of them changes its behaviour,
and tests/package/test_distribution.py for `clip_sum_of_replicas`.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Concatenate
from typing import ParamSpec
from typing import TypeVar

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
    "preserve_float64",
    "is_called_by_keras",
    "is_training",
    "run_through_graph",
    "set_initial_epoch",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[Any, _Arguments], _Result]


def is_training() -> bool | None:
    """The `training` value of the current layer call, None if unknown.

    `keras.layers.RNN` prepares a cell before its loop without passing it on.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value("training")


def is_called_by_keras() -> bool:
    """Whether Keras is the caller of `train()` or `eval()` of a torch module.

    `fit` calls them on PyTorch. Modules forward the call to their children, so
    the caller is the first frame that is not a function of these names.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("train", "eval"):
        frame = frame.f_back
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith("keras.src.")


def all_layers(model: keras.Model) -> list:
    """The layers of a model at any depth, including cells, each once."""
    return model._flatten_layers(include_self=True, recursive=True)


def run_through_graph(model: keras.Model, inputs: list, call: Callable) -> list:
    """Replay a functional model, calling each layer as `call(layer, *args)`.

    `keras.models.clone_model` does the same, but cannot add inputs that the
    original does not have.
    """
    return model._run_through_graph(
        inputs, operation_fn=lambda layer: layer, call_fn=call
    )


def clip_sum_of_replicas(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer clip the summed gradient under `tf.distribute`.

    By default it clips the gradients of each replica before it sums them,
    which differs from training on a single device.
    """
    clip, add = optimizer._clip_gradients, optimizer._all_reduce_sum_gradients

    def clip_sum(gradients: list) -> list:
        pairs = add([(gradient, None) for gradient in gradients])
        return clip([gradient for gradient, _ in pairs])

    optimizer._clip_gradients = clip_sum
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the first epoch of a `fit` whose callbacks have not run yet.

    With None the argument of `fit` applies.
    """
    model._initial_epoch = epoch


def preserve_float64(
    method: _Method[_Arguments, _Result],
) -> _Method[_Arguments, _Result]:
    """Decorate a method of a float64 layer so that it computes in float64.

    Also for functions whose first argument is a layer or a tensor.

    On JAX and torch most of `keras.ops` silently cast float64 to float32.
    Other dtypes are not affected, nor is float64 on JAX without
    `JAX_ENABLE_X64`.
    """

    @functools.wraps(method)
    def wrapper(
        self: Any, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        dtype = getattr(self, "compute_dtype", None) or self.dtype
        if keras.backend.standardize_dtype(dtype) != "float64":
            return method(self, *args, **kwargs)
        with _keeping_float64():
            return method(self, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _keeping_float64() -> Iterator[None]:
    narrowed = dtypes.BIT64_TO_BIT32_DTYPE
    before = narrowed["float64"]
    available = keras.ops.zeros((), dtype="float64").dtype
    narrowed["float64"] = keras.backend.standardize_dtype(available)
    try:
        yield
    finally:
        narrowed["float64"] = before
