import contextlib
import itertools

import keras
import torch

from keras_armin import keras_private
from keras_armin.backends import common
from keras_armin.backends import torch_ops
from keras_armin.backends.common import raise_no_second_derivatives

# Each process has a single device on this backend.
num_replicas = common.num_replicas
gather_state = common.gather_state
scatter_state = common.scatter_state
ops = torch_ops


def scan(step, states, inputs, unroll=False, reverse=False, custom_vjp=False):
    """A Python loop, with and without `unroll`.

    While exporting with a dynamic length it is an operation of the graph.
    """
    length = inputs[0].shape[0] if torch.compiler.is_exporting() else None
    if isinstance(length, torch.SymInt):
        return _dynamic_length_scan(step, states, inputs, reverse)
    # `unbind` slices all steps at once, with a single autograd node.
    per_step = zip(
        *(x if isinstance(x, list) else torch.unbind(x) for x in inputs)
    )
    steps = list(enumerate(per_step))
    collect = _Buffer if _in_place_is_allowed() else _Stack
    columns, kept = None, [None] * len(steps)
    for time, step_inputs in reversed(steps) if reverse else steps:
        states, outputs, kept[time] = step(states, list(step_inputs))
        if columns is None:
            columns = [collect(len(steps), output) for output in outputs]
        for column, output in zip(columns, outputs):
            column.put(time, output)
    return (
        states,
        [column.all() for column in columns],
        [list(column) for column in zip(*kept)],
    )


def _dynamic_length_scan(step, states, inputs, reverse):
    def body(states, inputs):
        new_states, outputs, _ = step(states, inputs)
        return _without_aliases(new_states, outputs, [*states, *inputs])

    # Not public yet, but the only loop that torch.export supports. Its gradient
    # fails for integers, so no input may require one.
    states, outputs = torch._higher_order_ops.scan(
        body,
        [x.detach().clone() for x in states],
        [x.detach() for x in inputs],
        reverse=reverse,
    )
    return states, outputs, []


def _without_aliases(states, outputs, known):
    """An exported loop may not return a tensor twice, nor one of its inputs.

    Vectors may be views of each other and are copied. The memory is large,
    and the write of a row has made it a new tensor already.
    """
    known = {id(x) for x in known}

    def copy_if_alias(x):
        x = x.clone() if x.dim() < 3 or id(x) in known else x
        known.add(id(x))
        return x

    return (
        [copy_if_alias(x) for x in states],
        [copy_if_alias(x) for x in outputs],
    )


class _Stack:
    """Outputs that autograd tracks."""

    def __init__(self, length, sample):
        self.outputs = [None] * length

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return torch.stack(self.outputs)


class _Buffer:
    """Outputs that autograd does not track: copied while they are cached."""

    def __init__(self, length, sample):
        self.outputs = sample.new_empty((length, *sample.shape))

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return self.outputs


def constant(x):
    """An exported loop captures only tensors that the export has traced."""
    return x.detach() if torch.compiler.is_exporting() else x


def arange(n):
    return ops.arange(0, n, dtype="int32")


def floor_divide(x, y):
    return torch.floor_divide(x, y)


def integers(values, like):
    if torch.compiler.is_exporting():
        # An exported loop cannot capture a constant tensor.
        full = [like.new_full((1,), v, dtype=torch.int32) for v in values]
        return torch.cat(full)
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def argmax_slot(scores):
    return torch.argmax(scores, dim=-1).to(torch.int32)


def writable_copy(x):
    """A copy that may be changed in place, where that is allowed."""
    if not _in_place_is_allowed():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def gather_rows(memory, slot):
    rows, index = _rows(memory, slot)
    return rows.index_select(0, index)


def scatter_rows(memory, slot, value, in_place=False, after=None):
    rows, index = _rows(memory, slot)
    put = (
        torch.Tensor.index_copy_
        if _may_work_in_place(in_place)
        else torch.index_copy
    )
    return put(rows, 0, index, value).view(memory.shape)


def scatter_then_add_rows(memory, put, value, add, term):
    """In place: `memory` has to come from `writable_copy`."""
    rows, index = _rows(memory, put)
    memory = rows.index_copy_(0, index, value).view(memory.shape)
    rows, index = _rows(memory, add)
    return rows.index_add_(0, index, term).view(memory.shape)


def _may_work_in_place(in_place):
    return in_place and _in_place_is_allowed()


def _in_place_is_allowed():
    """Neither autograd nor an exported graph supports it."""
    return not (torch.is_grad_enabled() or torch.compiler.is_exporting())


def _rows(memory, slot):
    """The rows of all samples, and the indices of those in `slot`."""
    batch, slots, width = memory.shape
    first = torch.arange(0, batch * slots, slots, device=slot.device)
    return memory.reshape(-1, width), first + slot


def matvec(matrices, vectors):
    return torch.bmm(matrices, vectors.unsqueeze(-1)).squeeze(-1)


