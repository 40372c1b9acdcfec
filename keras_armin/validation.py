"""Validation of arguments, with their names in the error messages."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_armin.types import Shape


def _message(name: str, value: Any, takes: str) -> str:
    return (
        f"Argument `{name}` must be {takes}. "
        f"Received: {name}={value!r} (of type {type(value).__name__})"
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def size(name: str, value: Any) -> int:
    """A positive integer, NumPy integers included, bools excluded."""
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, "a positive integer"))
    if value <= 0:
        raise ValueError(_message(name, value, "a positive integer"))
    return int(value)


def size_of_at_least(name: str, value: Any, smallest: int) -> int:
    takes = f"an integer of at least {smallest}"
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, takes))
    if value < smallest:
        raise ValueError(_message(name, value, takes))
    return int(value)


def size_or_default(name: str, value: Any, default: int) -> int:
    """A positive integer, or the default for `None`."""
    return default if value is None else size(name, value)


def memory_dim(value: Any, units: int) -> int:
    """A size, `None` for `units`, or `"half"` of them, rounded up."""
    if value is None:
        return units
    if value == "half":
        return -(-units // 2)
    if isinstance(value, str):
        takes = 'a positive integer, None or "half"'
        raise ValueError(_message("memory_dim", value, takes))
    return size("memory_dim", value)


def _real(name: str, value: Any, takes: str) -> float:
    if _is_bool(value) or not isinstance(value, numbers.Real):
        raise TypeError(_message(name, value, takes))
    return float(value)


def rate(name: str, value: Any) -> float:
    """A probability below 1."""
    takes = "a number in [0, 1)"
    number = _real(name, value, takes)
    if not 0.0 <= number < 1.0:
        raise ValueError(_message(name, value, takes))
    return number


def positive(
    name: str, value: Any, takes: str = "a finite number above 0"
) -> float:
    number = _real(name, value, takes)
    if not (number > 0.0 and math.isfinite(number)):
        raise ValueError(_message(name, value, takes))
    return number


def finite(name: str, value: Any) -> float:
    number = _real(name, value, "a finite number")
    if not math.isfinite(number):
        raise ValueError(_message(name, value, "a finite number"))
    return number


def not_negative(
    name: str, value: Any, takes: str = "a finite number of at least 0"
) -> float:
    number = _real(name, value, takes)
    if not (number >= 0.0 and math.isfinite(number)):
        raise ValueError(_message(name, value, takes))
    return number


def between(name: str, value: Any, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    takes = f"a number from {low:g} to {high:g}"
    number = _real(name, value, takes)
    if not low <= number <= high:  # nor is NaN
        raise ValueError(_message(name, value, takes))
    return number


_ANNEALING = {
    "temperature": "TemperatureAnnealing",
    "noise_scale": "NoiseAnnealing",
    "slope": "SlopeAnnealing",
}


def cell_scalar(name: str, value: Any, check: Callable) -> float:
    """A number that is a schedule in a layer only."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(value, (schedule, dict)):
        raise TypeError(
            f"Argument `{name}` of a cell must be a number: a cell cannot "
            f"count training steps. Received: {name}={value!r}. Pass a "
            "schedule to the layer, or use the callback "
            f"`keras_armin.callbacks.{_ANNEALING[name]}`."
        )
    return check(name, value)


def count(name: str, value: Any) -> int:
    """A non-negative integer."""
    takes = "a non-negative integer"
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, takes))
    if value < 0:
        raise ValueError(_message(name, value, takes))
    return int(value)


def flag(name: str, value: Any) -> bool:
    if not _is_bool(value):
        raise TypeError(_message(name, value, "True or False"))
    return bool(value)


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in options:
        takes = "one of " + ", ".join(repr(option) for option in options)
        raise ValueError(_message(name, value, takes))
    return value


def seed(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, "an integer or None"))
    return int(value)


def real(name: str, value: Any, layer_name: str) -> None:
    """Raise unless the dtype can be cast to a real one."""
    try:
        dtype = keras.backend.standardize_dtype(value.dtype)
    except ValueError:  # dtypes of NumPy only
        dtype = str(value.dtype)
    if dtype.startswith(("float", "bfloat", "int", "uint", "bool")):
        return
    advice = (
        "Use `keras.layers.TextVectorization` and `keras.layers.Embedding` "
        "for text."
    )
    if dtype.startswith("complex"):
        advice = "Pass real and imaginary parts as separate features."
    raise TypeError(
        f"Argument `{name}` of layer '{layer_name}' must hold real numbers. "
        f"Received: {name} of dtype {dtype}. {advice}"
    )


def single_tensor(name: str, value: Any, layer_name: str) -> None:
    """Raise for several tensors, or their shapes."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(
            f"Argument `{name}` of layer '{layer_name}' must be one tensor. "
            f"Received: {len(value)} of them. `keras.layers.Concatenate` "
            "joins features; states are passed as `initial_state=[...]`."
        )


def no_indices(name: str, value: Any) -> None:
    """Raise for indices of samples where bools are expected.

    Call it before they become a tensor, whose values may not be known.
    """
    if isinstance(value, (list, tuple, np.ndarray)) and not np.all(
        np.isin(value, (0, 1))
    ):
        raise ValueError(
            f"Argument `{name}` must be bool, True where a sample restarts. "
            f"Received: {np.asarray(value).tolist()}. To restart the first and "
            "the third of four samples pass [True, False, True, False]."
        )


def shape(
    name: str, got: Shape, expected: Shape, layer_name: str, meaning: str
) -> None:
    """Compare static shapes; `None` in either matches any size."""
    fits = len(got) == len(expected) and all(
        g is None or e is None or g == e for g, e in zip(got, expected)
    )
    if not fits:
        raise ValueError(
            f"Argument `{name}` of layer '{layer_name}' must have shape "
            f"{meaning} = {tuple(expected)}. Received: {name} of shape "
            f"{tuple(got)}"
        )


def states(
    name: str,
    value: Any,
    state_names: tuple[str, ...],
    state_size: list[int],
    batch_size: Any,
    layer_name: str,
    partial: bool = False,
) -> list:
    """Check a list of states of the shapes `(batch, size)` and return it.

    If it may be `partial`, states may be None, and a dict of states by name is
    accepted too. It is returned as a list.
    """
    takes = f"a list of {len(state_names)} tensors: {', '.join(state_names)}"
    got = type(value).__name__
    if partial:
        example = "h" if "h" in state_names else state_names[0]
        takes += (
            ", or None where a state is not given; or a dict with some of "
            f"these names as keys, such as {{'{example}': ...}}"
        )
        if isinstance(value, dict):
            got = f"a dict with the keys {list(value)}"
            if set(value) <= set(state_names):
                value = [value.get(state_name) for state_name in state_names]
    is_list = isinstance(value, (list, tuple))
    if not is_list or len(value) != len(state_names):
        raise ValueError(
            f"Argument `{name}` of layer '{layer_name}' must be {takes}. "
            f"Received: {f'{len(value)} of them' if is_list else got}"
        )
    for state_name, state, state_width in zip(state_names, value, state_size):
        if partial and state is None:
            continue
        if not hasattr(state, "shape"):
            raise TypeError(
                f"Argument `{name} ({state_name})` of layer '{layer_name}' "
                f"must be a tensor. Received: {state!r}"
            )
        shape(
            f"{name} ({state_name})",
            state.shape,
            (batch_size, state_width),
            layer_name,
            "(batch, size)",
        )
    return list(value)
