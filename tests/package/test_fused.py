"""The fused loop of `ARMIN` agrees with the reference loop."""

import contextlib
import functools
import itertools
import re

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_armin import ARMIN
from keras_armin import armin_fused
from keras_armin import trace_memory
from keras_armin.armin_backward import BackwardPass
from keras_armin.memory_ops import count_to_pointer
from keras_armin.memory_ops import ranks_to_order
from keras_armin.memory_rnn import MemoryRNN
from keras_armin.normalization import layer_norm_backward
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import fix_noise
from tests.helpers.common import gradients as gradients_of
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor

EVERYTHING = {
    "memory_dim": DIM,
    "write_inputs": True,
    "content_addressing": True,
    "layer_norm": True,
    "learn_initial_state": True,
    "state_activation": "tanh",
    "noise_scale": 0.6,
    "recency_addressing": True,
    "zoneout": 0.3,
    "dropout": 0.4,
    "recurrent_dropout": 0.4,
}


@contextlib.contextmanager
def reference_loop():
    """`ARMIN` as a loop over `ARMINCell.step`, differentiated as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ARMIN, "_loop", MemoryRNN._loop)
        yield


def random_noise(rng, options, batch, time, features):
    slots, units = options["memory_slots"], options["units"]
    width = units + (options.get("memory_dim") or units)
    noise = {
        "gumbel": rng.gumbel(size=(batch, time, slots)),
        "zoneout": rng.random((batch, time, units)) < 0.4,
    }
    if options.get("dropout"):
        noise["dropout"] = rng.integers(0, 2, (batch, features)) * 2.0
    if options.get("recurrent_dropout"):
        noise["recurrent_dropout"] = rng.integers(0, 2, (batch, width)) * 2.0
    return noise


def random_state(rng, layer, batch):
    """States in mid-sequence: some memories full, some partly filled."""
    sizes = layer.cell.state_size
    states = [rng.normal(size=(batch, size)) for size in sizes[:3]]
    counts = rng.integers(0, layer.memory_slots + 2, batch).astype("int32")
    pointer = count_to_pointer(ops.convert_to_tensor(counts), "float64")
    states = [*map(tensor, states), pointer]
    if layer.recency_addressing:
        ranks = [rng.permutation(layer.memory_slots) for _ in range(batch)]
        states.append(ranks_to_order(tensor(np.array(ranks)), "float64"))
    return states


def results(layer, x, states, mask, compiled=None, training=True):
    """Outputs, and the gradients of weights, inputs and initial states."""
    weights = layer.trainable_variables

    def loss_of(found):
        # Every number with a weight of its own.
        weigh = [np.cos(np.arange(np.prod(y.shape))) for y in found[:4]]
        return sum(
            ops.sum(y * tensor(w.reshape(y.shape)))
            for y, w in zip(found, weigh)
        )

    def run(x, states):
        start = None if states is None else [*states, *integers]
        found = layer(x, initial_state=start, mask=mask, training=training)
        return [ops.cast(y, "float64") for y in found]

    integers = None if states is None else states[3:]
    states = None if states is None else states[:3]
    gradient = {
        "tensorflow": _gradient_tensorflow,
        "jax": _gradient_jax,
        "torch": _gradient_torch,
    }[BACKEND]
    found, gradients = gradient(
        layer, weights, run, loss_of, x, states, compiled
    )
    names = [v.name for v in weights] + ["x", "output", "h", "memory"]
    return [array(y) for y in found], {
        name: None if g is None else array(g)
        for name, g in zip(names, gradients)
    }


def _gradient_tensorflow(layer, weights, run, loss_of, x, states, compiled):
    import tensorflow as tf

    def both(x, *states):
        with tf.GradientTape() as tape:
            tape.watch([x, *states, *(v.value for v in weights)])
            found = run(x, states or None)
            loss = loss_of(found)
        sources = [v.value for v in weights] + [x, *states]
        return found, tape.gradient(loss, sources, unconnected_gradients="zero")

    if compiled:
        both = tf.function(both, jit_compile=compiled == "xla")
    return both(x, *(states or ()))


def _gradient_jax(layer, weights, run, loss_of, x, states, compiled):
    import jax

    def loss(values, x, states):
        mapping = list(zip(weights, values))
        with keras.StatelessScope(state_mapping=mapping):
            found = run(x, states)
        return loss_of(found), found

    function = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    # Op by op each operation would be compiled alone, which takes longer.
    gradients, found = jax.jit(function)([v.value for v in weights], x, states)
    return found, [*gradients[0], gradients[1], *(gradients[2] or ())]


def _gradient_torch(layer, weights, run, loss_of, x, states, compiled):
    import torch

    x, *states = [
        s.detach().clone().requires_grad_() for s in (x, *(states or ()))
    ]
    found = run(x, states or None)
    gradients = torch.autograd.grad(
        loss_of(found),
        [v.value for v in weights] + [x, *states],
        allow_unused=True,
        materialize_grads=True,
    )
    return [y.detach() for y in found], gradients


def compare(
    rng,
    options,
    batch=BATCH,
    time=TIME,
    features=FEATURES,
    masked=False,
    given_state=False,
    compiled=None,
    training=True,
):
    layer = ARMIN(
        dtype="float64", temperature=0.7, return_state=True, **options
    )
    x = tensor(inputs(rng, batch, time, features, "float64"))
    layer.build(tuple(x.shape))
    randomise(layer, rng)
    mask = None
    if masked:
        # One sample has no valid step at all.
        mask = rng.random((batch, time)) < 0.6
        mask[0] = False
        mask = ops.convert_to_tensor(mask)
    states = random_state(rng, layer, batch) if given_state else None
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, random_noise(rng, options, batch, time, features))
        run = functools.partial(
            results, layer, x, states, mask, training=training
        )
        found, gradients = run(compiled=compiled)
        with reference_loop():
            expected, expected_gradients = run()
    for y, z in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-10, atol=1e-10)
    assert len(gradients) == len(layer.trainable_variables) + 1 + (
        3 if given_state else 0
    )
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient,
            expected_gradients[name],
            rtol=1e-10,
            atol=1e-10,
            err_msg=name,
        )
    return gradients


ACTIVATIONS = st.sampled_from([None, "tanh", "softsign"])


@pytest.mark.slow("jax")
@given(
    batch=st.integers(1, 4),
    time=st.integers(1, 6),
    features=st.integers(1, 3),
    masked=st.booleans(),
    given_state=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 10_000),
    options=st.fixed_dictionaries(
        {
            "units": st.integers(1, 4),
            "memory_slots": st.integers(1, 4),
            "memory_dim": st.one_of(st.none(), st.integers(1, 4)),
            "addressing": st.sampled_from(["hard", "relaxed"]),
            "activation": st.sampled_from(["tanh", "softsign"]),
            "recurrent_activation": st.sampled_from(["sigmoid", "softsign"]),
            "state_activation": ACTIVATIONS,
            "output_activation": ACTIVATIONS,
            "write_activation": st.sampled_from([None, "tanh", "sigmoid"]),
            "use_bias": st.booleans(),
            "layer_norm": st.booleans(),
            "write_inputs": st.booleans(),
            "content_addressing": st.booleans(),
            "learn_initial_state": st.booleans(),
            "output_read": st.booleans(),
            "noise_scale": st.sampled_from([0.0, 0.7]),
            "recency_addressing": st.booleans(),
            "zoneout": st.sampled_from([0.0, 0.4]),
            "dropout": st.sampled_from([0.0, 0.5]),
            "recurrent_dropout": st.sampled_from([0.0, 0.5]),
            "return_sequences": st.booleans(),
            "go_backwards": st.booleans(),
            "zero_output_for_mask": st.booleans(),
        }
    ),
)
def test_any_options_agree_with_the_reference_loop(
    batch, time, features, masked, given_state, training, seed, options
):
    rng = np.random.default_rng(seed)
    with real_float64():
        compare(
            rng,
            options,
            batch,
            time,
            features,
            masked,
            given_state,
            training=training,
        )


@contextlib.contextmanager
def real_float64():
    """Fixtures do not mix with hypothesis."""
    if BACKEND != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


COMPILED = {"tensorflow": ["graph", "xla"], "jax": ["jit"], "torch": [None]}


WITH_OPTIONS = {
    "hard": {"addressing": "hard"},
    "hard, everything": {"addressing": "hard", **EVERYTHING},
    "relaxed, everything": {"addressing": "relaxed", **EVERYTHING},
}
MODES = [(False, True), (True, True), (True, False)]  # masked, training


def compiled_cases():
    """With every option masked and training; the rest is slow."""
    for name, mode in itertools.product(WITH_OPTIONS, MODES):
        for compiled in COMPILED[BACKEND]:
            quick = name != "hard" and mode == MODES[1] and compiled != "graph"
            slow = pytest.mark.slow("jax", "tensorflow")
            yield pytest.param(
                WITH_OPTIONS[name],
                *mode,
                compiled,
                id=f"{name}-{mode}-{compiled}",
                marks=[] if quick else slow,
            )


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize(
    "options, masked, training, compiled", compiled_cases()
)
def test_it_agrees_with_the_reference_loop_when_compiled(
    options, masked, training, compiled, rng, float64
):
    options = {
        "units": UNITS,
        "memory_slots": 3,
        "return_sequences": True,
        **options,
    }
    gradients = compare(
        rng,
        options,
        masked=masked,
        given_state=True,
        compiled=compiled,
        training=training,
    )
    # Nothing is compared with nothing.
    for name in ("kernel", "recurrent_kernel", "x", "h", "memory"):
        assert np.abs(gradients[name]).max() > 1e-3, name


def spy(monkeypatch):
    calls = []

    def run_recurrence(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    original = armin_fused.run_recurrence
    monkeypatch.setattr(armin_fused, "run_recurrence", run_recurrence)
    return calls


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_the_layer_picks_the_fast_way(addressing, training, rng, monkeypatch):
    calls = spy(monkeypatch)
    layer = ARMIN(UNITS, SLOTS, addressing=addressing, stateful=True)
    layer(inputs(rng), training=training)
    layer(inputs(rng), training=training, reset=np.array([True, False, True]))

    assert len(calls) == 2


def test_the_layer_falls_back_to_the_reference_loop(rng, monkeypatch):
    calls = spy(monkeypatch)
    x = inputs(rng)
    ARMIN(UNITS, SLOTS, addressing="soft")(x, training=True)
    ARMIN(UNITS, SLOTS, unroll=True)(x, training=True)
    ARMIN(UNITS, SLOTS)(x, reset=np.zeros((BATCH, TIME), bool), training=True)
    ARMIN(UNITS, SLOTS, write_activation="softsign")(x, training=True)
    trace_memory(ARMIN(UNITS, SLOTS), x, training=True)

    assert not calls


@pytest.mark.slow("jax")
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_the_temperature_can_be_trained(addressing, rng, float64):
    """Nothing in the package does, but users may."""
    layer = ARMIN(
        UNITS, 3, addressing=addressing, dtype="float64", return_state=True
    )
    x = tensor(inputs(rng, dtype="float64"))
    layer.build(tuple(x.shape))
    layer.cell.temperature.trainable = True
    randomise(layer.cell, rng)
    layer.cell.temperature.assign(0.7)
    options = {"units": UNITS, "memory_slots": 3}
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, random_noise(rng, options, BATCH, TIME, FEATURES))
        _, gradients = results(layer, x, None, None)
        with reference_loop():
            _, expected = results(layer, x, None, None)

    assert abs(expected["temperature"]) > 1e-3
    np.testing.assert_allclose(
        gradients["temperature"], expected["temperature"], rtol=1e-10
    )


@pytest.mark.slow("jax")
def test_second_derivatives_are_refused_clearly(rng):
    layer = ARMIN(UNITS, SLOTS)
    x = ops.convert_to_tensor(inputs(rng))
    layer.build(tuple(x.shape))

    with pytest.raises(NotImplementedError, match="unroll=True"):
        second_derivative(layer, x)


@pytest.mark.slow("jax")
def test_second_derivatives_are_there_where_the_error_sends_people(rng):
    layer = ARMIN(UNITS, SLOTS, unroll=True)
    x = ops.convert_to_tensor(inputs(rng, time=2))
    layer.build(tuple(x.shape))

    assert np.isfinite(array(second_derivative(layer, x))).all()


def second_derivative(layer, x):
    """Gradient of the squared gradient of the inputs."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 2)
            slope = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(slope, x)
    if BACKEND == "jax":
        import jax

        variables = [
            [v.value for v in layer.trainable_variables],
            [v.value for v in layer.non_trainable_variables],
        ]

        def loss(x):
            y, _ = layer.stateless_call(*variables, x, training=True)
            return (y**2).sum()

        return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)
    import torch

    x = x.clone().requires_grad_()
    loss = (layer(x, training=True) ** 2).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad((slope**2).sum(), x)[0]


