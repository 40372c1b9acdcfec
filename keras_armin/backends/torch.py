import keras
import torch

from keras_armin.backends import torch_ops as ops

__all__ = [
    "activate",
    "add_to_rows",
    "check_batch_size",
    "matvec",
    "own",
    "ops",
    "plus_product",
    "pullback",
    "put_rows",
    "scan",
    "sigmoid_gradient",
    "take_rows",
    "tanh_gradient",
    "with_gradient",
]


def scan(step, states, inputs, unroll=False, reverse=False):
    """A Python loop: `unroll` makes no difference."""
    # unbind makes all the slices at once, with a single node for autograd.
    steps = list(enumerate(zip(*(torch.unbind(x) for x in inputs))))
    followed = torch.is_grad_enabled()
    columns = None
    for time, step_inputs in reversed(steps) if reverse else steps:
        states, outputs = step(states, list(step_inputs))
        if columns is None:
            columns = [
                _Stack(len(steps)) if followed else _buffer(inputs, time, y)
                for y in outputs
            ]
        for column, output in zip(columns, outputs):
            column.put(time, output)
    return states, [column.all() for column in columns]


class _Stack:
    """Outputs that autograd follows."""

    def __init__(self, length):
        self.outputs = [None] * length

    def put(self, time, output):
        self.outputs[time] = output

    def all(self):
        return torch.stack(self.outputs)


class _Buffer:
    """Outputs that nothing follows: stored while the cache has them."""

    def __init__(self, buffer):
        self.buffer = buffer

    def put(self, time, output):
        self.buffer[time] = output

    def all(self):
        return self.buffer


class _Stored(_Buffer):
    """Outputs that a step left in the place of an input of its own."""

    def put(self, time, output):
        pass


def _buffer(inputs, time, output):
    length = len(inputs[0])
    storage = output.untyped_storage().data_ptr()
    for x in inputs:
        if x.untyped_storage().data_ptr() == storage:
            start = output.storage_offset() - time * x.stride(0)
            return _Stored(
                x.as_strided(
                    (length, *output.shape),
                    (x.stride(0), *output.stride()),
                    start,
                )
            )
    return _Buffer(output.new_empty((length, *output.shape)))


def own(x):
    """A copy that may be changed in place, unless autograd looks on."""
    return x if torch.is_grad_enabled() else x.clone()


def take_rows(memory, slot):
    rows, index = _rows(memory, slot)
    return rows.index_select(0, index)


def put_rows(memory, slot, value, in_place=False):
    rows, index = _rows(memory, slot)
    put = torch.Tensor.index_copy_ if _may(in_place) else torch.index_copy
    return put(rows, 0, index, value).view(memory.shape)


def add_to_rows(memory, slot, value, in_place=False):
    rows, index = _rows(memory, slot)
    add = torch.Tensor.index_add_ if _may(in_place) else torch.index_add
    return add(rows, 0, index, value).view(memory.shape)


def _may(in_place):
    return in_place and not torch.is_grad_enabled()


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
    return torch.autograd.grad(y, x, d_y)[0]


class _HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, constants, *inputs):
        # Autograd forbids to change a view of an input, even one that is ours.
        inputs = [x.detach() for x in inputs]
        outputs, residuals = forward(inputs, constants)
        ctx.sizes = [len(inputs), len(residuals)]
        ctx.names = list(constants)
        # An output kept in any other way would never be freed.
        ctx.save_for_backward(*inputs, *residuals, *constants.values())
        ctx.way_back = backward
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        saved = ctx.saved_tensors
        inputs, residuals = ctx.sizes
        found = ctx.way_back(
            saved[:inputs],
            dict(zip(ctx.names, saved[inputs + residuals :])),
            saved[inputs : inputs + residuals],
            gradients,
        )
        return None, None, None, *found


def with_gradient(forward, backward, inputs, constants):
    return _HandWritten.apply(forward, backward, constants, *inputs)


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing is left to check."""
    return sequences
