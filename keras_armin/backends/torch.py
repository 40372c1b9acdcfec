import contextlib
import itertools

import keras
import torch

from keras_armin import keras_private
from keras_armin.backends import common
from keras_armin.backends import torch_ops
from keras_armin.backends.common import refuse_second_derivatives

# A process has one device here, and knows of no other.
copies = common.copies
gather = common.gather
scatter = common.scatter
ops = torch_ops


def scan(step, states, inputs, unroll=False, reverse=False, by_hand=False):
    """A Python loop: `unroll` makes no difference.

    Except in an export that leaves the length open, where it is an operation.
    """
    length = inputs[0].shape[0] if torch.compiler.is_exporting() else None
    if isinstance(length, torch.SymInt):
        return _loop_of_any_length(step, states, inputs, reverse)
    # unbind makes all the slices at once, with a single node for autograd.
    per_step = zip(
        *(x if isinstance(x, list) else torch.unbind(x) for x in inputs)
    )
    steps = list(enumerate(per_step))
    collect = _Buffer if _may_change_tensors() else _Stack
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


def _loop_of_any_length(step, states, inputs, reverse):
    def body(states, inputs):
        new_states, outputs, _ = step(states, inputs)
        return _without_aliases(new_states, outputs, [*states, *inputs])

    # Not public yet, and there is no other loop that torch.export takes. Its
    # gradient fails for integers: nothing that goes in may ask for one.
    states, outputs = torch._higher_order_ops.scan(
        body,
        [x.detach().clone() for x in states],
        [x.detach() for x in inputs],
        reverse=reverse,
    )
    return states, outputs, []


def _without_aliases(states, outputs, known):
    """Such a loop may give no tensor back twice, nor one that it was given.

    A vector may be a view of another and is copied. A matrix for each sample
    is what one row was put into: it is a new tensor, and large.
    """
    known = {id(x) for x in known}

    def own(x):
        x = x.clone() if x.dim() < 3 or id(x) in known else x
        known.add(id(x))
        return x

    return [own(x) for x in states], [own(x) for x in outputs]


class _Stack:
    """Outputs that autograd follows."""

    def __init__(self, length, sample):
        self.outputs = [None] * length

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return torch.stack(self.outputs)


class _Buffer:
    """Outputs that nobody follows: put in place while the cache has them."""

    def __init__(self, length, sample):
        self.outputs = sample.new_empty((length, *sample.shape))

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return self.outputs


def constant(x):
    """In an export a loop takes only tensors that the export has seen."""
    return x.detach() if torch.compiler.is_exporting() else x


def count_up(n):
    return ops.arange(0, n, dtype="int32")


def quotient(x, y):
    return torch.floor_divide(x, y)


def integers(values, like):
    if torch.compiler.is_exporting():
        # A loop that is exported cannot hold a constant tensor.
        full = [like.new_full((1,), v, dtype=torch.int32) for v in values]
        return torch.cat(full)
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def best_slot(scores):
    return torch.argmax(scores, dim=-1).to(torch.int32)


def own(x):
    """A copy that may be changed in place, unless somebody looks on."""
    if not _may_change_tensors():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def take_rows(memory, slot):
    rows, index = _rows(memory, slot)
    return rows.index_select(0, index)


def put_rows(memory, slot, value, in_place=False, after=None):
    rows, index = _rows(memory, slot)
    put = torch.Tensor.index_copy_ if _may(in_place) else torch.index_copy
    return put(rows, 0, index, value).view(memory.shape)


def put_then_add(memory, put, value, add, term):
    """Changes `memory`, which has to be ours."""
    rows, index = _rows(memory, put)
    memory = rows.index_copy_(0, index, value).view(memory.shape)
    rows, index = _rows(memory, add)
    return rows.index_add_(0, index, term).view(memory.shape)


def _may(in_place):
    return in_place and _may_change_tensors()


def _may_change_tensors():
    """Neither autograd nor an exported graph allows it."""
    return not (torch.is_grad_enabled() or torch.compiler.is_exporting())


def _rows(memory, slot):
    """All rows of all samples, and which of them are meant."""
    batch, slots, width = memory.shape
    first = torch.arange(0, batch * slots, slots, device=slot.device)
    return memory.reshape(-1, width), first + slot