@pytest.mark.skipif(
    BACKEND != "torch", reason="only torch runs the backward pass twice"
)
def test_going_back_twice_gives_the_same(rng):
    import torch

    layer = ARMIN(UNITS, 3, return_sequences=True)
    x = torch.tensor(inputs(rng), requires_grad=True)
    loss = (layer(x, training=True) ** 2).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)

    np.testing.assert_array_equal(array(first[0]), array(second[0]))


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    "addressing", ["hard", pytest.param("relaxed", marks=pytest.mark.slow)]
)
def test_no_memory_of_all_steps_is_kept(addressing, rng):
    """What is stored for the backward pass does not grow with the memory."""

    def kept(slots):
        layer = ARMIN(64, slots, 64, addressing, return_sequences=True, seed=1)
        x = ops.convert_to_tensor(inputs(rng, batch=4, time=40))
        layer.build(tuple(x.shape))
        return bytes_for_training(layer, x)

    # 60 more slots of 64 numbers, for 4 samples at each of 40 steps. The
    # memory itself grows, and scores and noise do.
    all_steps = 60 * 64 * 4 * 40 * 4
    assert kept(64) - kept(4) < 0.3 * all_steps
    with reference_loop():
        assert kept(64) - kept(4) > all_steps


def bytes_for_training(layer, x):
    """Temporary memory of a step in bytes, without running clocks or luck."""
    if BACKEND == "jax":
        import jax

        non_trainable = [v.value for v in layer.non_trainable_variables]

        def loss(trainable, x):
            y, _ = layer.stateless_call(
                trainable, non_trainable, x, training=True
            )
            return (y**2).sum()

        trainable = [v.value for v in layer.trainable_variables]
        compiled = jax.jit(jax.grad(loss)).lower(trainable, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes
    if BACKEND == "tensorflow":
        return _largest_tensors_tensorflow(layer, x)
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        y = layer(x, training=True)
    assert y.requires_grad
    return sum(event.self_cpu_memory_usage for event in p.events())


def _largest_tensors_tensorflow(layer, x):
    """Bytes of the tensors that XLA carries through its loops."""
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    text = gradient.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    loops = [line for line in text.splitlines() if " while(" in line]
    assert len(loops) >= 2
    shapes = re.findall(
        r"(?:f32|s32)\[([\d,]+)\]",
        " ".join(line.split(" while(")[0] for line in loops),
    )
    return 4 * sum(
        int(np.prod([int(size) for size in shape.split(",")]))
        for shape in shapes
    )


# --- discrete inference ------------------------------------------------------

ROWS = {"batch": 3, "slots": 11, "width": 13}

# What may have the shape of a whole memory: its place in the loop, and the
# write of one row.
MAY_SPAN = {
    "bitcast",
    "broadcast",
    "constant",
    "dynamic-update-slice",
    "fusion",
    "get-tuple-element",
    "parameter",
    "scatter",
}


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_at_inference_no_operation_spans_the_memory(addressing, masked, rng):
    layer = ARMIN(
        ROWS["width"],
        ROWS["slots"],
        ROWS["width"],
        addressing=addressing,
        layer_norm=True,
        zoneout=0.1,
        return_sequences=True,
    )
    x = ops.convert_to_tensor(inputs(rng, batch=ROWS["batch"]))
    mask = ops.ones((ROWS["batch"], TIME), "bool") if masked else None
    layer.build(tuple(x.shape))

    operations = operations_on_the_memory(layer, x, mask)

    # The start is copied once, because it is changed from then on.
    copies = [name for name in operations if name in ("copy", "aten::clone")]
    assert len(copies) <= 2
    spanning = set(operations) - MAY_SPAN - set(copies)
    assert not spanning


def operations_on_the_memory(layer, x, mask):
    """Names of the operations whose result, or argument, is a memory."""
    if BACKEND == "torch":
        return _operations_torch(layer, x, mask)
    if BACKEND == "jax":
        import jax

        values = [v.value for v in layer.non_trainable_variables]
        trainable = [v.value for v in layer.trainable_variables]

        def run(trainable, x, mask):
            return layer.stateless_call(trainable, values, x, mask=mask)[0]

        text = jax.jit(run).lower(trainable, x, mask).compile().as_text()
    else:
        import tensorflow as tf

        function = tf.function(lambda x: layer(x, mask=mask), jit_compile=True)
        text = function.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    shapes = [
        f"{ROWS['batch']},{ROWS['slots']},{ROWS['width']}",
        f"{ROWS['batch']},{ROWS['slots'] * ROWS['width']}",
    ]
    found = [
        name
        for shape in shapes
        for name in re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", text)
    ]
    assert "while" in text and found
    return found


def _operations_torch(layer, x, mask):
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile

    cpu = [ProfilerActivity.CPU]
    with torch.no_grad(), profile(activities=cpu, record_shapes=True) as p:
        layer(x, mask=mask)
    batch, slots, width = ROWS.values()
    shapes = [[batch, slots, width], [batch * slots, width]]
    names = [
        event.name
        for event in p.events()
        if any(shape in (event.input_shapes or []) for shape in shapes)
    ]
    assert "aten::index_copy_" in names
    # Views cost nothing; these two touch the rows they are told.
    free = {
        "aten::as_strided",
        "aten::reshape",
        "aten::select",
        "aten::view",
        "aten::_reshape_alias",
        "aten::index_select",
        "aten::index_copy_",
        # Inside clone.
        "aten::copy_",
        "aten::empty_like",
    }
    return [name for name in names if name not in free]


def test_at_inference_the_given_state_is_left_alone(rng):
    layer = ARMIN(UNITS, SLOTS, return_state=True)
    x = inputs(rng)
    _, *states = layer(x)
    before = [array(state) for state in states]
    with no_gradients():
        layer(x, initial_state=states)

    for state, expected in zip(states, before):
        np.testing.assert_array_equal(array(state), expected)


def no_gradients():
    """On torch the loop changes its memory in place then."""
    if BACKEND != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


@pytest.mark.slow_after(2, "tensorflow")
@pytest.mark.slow("jax")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("addressing", ["hard", "relaxed"])
def test_half_precision_is_close(addressing, training, rng):
    """Same noise, weights and inputs in float32 and bfloat16."""
    options = {"units": 8, "memory_slots": 3, "addressing": addressing}
    x = inputs(rng)
    outputs = {}
    noise = random_noise(rng, options, BATCH, TIME, FEATURES)
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, noise)
        for dtype in ("float32", "mixed_bfloat16"):
            layer = ARMIN(
                dtype=dtype,
                layer_norm=True,
                content_addressing=True,
                kernel_initializer=keras.initializers.GlorotUniform(seed=1),
                recurrent_initializer=keras.initializers.Orthogonal(seed=2),
                return_sequences=True,
                **options,
            )
            outputs[dtype] = array(
                ops.cast(layer(x, training=training), "float32")
            )

    # One rounding can choose another slot: not all of the numbers.
    off = np.abs(outputs["float32"] - outputs["mixed_bfloat16"])
    assert np.median(off) < 0.01


