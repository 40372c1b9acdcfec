import torch

from keras_armin.backends import torch_ops as ops

__all__ = [
    "add_to_rows",
    "check_batch_size",
    "matvec",
    "ops",
    "pullback",
    "put_rows",
    "scan",
    "take_rows",
    "with_gradient",
]


def scan(step, states, inputs, unroll=False, reverse=False):
    """A Python loop: `unroll` makes no difference."""
    per_step = []
    # unbind makes all the slices at once, with a single node for autograd.
    steps = list(zip(*(torch.unbind(x) for x in inputs)))
    for step_inputs in reversed(steps) if reverse else steps:
        states, outputs = step(states, list(step_inputs))
        per_step.append(outputs)
    if reverse:
        per_step.reverse()
    return states, [torch.stack(column) for column in zip(*per_step)]


def take_rows(memory, slot):
    index = _row_index(memory, slot)
    return torch.gather(memory, 1, index).squeeze(1)


def put_rows(memory, slot, value):
    index = _row_index(memory, slot)
    return torch.scatter(memory, 1, index, value.unsqueeze(1))


def add_to_rows(memory, slot, value):
    index = _row_index(memory, slot)
    return torch.scatter_add(memory, 1, index, value.unsqueeze(1))


def _row_index(memory, slot):
    return slot.long().view(-1, 1, 1).expand(-1, 1, memory.shape[2])


def matvec(matrices, vectors):
    return torch.bmm(matrices, vectors.unsqueeze(-1)).squeeze(-1)


def pullback(function, inputs, output_gradients):
    """Gradients of `function(*inputs)`, a list of tensors, at `inputs`."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*inputs)
    return torch.autograd.grad(outputs, inputs, output_gradients)


class _HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, constants, *inputs):
        outputs, residuals = forward(inputs, constants)
        ctx.save_for_backward(*inputs)
        ctx.backward, ctx.constants, ctx.residuals = (
            backward,
            constants,
            residuals,
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        found = ctx.backward(
            ctx.saved_tensors, ctx.constants, ctx.residuals, gradients
        )
        return None, None, None, *found


def with_gradient(forward, backward, inputs, constants):
    return _HandWritten.apply(forward, backward, constants, *inputs)


def check_batch_size(sequences, expected):
    """Shapes are static on this backend: nothing is left to check."""
    return sequences
