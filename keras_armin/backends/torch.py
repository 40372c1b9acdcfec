import contextlib
import functools
import warnings
from typing import Any
from typing import Self

import keras
import torch
from torch.utils._pytree import tree_flatten
from torch.utils._pytree import tree_unflatten

from keras_armin import keras_private
from keras_armin.backends import common
from keras_armin.backends import torch_onednn
from keras_armin.backends import torch_ops
from keras_armin.backends import torch_scan
from keras_armin.backends.common import raise_no_second_derivatives
from keras_armin.backends.torch_ops import in_place_is_allowed

# Each process has a single device on this backend.
num_replicas = common.num_replicas
gather_state = common.gather_state
scatter_state = common.scatter_state
ops = torch_ops
scan = torch_scan.scan


def run_loop(function, cell, sequences, states, **options):
    """The precision follows the dtype policy of Keras, not autocast."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return _run_compiled(function, cell, sequences, states, **options)
    with _disable_autocast(sequences), torch_onednn.gradients_allowed():
        return function(cell, sequences, states, **options)


@torch.compiler.disable
def _run_compiled(function, cell, sequences, states, **options):
    with (
        _disable_autocast(sequences),
        torch_scan.compiled_steps(),
        torch_onednn.gradients_allowed(),
    ):
        return function(cell, sequences, states, **options)


def constant(x):
    """An exported loop captures only tensors that the export has traced."""
    return x.detach() if torch.compiler.is_exporting() else x


def dense(x):
    return x.contiguous()


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
    slot = torch.argmax(scores, dim=-1)
    return slot.to(torch.int32) if torch.compiler.is_exporting() else slot


def writable_copy(x):
    """A copy that may be changed in place, where that is allowed."""
    if not in_place_is_allowed():
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
    if value is None:
        rows.index_fill_(0, index, 0.0)
    else:
        rows.index_copy_(0, index, value)
    rows.index_add_(0, _rows(memory, add)[1], term)
    return memory


def _may_work_in_place(in_place):
    return in_place and in_place_is_allowed()


def _rows(memory, slot):
    """The rows of all samples, and the indices of those in `slot`."""
    batch, slots, width = memory.shape
    index = _index if in_place_is_allowed() else _index.__wrapped__
    return memory.reshape(-1, width), index(slot, batch, slots)


# A step asks several times for what it reads and for what it writes.
@functools.lru_cache(maxsize=4)
def _index(slot, batch, slots):
    first = _first_rows if in_place_is_allowed() else _first_rows.__wrapped__
    return slot + first(batch, slots, slot.device)


@functools.lru_cache(maxsize=16)
def _first_rows(batch, slots, device):
    """The row of the first slot of each sample. Loops ask for it often."""
    return torch.arange(0, batch * slots, slots, device=device)


def update_ranks(ranks, slot):
    if torch.compiler.is_exporting():
        slots = arange(ranks.shape[-1])
        return common.update_ranks(ranks, slot, slots, ops)
    slot = slot.unsqueeze(-1).long()
    risen = ranks + (ranks < ranks.gather(-1, slot))
    return risen.scatter(-1, slot, 0.0)


def matvec(matrices, vectors):
    # In this order a batch takes a sixth of the time.
    rows = torch.bmm(vectors.unsqueeze(1), matrices.transpose(1, 2))
    return rows.squeeze(1)


def addmm(x, inputs, kernel, in_place=False):
    if torch_onednn.is_faster(inputs, kernel):
        if _may_work_in_place(in_place):
            return x.add_(torch_onednn.affine(inputs, kernel))
        bias, term = (x, None) if x.dim() == 1 else (None, x)
        return torch_onednn.affine(inputs, kernel, bias, term)
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


def addcmul(x, factor, term, in_place=False):
    if _may_work_in_place(in_place):
        return x.addcmul_(factor, term)
    return torch.addcmul(x, factor, term)


def concatenate(tensors, out=None):
    return torch.cat(tensors, dim=-1, out=out)


def multiply(x, y, out=None):
    return torch.mul(x, y, out=out)


def log_of_one_plus(x, out=None):
    if out is None:
        return torch.log(x + 1)
    return torch.add(x, 1, out=out).log_()


def rejoin(whole, blocks, in_place=False):
    if _may_work_in_place(in_place):
        return whole
    return torch.cat(blocks, dim=-1)


_IN_PLACE = {
    keras.activations.sigmoid: torch.Tensor.sigmoid_,
    keras.activations.tanh: torch.Tensor.tanh_,
}


def is_float16(dtype):
    return dtype == torch.float16


def activate(function, x, in_place=False):
    return (
        _IN_PLACE.get(function, function)
        if _may_work_in_place(in_place)
        else function
    )(x)


def gate(function, x, term, in_place=False):
    is_known = function is keras.activations.sigmoid
    if is_known and in_place and not gradients_are_disabled():
        return _SigmoidGate.apply(x, term)
    return function(x) * term


class _SigmoidGate(torch.autograd.Function):
    """`sigmoid(x) * term`, with half of the large tensors autograd needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, term):
        return torch.sigmoid(x).mul_(term)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, d):
        x, term = ctx.saved_tensors
        if torch.is_grad_enabled() or _graph_is_kept():
            y = torch.sigmoid(x)
            return sigmoid_gradient(y, d * term), d * y
        y = x.detach().sigmoid_()
        # Laid out as the inputs are, whatever the layout of `d`.
        d_term = torch.mul(d, y, out=torch.empty_like(y))
        d_y = torch.mul(d, term, out=torch.empty_like(y))
        return _sigmoid_gradient_(y, d_y), d_term

    @staticmethod
    def jvp(ctx, d_x, d_term):
        x, term = ctx.saved_tensors
        y = torch.sigmoid(x)
        return y * (1 - y) * d_x * term + y * d_term