@pytest.mark.slow("jax")
def test_in_half_precision_a_low_temperature_does_not_overflow(rng):
    """h is not bounded, and divided by 0.001 does not fit into float16."""
    layer = ARMIN(
        UNITS, 3, temperature=1e-3, dtype="mixed_float16", return_sequences=True
    )
    x = inputs(rng)
    layer.build(x.shape)
    states = [array(s) for s in layer.get_initial_state(BATCH)]
    states[1] = states[1] + 100.0
    states = [ops.convert_to_tensor(s.astype("float16")) for s in states]
    found, found_x = gradients_of(layer, x, training=True, initial_state=states)

    assert np.isfinite(found_x).all()
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name


@pytest.mark.slow("jax")
def test_sums_over_all_steps_are_wide_in_half_precision(rng):
    """bfloat16 would soon be too coarse for one more step to matter."""
    layer = ARMIN(
        4, 2, layer_norm=True, content_addressing=True, dtype="mixed_bfloat16"
    )
    layer.build((None, None, FEATURES))
    weights = layer.cell.weight_tensors()
    weights["match_scale"] = ops.ones(())
    sums = BackwardPass(layer.cell, weights, None, training=True).zero_sums()
    x = ops.ones((BATCH, 4), "bfloat16")
    _, *terms = layer_norm_backward(x, [4], ops.ones((4,), "bfloat16"), x)

    assert len(sums) == 7
    for value in (*sums.values(), *terms):
        assert keras.backend.standardize_dtype(value.dtype) == "float32"


