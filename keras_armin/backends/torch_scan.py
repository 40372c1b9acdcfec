"""Loops over time: in Python, over compiled steps, or in an exported graph."""

import contextlib
import contextvars
import functools
import itertools

import torch
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map

from keras_armin.backends import common
from keras_armin.backends.torch_ops import in_place_is_allowed


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
    """A Python loop, with and without `unroll`.

    While exporting with a dynamic length it is an operation of the graph.
    """
    first = common.leaves(inputs)[0]
    length = len(first) if isinstance(first, list) else first.shape[0]
    if torch.compiler.is_exporting() and isinstance(length, torch.SymInt):
        return _dynamic_length_scan(step, carry, inputs, reverse)
    times = range(length)[:: -1 if reverse else 1]
    if _steps_are_compiled and in_place_is_allowed():
        return _compiled_scan(step, carry, inputs, times, prepare)
    overwritten = {}
    if _inputs_are_expendable.get():
        overwritten = {k: inputs[v] for k, v in (may_overwrite or {}).items()}
    columns: dict = {}
    rows: dict = {}
    for time, inputs_t in zip(times, _each_step(inputs, times, prepare)):
        if rows:
            inputs_t["rows"] = {name: row[time] for name, row in rows.items()}
        carry, outputs = step(carry, inputs_t)
        if not columns:
            known = {}
            if prepare is None:
                steps = map(id, common.leaves(inputs_t))
                known = dict(zip(steps, common.leaves(inputs)))
            columns = {
                name: _column(
                    name in unstacked,
                    known.get(id(y)),
                    overwritten.get(name),
                    length,
                    y,
                )
                for name, y in outputs.items()
            }
            rows = {
                name: column.rows
                for name, column in columns.items()
                if isinstance(column, _Buffer)
            }
        for name, column in columns.items():
            column.put(time, outputs[name])
    return carry, {name: column.all() for name, column in columns.items()}


# Of one thread: autograd has a thread for each device.
_inputs_are_expendable = contextvars.ContextVar("expendable", default=False)


@contextlib.contextmanager
def expendable_inputs(expendable):
    """Whether loops may store outputs in the memory of their inputs."""
    token = _inputs_are_expendable.set(expendable)
    try:
        yield
    finally:
        _inputs_are_expendable.reset(token)


def _each_step(inputs, times, prepare):
    """The inputs of each step, prepared for some steps at a time."""
    size = len(times) if prepare is None else STEPS_PREPARED_AT_A_TIME
    for first in range(0, len(times), size):
        now = times[first : first + size]
        start, end = min(now), max(now) + 1
        part = common.map_leaves(lambda x, s=slice(start, end): x[s], inputs)
        part = part if prepare is None else prepare(part)
        steps = _steps_of(part)
        for time in now:
            yield steps[time - start]


def _steps_of(sequences):
    """The inputs of each step."""
    if isinstance(sequences, list):
        return sequences
    if isinstance(sequences, dict):
        if not sequences:
            return itertools.repeat({})
        columns = map(_steps_of, sequences.values())
        return [dict(zip(sequences, row)) for row in zip(*columns)]
    # Slices all steps at once, with a single autograd node.
    return torch.unbind(sequences)


# Many, since an operation on few numbers costs as much as one on none; not
# all, since what is prepared takes memory.
STEPS_PREPARED_AT_A_TIME = 10

# --- compiled steps ----------------------------------------------------------

# `torch.compile` would unroll a loop, and take minutes for a few dozen steps.
# It is given a few steps at a time instead, which are compiled once for
# sequences of any length.
STEPS_AT_A_TIME = 10

_steps_are_compiled = False


@contextlib.contextmanager
def compiled_steps(wanted=True):
    global _steps_are_compiled
    before, _steps_are_compiled = _steps_are_compiled, wanted
    try:
        yield
    finally:
        _steps_are_compiled = before


def steps_are_compiled():
    return _steps_are_compiled


def _compiled_scan(step, carry, inputs, times, prepare):
    columns: dict = {}
    for first in range(0, len(times), STEPS_AT_A_TIME):
        now = times[first : first + STEPS_AT_A_TIME]
        piece = slice(min(now), max(now) + 1)
        run = _steps if len(now) < STEPS_AT_A_TIME else _compiled()
        carry, outputs = run(
            step,
            prepare,
            carry,
            common.map_leaves(lambda x, s=piece: x[s], inputs),
            -1 if times.step < 0 else 1,
        )
        if not columns:
            columns = {
                name: x.new_empty((len(times), *x.shape[1:]))
                for name, x in outputs.items()
            }
        for name, column in columns.items():
            column[piece] = outputs[name]
    return carry, columns


def _steps(step, prepare, carry, inputs, direction):
    """Some steps: the carry, and the outputs of all of them."""
    found: list = []
    prepared = inputs if prepare is None else prepare(inputs)
    for inputs_t in _steps_of(prepared)[::direction]:
        carry, outputs = step(carry, inputs_t)
        found.append(outputs)
    return carry, {
        name: torch.stack([y[name] for y in found[::direction]])
        for name in found[0]
    }


@functools.cache
def _compiled():
    # Each layer has steps of its own, forwards and backwards.
    return torch.compile(_steps, recompile_limit=64)


# --- loops -------------------------------------------------------------------


def _column(is_unstacked, sequence, overwritten, length, sample):
    if is_unstacked:
        return _List(length, sample)
    if not in_place_is_allowed():
        return _Stack(length, sample)
    if sequence is not None:
        return _Input(sequence)
    if overwritten is None:
        return _Buffer(sample.new_empty((length, *sample.shape)))
    return _Buffer(overwritten)


def _dynamic_length_scan(step, carry, inputs, reverse):
    def body(carry, inputs_t):
        known = {id(x) for x in tree_leaves((carry, inputs_t))}

        def copy_if_alias(x):
            """A loop may not return a tensor twice, nor one of its inputs.

            Vectors may be views of each other and are copied. The memory is
            large, and the write of a row has made it a new tensor already.
            """
            x = x.clone() if x.dim() < 3 or id(x) in known else x
            known.add(id(x))
            return x

        return tree_map(copy_if_alias, step(carry, inputs_t))

    # Not public yet, but the only loop that torch.export supports. Its gradient
    # fails for integers, so no input may require one.
    return torch._higher_order_ops.scan(
        body,
        tree_map(lambda x: x.detach().clone(), carry),
        tree_map(torch.Tensor.detach, inputs),
        reverse=reverse,
    )


class _Stack:
    """Outputs that autograd tracks."""

    def __init__(self, length, sample):
        self.outputs: list = [None] * length

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return torch.stack(self.outputs)


class _List(_Stack):
    """Outputs that stay separate."""

    def all(self):
        return self.outputs


class _Input:
    """Outputs that are an input, which the steps may have changed in place."""

    def __init__(self, sequence):
        self.sequence = sequence

    def put(self, time, output):
        """Nothing to do."""

    def all(self):
        return self.sequence


class _Buffer:
    """Outputs that autograd does not track.

    They are copied while they are cached, unless the step has stored them in
    their row.
    """

    def __init__(self, outputs):
        self.outputs = outputs
        self.rows = outputs.unbind()

    def put(self, time, output):
        row = self.rows[time]
        if output.data_ptr() != row.data_ptr():
            row.copy_(output)

    def all(self):
        return self.outputs