def matvec(matrices, vectors):
    return torch.bmm(matrices, vectors.unsqueeze(-1)).squeeze(-1)


def plus_product(x, inputs, kernel, in_place=False):
    if _may(in_place):
        return x.addmm_(inputs, kernel)
    if inputs.dim() > 2:
        # addmm takes matrices only.
        rows = plus_product(
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
    return (_IN_PLACE.get(function, function) if _may(in_place) else function)(
        x
    )


def sigmoid_gradient(y, d_y):
    return torch.ops.aten.sigmoid_backward(d_y, y)


def tanh_gradient(y, d_y):
    return torch.ops.aten.tanh_backward(d_y, y)


def pullback(function, x, d_y):
    """The gradient of `x`, from that of `function(x)`."""
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


class _HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, constants, *inputs):
        # Autograd forbids to change a view of an input, even one that is ours.
        outputs, residuals = forward([x.detach() for x in inputs], constants)
        # What is kept in any other way is freed late, or never.
        ctx.lengths = [
            len(x) if isinstance(x, list) else None for x in residuals
        ]
        columns = [x if isinstance(x, list) else [x] for x in residuals]
        ctx.save_for_backward(*inputs, *itertools.chain(*columns))
        ctx.inputs, ctx.way_back = len(inputs), backward
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
        with torch.no_grad(), without_autocast(inputs[0]):
            found = ctx.way_back(inputs, residuals, gradients)
        if torch.is_grad_enabled():
            given = [d for d in gradients if d is not None]
            found = _Once.apply(len(found), *found, *inputs, *given)
        return None, None, None, *found


class _Once(torch.autograd.Function):
    """The first tensors, which depend on all of them but have no gradient."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivatives()


def can_go_back_by_hand():
    """torch.compile does not take tensors that are changed in place."""
    return not torch.compiler.is_compiling()


def without_autocast(x):
    """Keras' dtype policies say what is computed in which precision."""
    if not torch.is_autocast_enabled(x.device.type):
        # No converter of an exported graph knows this context.
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def with_gradient(forward, backward, inputs, constants):
    return _HandWritten.apply(forward, backward, constants, *inputs)


def custom_gradient(function, gradient):
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return function(*tensors)

        @staticmethod
        def backward(ctx, d_output):
            return gradient(*ctx.saved_tensors, d_output)

    def differentiable(*tensors):
        if is_never_differentiated():
            return function(*tensors)
        return Differentiable.apply(*tensors)

    return differentiable


def is_never_differentiated():
    return not torch.is_grad_enabled() or torch.compiler.is_exporting()


def how_to_pad(sequences):
    if not isinstance(sequences, torch.nn.utils.rnn.PackedSequence):
        return None
    return (
        "It is unpacked with `x, lengths = torch.nn.utils.rnn."
        "pad_packed_sequence(packed, batch_first=True)`, and the lengths "
        "become a mask: `layer(x, mask=torch.arange(x.shape[1]) < "
        "lengths[:, None])`."
    )


class ModeOfModule:
    """A layer whose `train()` and `eval()` count, if nobody says `training`.

    torch has all modules in training mode from the start, and every call of a
    Keras layer is inference from the start. So the flag of torch says nothing
    by itself: only that somebody has called `train()` counts. `fit` does so
    too, on the model, and goes by `training` all the same: after it, even if
    it was broken off, a call is inference as in all of Keras.
    """

    _is_in_training_mode = False

    def train(self, mode=True):
        if not (mode and keras_private.is_asked_by_keras()):
            self._is_in_training_mode = bool(mode)
        return super().train(mode)

    def __call__(self, *args, **kwargs):
        if self._is_in_training_mode and _mode_is_open(args, kwargs):
            kwargs["training"] = True
        return super().__call__(*args, **kwargs)


def _mode_is_open(args, kwargs):
    """Whether nobody has said if this call is for training."""
    return (
        kwargs.get("training") is None
        and keras_private.is_training() is None
        and not torch.compiler.is_exporting()
        # A functional model would keep the mode it was made in for good.
        and not any(
            keras.utils.is_keras_tensor(x)
            for x in keras.tree.flatten([args, kwargs])
        )
    )


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing is left to check."""
    return sequences
