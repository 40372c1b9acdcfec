"""Products of float32 matrices by oneDNN, where that is much faster.

PyTorch leaves them to MKL, which does not use AVX-512 on processors by AMD. The
oneDNN that PyTorch has for its own LSTM takes less than half the time there.
"""

import contextlib
import functools
import pathlib
from typing import Any

import torch

# An operation of the code that `torch.compile` generates: `x @ w.T + bias`. It
# has no gradient of its own.
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

# Multiplications from which it pays: a call takes longer than MKL's.
SMALLEST = 2**20

# A transposed matrix is copied. Longer ones, which the gradients of kernels
# have, are copied piece by piece: new memory of that size takes longer.
LONGEST = 1024

_gradients_are_allowed = False


@functools.cache
def is_wanted():
    cpu = pathlib.Path("/proc/cpuinfo")
    return (
        _linear is not None
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu.exists()
        and "AuthenticAMD" in cpu.read_text()
    )


@contextlib.contextmanager
def gradients_allowed():
    """For code that no transformation of `torch.func` passes through."""
    global _gradients_are_allowed
    before, _gradients_are_allowed = _gradients_are_allowed, True
    try:
        yield
    finally:
        _gradients_are_allowed = before


def is_faster(x, y):
    """Whether `affine(x, y)` serves `(..., k)` times `(k, n)`, and pays."""
    return (
        not torch.compiler.is_compiling()
        and is_wanted()
        and x.dtype is torch.float32
        and y.dtype is torch.float32
        and y.dim() == 2
        and x.numel() * y.shape[1] >= SMALLEST
        and x.device.type == "cpu"
        and (_gradients_are_allowed or not torch.is_grad_enabled())
        and torch.backends.mkldnn.enabled
    )


def affine(x, y, bias=None, term=None):
    """`x y + bias + term`, of `(..., k)`, `(k, n)`, `(n,)` and `(..., n)`."""
    rows = x.reshape(-1, x.shape[-1])
    terms = None if term is None else term.reshape(-1, y.shape[1])
    if torch.is_grad_enabled():
        product = _Affine.apply(rows, y, bias, terms)
    else:
        product = _affine(rows, y, bias, terms)
    return product.view(*x.shape[:-1], y.shape[1])


def _affine(x, y, bias=None, terms=None):
    if terms is not None:
        return _affine(x, y, bias).add_(terms)
    if x.shape[1] > LONGEST and x.t().is_contiguous():
        count = -(-x.shape[1] // LONGEST)
        pieces = zip(x.chunk(count, 1), y.chunk(count))
        total = _affine(*next(pieces), bias)
        for left, right in pieces:
            total.add_(_affine(left, right))
        return total
    columns = y.t()
    if not (y.is_contiguous() or columns.is_contiguous()):
        # Of some columns of a matrix it takes a thousand times as long.
        columns = columns.contiguous()
    return _linear(x, columns, bias, "none", [], "")


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, bias, terms):
        ctx.save_for_backward(x, y)
        return _affine(x, y, bias, terms)

    @staticmethod
    @torch.compiler.disable  # or it is compiled where a compiled step calls it
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        needs_x, needs_y, needs_bias, needs_terms = ctx.needs_input_grad
        # Again by oneDNN, and differentiable if second derivatives are wanted.
        return (
            affine(d, y.t()) if needs_x else None,
            affine(x.t(), d) if needs_y else None,
            d.sum(0) if needs_bias else None,
            d if needs_terms else None,
        )