def step_function(x):
    return ops.cast(x > 0, x.dtype)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("name", ["activation", "recurrent_activation"])
def test_an_activation_without_a_gradient_is_taken(name, rng):
    layer = ARMIN(UNITS, 3, return_sequences=True, **{name: step_function})
    x = inputs(rng)
    layer.build(x.shape)
    found, _ = gradients_of(layer, x, training=True)

    assert np.abs(found["kernel"]).max() > 0


def test_an_activation_with_weights_uses_the_reference_loop(rng, monkeypatch):
    calls = spy(monkeypatch)
    layer = ARMIN(UNITS, 3, activation=keras.layers.PReLU())
    layer(inputs(rng), training=True)

    assert not calls


@pytest.mark.skipif(BACKEND != "torch", reason="these are ways of torch alone")
class TestTorch:
    def test_a_transposed_gradient_of_the_memory(self, rng):
        import torch

        found = []
        weigh = torch.tensor(rng.normal(size=(BATCH, 3 * UNITS)))
        layer = ARMIN(
            UNITS, 3, UNITS, return_state=True, dtype="float64", seed=1
        )
        x = torch.tensor(inputs(rng, dtype="float64"), requires_grad=True)
        layer.build(tuple(x.shape))
        options = {"units": UNITS, "memory_slots": 3}
        with pytest.MonkeyPatch.context() as patch:
            fix_noise(patch, random_noise(rng, options, BATCH, TIME, FEATURES))
            for turned in (False, True):
                memory = layer(x, training=True)[3]
                loss = (memory * weigh).sum()
                if turned:
                    loss = (memory.t() * weigh.t().contiguous()).sum()
                found.append(array(torch.autograd.grad(loss, x)[0]))

        np.testing.assert_allclose(*found, rtol=1e-12)

    def test_autocast_leaves_the_layer_alone(self, rng):
        import torch

        layer = ARMIN(UNITS, 3)
        x = torch.tensor(inputs(rng))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x, training=True)
            y.sum().backward()

        assert y.dtype == torch.float32
        assert layer.cell.kernel.value.grad is not None

    @pytest.mark.slow
    def test_it_compiles(self, rng):
        import torch

        layer = ARMIN(UNITS, 3)
        x = torch.tensor(inputs(rng, time=2))
        layer.build(tuple(x.shape))
        loss = torch.compile(
            lambda x: layer(x, training=True).sum(), backend="eager"
        )
        loss(x).backward()

        assert layer.cell.kernel.value.grad is not None

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("options", [{}, EVERYTHING])
    @pytest.mark.parametrize(
        "compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
    )
    def test_compiled_steps_agree(self, compiler, options, rng, monkeypatch):
        """Two pieces of three steps are compiled, the last step is not."""
        import torch

        from keras_armin.backends import torch_scan

        # Other tests compile other layers. After eight of them torch leaves
        # the frames of Keras, which all share, as they are.
        torch.compiler.reset()
        steps = torch.compile(
            torch_scan._steps, backend=compiler, fullgraph=True
        )
        monkeypatch.setattr(torch_scan, "STEPS_AT_A_TIME", 3)
        monkeypatch.setattr(
            torch_scan, "_compiled", lambda: calls.append(1) or steps
        )
        calls: list = []
        layer = ARMIN(
            UNITS, 3, **options, dtype="float64", return_sequences=True
        )
        x = torch.tensor(inputs(rng, time=7, dtype="float64"))
        x.requires_grad_()
        layer.build(tuple(x.shape))
        noise = {**options, "units": UNITS, "memory_slots": 3}
        fix_noise(monkeypatch, random_noise(rng, noise, BATCH, 7, FEATURES))
        found = []
        for call in (layer, torch.compile(layer, backend="eager")):
            y = call(x, training=True)
            weights = [v.value for v in layer.trainable_variables]
            found.append([y, *torch.autograd.grad((y**2).sum(), [x, *weights])])

        assert len(calls) == 4
        for own, expected in zip(*found):
            np.testing.assert_allclose(
                array(own), array(expected), rtol=1e-10, atol=1e-12
            )

    def test_the_backward_pass_may_run_again(self, rng):
        """It overwrites what it needs no more, unless the graph is kept."""
        import torch

        layer = ARMIN(UNITS, 3, return_sequences=True)
        loss = (layer(inputs(rng), training=True) ** 2).sum()
        weights = [v.value for v in layer.trainable_variables]
        found = [
            torch.autograd.grad(loss, weights, retain_graph=kept)
            for kept in (True, True, False)
        ]

        for gradients in zip(*found):
            first, *others = map(array, gradients)
            assert np.abs(first).sum() > 0
            for other in others:
                np.testing.assert_array_equal(first, other)

    def test_torch_still_says_whether_the_graph_is_kept(self):
        import torch

        assert hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")

    @pytest.mark.parametrize("in_place", [True, False])
    def test_gradients_of_a_gate(self, in_place, rng):
        import torch

        from keras_armin import backends

        def gated(x, term):
            # A result of which nothing else is needed.
            return backends.gate(
                keras.activations.sigmoid, x + 1, term, in_place
            )

        tensors = [
            torch.tensor(rng.normal(size=(2, 3)), requires_grad=True)
            for _ in range(2)
        ]
        torch.autograd.gradcheck(gated, tensors, check_forward_ad=True)
        torch.autograd.gradgradcheck(gated, tensors)
        expected = torch.sigmoid(tensors[0] + 1) * tensors[1]
        np.testing.assert_allclose(
            array(gated(*tensors).detach()), array(expected.detach())
        )

    def test_nothing_outlives_the_backward_pass(self, rng):
        import torch

        layer = ARMIN(UNITS, 3, return_sequences=True)
        loss = (layer(inputs(rng), training=True) ** 2).sum()
        tape = next(
            node
            for node in walk(loss.grad_fn)
            if "CustomGradient" in type(node).__name__
        )
        assert tape.saved_tensors
        loss.backward()
        with pytest.raises(RuntimeError, match="after they have already been"):
            _ = tape.saved_tensors
        held = [v for v in vars(tape).values() if torch.is_tensor(v)]
        assert not held


def walk(node):
    """All nodes of a graph of torch."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [parent for parent, _ in node.next_functions]
