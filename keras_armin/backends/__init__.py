"""The operations that differ between the Keras backends.

Loops and gradients:

- `ops`: `keras.ops`, or on torch the same functions without their overhead.
- `scan(step, carry, inputs, unroll, reverse, differentiable, unstacked,
  prepare, may_overwrite)` runs
  `step(carry, inputs_t)`, which returns `(new_carry, outputs_t)`, along the
  first axis of `inputs`, and returns the last carry and the stacked outputs.
  `inputs` and outputs are dicts of tensors, which may be nested; the carry is
  a dict or a list of tensors. The outputs named in `unstacked` are returned
  in whatever form another `scan` takes as its inputs. With
  `differentiable=False` the backend prepares no gradient of the loop.
  `prepare(inputs)` makes the inputs of a step from those given, or of several
  steps at once where that is faster. On torch `inputs_t["rows"]` may have
  tensors, by name, in which to store outputs: they need not be copied then.
  `may_overwrite` is a dict from an output to an input of the same shape, in
  which it may be stored once `prepare` has seen that input.
- `custom_gradient(forward, backward, inputs, constants)` calls
  `forward(inputs, constants)`, which returns outputs and residuals, and
  defines its gradient as `backward(residuals, output_gradients)`,
  where an output gradient of zeros may be None. All are nested dicts of
  tensors. There are no second derivatives.
- `run_loop(function, cell, sequences, states, **options)` calls a function
  that runs such loops, without automatic casts by the backend. `torch.compile`
  does not trace it, but compiles its steps.
- `with_vjp(function, gradient)` returns `function`, whose gradients are
  `gradient(*tensors, d_output)`: one for each tensor, or None. It can be
  differentiated again.
- `vjp(function, x, d_y)`: the gradient of `x`, given that of `function(x)`;
  `sigmoid_gradient(y, d_y)`, `tanh_gradient(y, d_y)` and
  `softmax_gradient(y, d_y)` compute it from the value of the activation.
- `clip_gradient(x, largest)`: returns `x` and clips its gradient.
- `gradients_are_disabled()`: True if no gradient can be taken of what is
  computed now.
- `constant(x)`: a weight in the form that a loop can capture; `dense(x)`: a
  part of a weight in the form that products in a loop take fastest.

Memory rows, of `slot` `(batch,)` in `(batch, n, r)`:

- `gather_rows` and `scatter_rows`. With `in_place` the memory may be
  overwritten; it has to come from `writable_copy`. `after` is a tensor that
  was read from the memory and has to be computed before the write.
- `scatter_then_add_rows(memory, put, value, add, term)`: replace row `put`,
  then add to row `add`, which may be the same. `term` depends on the row that
  is replaced. A `value` of None is zeros.

Other operations, of which those on integers use only what the converters of
exported models support:

- `argmax_slot(scores)`: index of the largest score along the last axis, the
  first of equals (int32; int64 on torch, which would have to convert it);
  `arange(n)`: int32; `floor_divide(x, y)` of non-negative int32;
  `integers(values, like)`: an int32 constant on the device of `like`.
- `addmm(x, inputs, kernel)`: `x + inputs kernel`; `addcmul(x, factor, term)`:
  `x + factor * term`; `matvec`: batched product of matrices and vectors;
  `activate(function, x, in_place)`; `rejoin(whole, blocks, in_place)`: the
  concatenation of `blocks`, which is `whole` if they were computed in place.
- `concatenate(tensors, out)`, along the last axis, `multiply(x, y, out)` and
  `log_of_one_plus(x, out)`: on torch stored in `out`.
- `gate(function, x, term, in_place)`: `function(x) * term`.
- `update_ranks(ranks, slot)`: see `memory_ops.update_ranks`;
  `is_float16(dtype)`, of a tensor's dtype.
- `compiled(function, model, with_xla)`: a function of tensors, without
  gradients, that uses the current weights of `model`. JAX always compiles with
  XLA, torch not at all: there `compiled_step(function, model)` is for the body
  of a loop.

Layers:

- `TrainingModeMixin`: lets `train()` and `eval()` of a torch module set the
  default of `training`.
- `check_batch_size`: for stateful layers in graphs; `padding_advice`: how to
  pad ragged or packed sequences, None if they are dense.
- `gather_state(variable)`: a carried state as a NumPy array, with the samples
  of all devices in order. `scatter_state(variable, array)` distributes them.
  `num_replicas(variable)`: how many variables of this shape hold the state.
- `generator_state()`: that of the random numbers that `keras.random` draws
  without a seed, as a NumPy array, if it is not a variable of the model;
  None if there is none. `set_generator_state(array)` restores it.
"""

import importlib

import keras

if keras.backend.backend() not in ("jax", "tensorflow", "torch"):
    raise ImportError(
        "keras_armin runs on the Keras backends tensorflow, jax and torch. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}"
    )

_backend = importlib.import_module(f"{__name__}.{keras.backend.backend()}")

activate = _backend.activate
argmax_slot = _backend.argmax_slot
check_batch_size = _backend.check_batch_size
clip_gradient = _backend.clip_gradient
compiled = _backend.compiled
compiled_step = _backend.compiled_step
run_loop = _backend.run_loop
constant = _backend.constant
concatenate = _backend.concatenate
dense = _backend.dense
gate = _backend.gate
log_of_one_plus = _backend.log_of_one_plus
multiply = _backend.multiply
num_replicas = _backend.num_replicas
with_vjp = _backend.with_vjp
arange = _backend.arange
gather_state = _backend.gather_state
generator_state = _backend.generator_state
padding_advice = _backend.padding_advice
integers = _backend.integers
gradients_are_disabled = _backend.gradients_are_disabled
matvec = _backend.matvec
TrainingModeMixin = _backend.TrainingModeMixin
writable_copy = _backend.writable_copy
ops = _backend.ops
addcmul = _backend.addcmul
is_float16 = _backend.is_float16
addmm = _backend.addmm
rejoin = _backend.rejoin
softmax_gradient = _backend.softmax_gradient
update_ranks = _backend.update_ranks
vjp = _backend.vjp
scatter_rows = _backend.scatter_rows
floor_divide = _backend.floor_divide
scatter_then_add_rows = _backend.scatter_then_add_rows
scan = _backend.scan
scatter_state = _backend.scatter_state
set_generator_state = _backend.set_generator_state
sigmoid_gradient = _backend.sigmoid_gradient
gather_rows = _backend.gather_rows
tanh_gradient = _backend.tanh_gradient
custom_gradient = _backend.custom_gradient
