"""Checks of arguments, each with the argument's name in its message."""

import math
import numbers

import keras
import numpy as np


def _say(name, value, takes):
    return (
        f"Argument `{name}` must be {takes}. "
        f"Received: {name}={value!r} (of type {type(value).__name__})"
    )


def _is_bool(value):
    return isinstance(value, (bool, np.bool_))


def size(name, value):
    """A positive integer; NumPy integers are welcome, bools are not."""
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_say(name, value, "a positive integer"))
    if value <= 0:
        raise ValueError(_say(name, value, "a positive integer"))
    return int(value)


def size_or(name, value, default):
    """As `size`, or the default for `None`."""
    return default if value is None else size(name, value)


def memory_dim(value, units):
    """As `size`; `None` is `units`, and `"half"` is half of them."""
    if isinstance(value, str):
        choice("memory_dim", value, ("half",))
        return -(-units // 2)
    return size_or("memory_dim", value, units)


def _real(name, value, takes):
    if _is_bool(value) or not isinstance(value, numbers.Real):
        raise TypeError(_say(name, value, takes))
    return float(value)


def rate(name, value):
    """A probability that leaves something over: in [0, 1)."""
    takes = "a number in [0, 1)"
    number = _real(name, value, takes)
    if not 0.0 <= number < 1.0:
        raise ValueError(_say(name, value, takes))
    return number


def positive(name, value, takes="a finite number above 0"):
    number = _real(name, value, takes)
    if not (number > 0.0 and math.isfinite(number)):
        raise ValueError(_say(name, value, takes))
    return number


def not_negative(name, value, takes="a finite number, 0 or above"):
    number = _real(name, value, takes)
    if not (number >= 0.0 and math.isfinite(number)):
        raise ValueError(_say(name, value, takes))
    return number


_ANNEALING = {
    "temperature": "TemperatureAnnealing",
    "noise_scale": "NoiseAnnealing",
}


def number_of_cell(name, value, check):
    """What a layer may give a schedule, and a cell may not."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(value, (schedule, dict)):
        raise TypeError(
            f"Argument `{name}` of a cell must be a number: a cell cannot "
            f"count training steps. Received: {name}={value!r}. Give a "
            "schedule to the layer, or use the callback "
            f"`keras_armin.callbacks.{_ANNEALING[name]}`."
        )
    return check(name, value)


def count(name, value):
    """A whole number from 0 on."""
    takes = "a whole number from 0 on"
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_say(name, value, takes))
    if value < 0:
        raise ValueError(_say(name, value, takes))
    return int(value)


def flag(name, value):
    if not _is_bool(value):
        raise TypeError(_say(name, value, "True or False"))
    return bool(value)


def choice(name, value, options):
    if not isinstance(value, str) or value not in options:
        takes = "one of " + ", ".join(repr(option) for option in options)
        raise ValueError(_say(name, value, takes))
    return value


def seed(name, value):
    if value is None:
        return None
    if _is_bool(value) or not isinstance(value, numbers.Integral):
        raise TypeError(_say(name, value, "an integer or None"))
    return int(value)


def real(name, value, layer_name):
    """Numbers of any dtype are cast, but for complex ones."""
    try:
        dtype = keras.backend.standardize_dtype(value.dtype)
    except ValueError:  # what only NumPy has
        dtype = str(value.dtype)
    if dtype.startswith(("float", "bfloat", "int", "uint", "bool")):
        return
    advice = (
        "Text needs a `keras.layers.TextVectorization` and a "
        "`keras.layers.Embedding` before the layer."
    )
    if dtype.startswith("complex"):
        advice = "Real and imaginary parts can be features of their own."
    raise TypeError(
        f"Argument `{name}` of layer '{layer_name}' must hold real numbers. "
        f"Received: {name} of dtype {dtype}. {advice}"
    )


def one_tensor(name, value, layer_name):
    """Not several; `value` may also be their shapes."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(
            f"Argument `{name}` of layer '{layer_name}' must be one tensor. "
            f"Received: {len(value)} of them. `keras.layers.Concatenate` "
            "joins features; states are given as `initial_state=[...]`."
        )


def shape(name, got, expected, layer_name, meaning):
    """Compare static shapes; `None` in either fits anything."""
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
    name,
    value,
    state_names,
    state_size,
    batch_size,
    layer_name,
    partial=False,
):
    """A list of states with their shapes `(batch, size)`.

    If it may be `partial`, None stands for a state that is not given, and a
    dict from names to those that are will do. It is returned as a list.
    """
    takes = f"a list of {len(state_names)} tensors: {', '.join(state_names)}"
    got = type(value).__name__
    if partial:
        takes += (
            ", with None for what is not given; or a dict with some of these "
            "names as keys"
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