def sigmoid_gradient(y, d_y):
    return torch.ops.aten.sigmoid_backward(d_y, y)


def _sigmoid_gradient_(y, d_y):
    """In place."""
    return torch.ops.aten.sigmoid_backward.grad_input(d_y, y, grad_input=d_y)


def tanh_gradient(y, d_y):
    return torch.ops.aten.tanh_backward(d_y, y)


def softmax_gradient(y, d_y):
    return torch._softmax_backward_data(d_y, y, -1, y.dtype)


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
    def forward(ctx, forward, backward, constants, specs, witness, *inputs):
        # Autograd does not allow in-place changes of views of an input.
        detached = tree_unflatten([x.detach() for x in inputs], specs["inputs"])
        outputs, residuals = forward(detached, constants)
        outputs, specs["outputs"] = tree_flatten(outputs)
        residuals, specs["residuals"] = tree_flatten(residuals)
        # Tensors that are kept in any other way are freed late, or never.
        ctx.save_for_backward(witness, *residuals)
        ctx.specs, ctx.backward_pass = specs, backward
        ctx.steps_are_compiled = torch_scan.steps_are_compiled()
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # or a compiled step traces it in each update
    def backward(ctx, *gradients):
        witness, *residuals = ctx.saved_tensors
        with (
            torch.no_grad(),
            _disable_autocast(witness),
            torch_scan.compiled_steps(ctx.steps_are_compiled),
            torch_scan.expendable_inputs(not _graph_is_kept()),
        ):
            found = ctx.backward_pass(
                tree_unflatten(residuals, ctx.specs["residuals"]),
                tree_unflatten(gradients, ctx.specs["outputs"]),
            )
        found = ctx.specs["inputs"].flatten_up_to(found)
        if torch.is_grad_enabled():
            given = [d for d in gradients if d is not None]
            found = _FirstOrderOnly.apply(len(found), *found, witness, *given)
        return None, None, None, None, None, *found


def _graph_is_kept():
    """Whether the backward pass may run again, as with `retain_graph=True`."""
    # Not public; `torch.compile` asks it for the same reason.
    function = "_get_current_graph_task_keep_graph"
    return getattr(torch._C._autograd, function, lambda: True)()


class _FirstOrderOnly(torch.autograd.Function):
    """The first `count` tensors. Differentiating them again is an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise_no_second_derivatives()


def _disable_autocast(x):
    if not torch.is_autocast_enabled(x.device.type):
        # Converters of exported graphs do not support this context.
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def custom_gradient(forward, backward, inputs, constants):
    inputs, spec = tree_flatten(inputs)
    specs = {"inputs": spec}
    # It depends on all inputs and is empty. Second derivatives are detected by
    # it, without keeping the inputs.
    witness = torch.cat([x.reshape(-1)[:0] for x in inputs])
    outputs = _CustomGradient.apply(
        forward, backward, constants, specs, witness, *inputs
    )
    return tree_unflatten(outputs, specs["outputs"])


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


class TrainingModeMixin(torch.nn.Module):
    """Lets `train()` and `eval()` set the default of `training`.

    torch modules start in training mode, while calls of a Keras layer default
    to inference. The flag of torch alone is therefore not used: only an
    explicit call of `train()` is. `fit` also calls it, but passes `training`
    itself: after `fit`, even if interrupted, calls default to inference, as
    everywhere in Keras.
    """

    _is_in_training_mode = False

    def train(self, mode: bool = True) -> Self:
        if not (mode and keras_private.is_called_by_keras()):
            self._is_in_training_mode = bool(mode)
        return super().train(mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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


def compiled(function, model, with_xla=False):
    return torch.no_grad()(function)


def compiled_step(function, model):
    step, found = _Step(function, model), {}

    def run(*tensors):
        shapes = tuple(x.shape for x in tensors)
        if shapes not in found:
            found[shapes] = _compile(step, tensors)
        return found[shapes](*tensors)

    return run


class _Step(torch.nn.Module):
    """A function that uses the weights of `model`, in a form for export."""

    def __init__(self, function, model):
        super().__init__()
        self.function = function
        self.model = model

    def forward(self, *tensors):
        return self.function(*tensors)


def _compile(step, tensors):
    """Its operations alone: `torch.compile` stumbles over what Keras does."""
    graph = torch.export.export(step, tensors).module()
    compiled = torch.compile(graph)
    try:
        compiled(*tensors)
    except Exception as error:
        warnings.warn(
            "`jit_compile=True`: `torch.compile` failed, and the step runs "
            "without it. It needs a C++ compiler, such as g++. It said: "
            f"{error!s:.300}",
            stacklevel=2,
        )
        return graph
    return compiled


def generator_state():
    """`keras.layers.Dropout` without a seed draws from it."""
    return _random_module().get_rng_state().numpy()


def set_generator_state(array):
    _random_module().set_rng_state(torch.from_numpy(array))


def _random_module():
    return torch.cuda if torch.cuda.is_available() else torch
