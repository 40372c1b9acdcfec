"""Products of float32 matrices by oneDNN, where that is faster.

PyTorch leaves them to MKL, which does not use AVX-512 on processors by AMD. The
oneDNN that PyTorch has for its own LSTM takes less than half the time on Zen 5.
On Zen 4, whose units are half as wide, it is faster in large products only.
"""

import contextlib
import functools
import pathlib
import re
from typing import Any

import torch

# An operation of the code that `torch.compile` generates: `x @ w.T + bias`. It
# has no gradient of its own.
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

# A transposed matrix is copied. Longer ones, which the gradients of kernels
# have, are copied piece by piece: new memory of that size takes longer.
LONGEST = 1024

_gradients_are_allowed = False


ZEN_5 = 26

# Multiplications from which it pays, since a call takes longer than MKL's: on
# Zen 5, and before it.
SMALLEST = 2**20
SMALLEST_BEFORE = 2**23


@functools.cache
def amd_family():
    """Of an AMD processor with AVX-512; 0 for any other."""
    cpu = pathlib.Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not cpu.exists():
        return 0
    text = cpu.read_text()
    family = re.search(r"cpu family\s*: (\d+)", text)
    if family is None or "AuthenticAMD" not in text:
        return 0
    return int(family[1])


def is_wanted(x, y):
    """Whether it is faster on this processor for `(..., k)` times `(k, n)`."""
    family = amd_family()
    if not family:
        return False
    size = x.numel() * y.shape[1]
    if family >= ZEN_5:
        return size >= SMALLEST
    is_transposed = x.dim() == 2 and x.stride(0) == 1
    return size >= SMALLEST_BEFORE and not is_transposed


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
        and y.dim() == 2
        and is_wanted(x, y)
        and x.dtype is torch.float32
        and y.dtype is torch.float32
        and x.device.type == "cpu"
        and _linear is not None
        and (_gradients_are_allowed or not torch.is_grad_enabled())
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def product(x, y):
    """`torch.matmul(x, y)`, by whichever is faster."""
    return affine(x, y) if is_faster(x, y) else torch.matmul(x, y)


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
        return (
            product(d, y.t()) if needs_x else None,
            product(x.t(), d) if needs_y else None,
            d.sum(0) if needs_bias else None,
            d if needs_terms else None,
        )