def addmm(x, inputs, kernel, in_place=False):
    if _may_work_in_place(in_place):
        return x.addmm_(inputs, kernel)
    if inputs.dim() > 2:
        # `torch.addmm` takes matrices only.
        rows = addmm(
            x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x,
            inputs.reshape(-1, inputs.shape[-1]),
            kernel,
        )
        return rows.view(*inputs.shape[:-1], -1)
    return torch.addmm(x, inputs, kernel)


_IN_PLACE = {
    keras.activations.sigmoid: torch.Tensor.sigmoid_,
    keras.activations.tanh: torch.Tensor.tanh_,
}


def activate(function, x, in_place=False):
    return (
        _IN_PLACE.get(function, function)
        if _may_work_in_place(in_place)
        else function
    )(x)


def sigmoid_gradient(y, d_y):
    return torch.ops.aten.sigmoid_backward(d_y, y)


def tanh_gradient(y, d_y):
    return torch.ops.aten.tanh_backward(d_y, y)


def vjp(function, x, d_y):
    """The gradient of `x`, given that of `function(x)`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y, x, d_y)[0]


def clip_gradient(x, largest):
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return x
    return _Clipped.apply(x, largest)


class _Clipped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, largest):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.largest = inputs[1]

    @staticmethod
    def backward(ctx, d_x):
        return d_x.clamp(-ctx.largest, ctx.largest), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent.view_as(tangent)


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, constants, *inputs):
        # Autograd does not allow in-place changes of views of an input.
        outputs, residuals = forward([x.detach() for x in inputs], constants)
        # Tensors that are kept in any other way are freed late, or never.
        ctx.lengths = [
            len(x) if isinstance(x, list) else None for x in residuals
        ]
        columns = [x if isinstance(x, list) else [x] for x in residuals]
        ctx.save_for_backward(*inputs, *itertools.chain(*columns))
        ctx.inputs, ctx.backward_pass = len(inputs), backward
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs = ctx.saved_tensors[: ctx.inputs]
        saved = iter(ctx.saved_tensors[ctx.inputs :])
        residuals = [
            next(saved) if n is None else list(itertools.islice(saved, n))
            for n in ctx.lengths
        ]
        with torch.no_grad(), disable_autocast(inputs[0]):
            found = ctx.backward_pass(inputs, residuals, gradients)
        if torch.is_grad_enabled():
            given = [d for d in gradients if d is not None]
            found = _FirstOrderOnly.apply(len(found), *found, *inputs, *given)
        return None, None, None, *found


class _FirstOrderOnly(torch.autograd.Function):
    """The first `count` tensors. Differentiating them again is an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise_no_second_derivatives()


def supports_custom_gradient():
    """torch.compile does not support the in-place updates."""
    return not torch.compiler.is_compiling()


def disable_autocast(x):
    """The precision follows the dtype policy of Keras instead."""
    if not torch.is_autocast_enabled(x.device.type):
        # Converters of exported graphs do not support this context.
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def custom_gradient(forward, backward, inputs, constants):
    return _CustomGradient.apply(forward, backward, constants, *inputs)


def with_vjp(function, gradient):
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return function(*tensors)

        @staticmethod
        def backward(ctx, d_output):
            return gradient(*ctx.saved_tensors, d_output)

    def differentiable(*tensors):
        if gradients_are_disabled():
            return function(*tensors)
        return Differentiable.apply(*tensors)

    return differentiable


def gradients_are_disabled():
    return not torch.is_grad_enabled() or torch.compiler.is_exporting()


def padding_advice(sequences):
    if not isinstance(sequences, torch.nn.utils.rnn.PackedSequence):
        return None
    return (
        "It is unpacked with `x, lengths = torch.nn.utils.rnn."
        "pad_packed_sequence(packed, batch_first=True)`, and the lengths "
        "become a mask: `layer(x, mask=torch.arange(x.shape[1]) < "
        "lengths[:, None])`."
    )


class TrainingModeMixin:
    """Lets `train()` and `eval()` set the default of `training`.

    torch modules start in training mode, while calls of a Keras layer default
    to inference. The flag of torch alone is therefore not used: only an
    explicit call of `train()` is. `fit` also calls it, but passes `training`
    itself: after `fit`, even if interrupted, calls default to inference, as
    everywhere in Keras.
    """

    _is_in_training_mode = False

    def train(self, mode=True):
        if not (mode and keras_private.is_called_by_keras()):
            self._is_in_training_mode = bool(mode)
        return super().train(mode)

    def __call__(self, *args, **kwargs):
        if self._is_in_training_mode and _mode_is_open(args, kwargs):
            kwargs["training"] = True
        return super().__call__(*args, **kwargs)


def _mode_is_open(args, kwargs):
    """Whether `training` is neither given nor inherited."""
    return (
        kwargs.get("training") is None
        and keras_private.is_training() is None
        and not torch.compiler.is_exporting()
        # A functional model would store the current mode permanently.
        and not any(
            keras.utils.is_keras_tensor(x)
            for x in keras.tree.flatten([args, kwargs])
        )
    )


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing to check."""
    return sequences
