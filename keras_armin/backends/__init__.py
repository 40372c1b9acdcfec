"""What each backend does differently: loops, gradients, single rows.

- `ops`: `keras.ops`, or on torch the same functions at less cost.
- `scan(step, states, inputs, unroll, reverse, by_hand)` runs
  `step(states, inputs_t)`, which returns `(new_states, outputs_t, kept_t)`,
  along the first axis of `inputs`. All are flat lists of tensors. It returns
  the last states, the outputs stacked along a new first axis, and what is
  kept in whatever form another `scan` takes as its input. `by_hand` says that
  the backend need not differentiate the loop.
- `with_gradient(forward, backward, inputs, constants)` calls
  `forward(inputs, constants)`, which returns the outputs and what the way back
  needs, and gives it the gradient `backward(inputs, residuals,
  output_gradients)`, where None may stand for a gradient of zeros.
  `can_go_back_by_hand()` says whether it can be used now.
- `custom_gradient(function, gradient)`: `function` of tensors, for which
  `gradient(*tensors, d_output)` gives the gradients of all of them, None for
  those that have none. It can be differentiated again.
- `is_never_differentiated()`: whether it is known that nobody will ask for a
  gradient of what is computed now.
- `best_slot(scores)`: the place of the largest along the last axis, the first
  of equals; `count_up(n)`: 0 to n - 1; `quotient(x, y)` of integers that are
  not negative. All int32, and in operations that the converters of exported
  models know.
- `clip_gradient(x, largest)`: `x`, whose gradient is clipped on its way back.
- `constant(x)`: a weight as a loop takes it.
- `without_autocast(x)`: a context in which nothing is cast but by us.
- `activate(function, x, in_place)`: an activation; `check_batch_size`: for
  stateful layers in graphs.
- `how_to_pad(sequences)`: what to do with sequences that are no dense tensor,
  None if they are one. `ModeOfModule`: a base of layers, by which the mode of
  a torch module counts.
- `sigmoid_gradient(y, d_y)`, `tanh_gradient(y, d_y)` and, for any function,
  `pullback(function, x, d_y)`: gradients inside such a `backward`.
- `take_rows`, `put_rows`: row `slot` `(batch,)` of each matrix in
  `(batch, n, r)`. With `in_place` the matrices may be destroyed; they have to
  be what `own` gave. `after` is what has to have been read from them before.
- `put_then_add(memory, put, value, add, term)`: put one row, then add to
  another, maybe the same. `term` is what comes of the row that is replaced.
- `plus_product(x, inputs, kernel)`: `x + inputs kernel`; `matvec`: each matrix
  times its vector; `integers(values, like)`: a constant on the device of
  `like`.
- `gather(variable)`: a carried state as a NumPy array, the samples of all
  devices in order; `scatter(variable, array)` hands each device its own.
  `copies(variable)`: how many variables of its shape make up the whole.
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
best_slot = _backend.best_slot
check_batch_size = _backend.check_batch_size
clip_gradient = _backend.clip_gradient
can_go_back_by_hand = _backend.can_go_back_by_hand
constant = _backend.constant
copies = _backend.copies
custom_gradient = _backend.custom_gradient
count_up = _backend.count_up
gather = _backend.gather
how_to_pad = _backend.how_to_pad
integers = _backend.integers
is_never_differentiated = _backend.is_never_differentiated
matvec = _backend.matvec
ModeOfModule = _backend.ModeOfModule
own = _backend.own
ops = _backend.ops
plus_product = _backend.plus_product
pullback = _backend.pullback
put_rows = _backend.put_rows
quotient = _backend.quotient
put_then_add = _backend.put_then_add
scan = _backend.scan
scatter = _backend.scatter
sigmoid_gradient = _backend.sigmoid_gradient
take_rows = _backend.take_rows
tanh_gradient = _backend.tanh_gradient
with_gradient = _backend.with_gradient
without_autocast = _backend.without_autocast
