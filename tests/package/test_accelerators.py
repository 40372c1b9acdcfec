"""Readiness for GPUs and TPUs, as far as it can be tested without one.

JAX writes the training and inference steps for `tpu` and `cuda` as portable
programs, TensorFlow compiles them with XLA, and on torch the operations of a
step are watched. What is looked for is what such devices do not forgive:
unknown shapes, work on the host, and
products that a mixed precision policy fails to reach. No program is run on
such a device here.
"""

import functools
import re

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin.memory_rnn import MemoryRNN
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import as_layer
from tests.helpers.common import as_rnn
from tests.helpers.common import fix_noise
from tests.helpers.common import inputs
from tests.helpers.common import random_noise

OUTPUTS = 2
OPTIONS = {
    "units": UNITS,
    "memory_slots": SLOTS,
    "layer_norm": True,
    "zoneout": 0.3,
    "dropout": 0.2,
    "seed": 5,
}
FUSED, PLAIN, BARE = "fused", "plain", "RNN(ARMINCell)"
WAYS = (FUSED, PLAIN, BARE)
POLICIES = ("float32", "mixed_bfloat16")
on = {
    name: pytest.mark.skipif(BACKEND != name, reason=f"{name} alone has this")
    for name in ("jax", "tensorflow", "torch")
}


@pytest.fixture
def go(monkeypatch):
    """Makes `ARMIN` take one of the `WAYS`."""

    def go(way):
        if way == PLAIN:
            monkeypatch.setattr(ARMIN, "_loop", MemoryRNN._loop)

    return go


def build(way, policy, time=TIME, stateful=False, **compile_arguments):
    """A compiled model of fixed sizes, its optimiser built too."""
    make = as_rnn if way == BARE else as_layer
    layer = make(
        **OPTIONS, dtype=policy, return_sequences=True, stateful=stateful
    )
    head = keras.layers.Dense(OUTPUTS, dtype=policy)
    model = keras.Sequential(
        [keras.Input(batch_shape=(BATCH, time, FEATURES)), layer, head]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "mse", **compile_arguments
    )
    model.optimizer.build(model.trainable_variables)
    return model


def targets(rng, time=TIME):
    return rng.normal(size=(BATCH, time, OUTPUTS)).astype("float32")


# The kernels that a step multiplies by, as (rows, columns): the input gates
# and, of the five gates, those three that the recurrence needs.
WIDTH = -(-UNITS // 2)  # of a slot, by default
BOTH = UNITS + WIDTH
RECURRENT_KERNELS = {(BOTH, BOTH), (BOTH, 3 * UNITS)}
ALL_GATES = {(BOTH, BOTH), (BOTH, 4 * UNITS + WIDTH)}


def check_products(products, way):
    """The kernels meet bfloat16; wide is only what looks at all slots."""
    narrow = {shape for dtype, shape in products if dtype == "bf16"}
    wide = {shape for dtype, shape in products if dtype != "bf16"}
    assert (RECURRENT_KERNELS if way == FUSED else ALL_GATES) <= narrow
    assert wide <= {(BATCH, WIDTH), (BATCH, WIDTH, 1)}


@on["jax"]
class TestJAX:
    """Programs for TPU and CUDA, by `jax.export`."""

    PLATFORMS = ("tpu", "cuda")
    # Calls of code that runs on the device itself: older releases of JAX draw
    # random numbers on CUDA by this kernel.
    ALLOWED = frozenset({"cu_threefry2x32_ffi"})

    def check_device_only(self, module):
        assert not re.findall(r"tensor<[^>]*\?[^>]*>", module)
        assert not re.findall(
            r"stablehlo\.(?:real_)?dynamic_(?!slice|update)\w+", module
        )
        assert not re.findall(
            r"stablehlo\.(?:send|recv|infeed|outfeed)", module
        )
        called = re.findall(r"custom_call @(\w+)", module)
        assert set(called) <= self.ALLOWED
        assert not re.findall(r"tensor<\S*f64>", module)

    def loops(self, module):
        """The text of all loops, with that of the functions they call."""
        functions = dict(
            re.findall(
                r"^  func\.func \w+ @(\w+)(.*?)^  }", module, re.DOTALL | re.M
            )
        )
        whole = re.compile(
            r"^( +)[^\n]*stablehlo\.while\(.*?^\1} loc", re.DOTALL | re.M
        )
        text = "\n".join(found.group() for found in whole.finditer(module))
        done = set()
        while todo := set(re.findall(r"call @(\w+)", text)) - done:
            text += "\n".join(functions[name] for name in todo)
            done |= todo
        return text

    def products(self, text):
        """Type of the left factor and shape of the right one, of each."""
        found = re.findall(
            r"dot_general .* : \(tensor<[\dx]+x(\w+)>, "
            r"tensor<([\dx]+)x(\w+)>\)",
            text,
        )
        assert all(left == right for left, _, right in found)
        return {
            (left, tuple(map(int, shape.split("x"))))
            for left, shape, _ in found
        }

    def specs(self, variables):
        import jax

        return [jax.ShapeDtypeStruct(v.shape, v.value.dtype) for v in variables]

    def spec(self, *shape):
        import jax

        return jax.ShapeDtypeStruct(shape, "float32")

    def training(self, model):
        """What `fit` compiles: the train step of Keras' trainer."""
        state = tuple(
            self.specs(variables)
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        )
        x = self.spec(BATCH, TIME, FEATURES)
        return model.train_step, (state, (x, self.spec(BATCH, TIME, OUTPUTS)))

    def inference(self, model, data=None):
        def predict(trainable, others, data):
            return model.stateless_call(
                trainable, others, data, training=False
            )[0]

        return predict, (
            self.specs(model.trainable_variables),
            self.specs(model.non_trainable_variables),
            self.spec(BATCH, TIME, FEATURES) if data is None else data,
        )

    def one_step(self, model):
        step = keras_armin.step_model(model)
        states = [
            self.spec(*state.shape) for state in step.initial_states(BATCH)
        ]
        return self.inference(step, [self.spec(BATCH, FEATURES), *states])

    def export(self, function, arguments, *platforms):
        import jax

        exported = jax.export.export(jax.jit(function), platforms=platforms)
        return exported(*arguments)

    def check(self, exported, way, policy):
        """All that is asked of a program with loops."""
        import jax

        module = exported.mlir_module()
        self.check_device_only(module)
        products = self.products(self.loops(module))
        if policy == "mixed_bfloat16":
            check_products(products, way)
        else:
            assert {dtype for dtype, _ in products} == {"f32"}
        again = jax.export.deserialize(exported.serialize())
        assert again.platforms == exported.platforms
        assert again.in_avals == exported.in_avals

    @pytest.mark.slow_after(2, "jax")
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("what", ["training", "inference"])
    def test_a_pass_over_a_sequence(self, what, way, policy, go):
        go(way)
        # Keras' own layer carries no state on JAX.
        model = build(way, policy, stateful=way != BARE)
        exported = self.export(*getattr(self, what)(model), *self.PLATFORMS)

        assert exported.platforms == self.PLATFORMS
        self.check(exported, way, policy)

    @pytest.mark.parametrize("platform", PLATFORMS)
    def test_training_on_one_of_them(self, platform):
        """A program for several may differ from one for each."""
        model = build(FUSED, "mixed_bfloat16")
        exported = self.export(*self.training(model), platform)

        assert exported.platforms == (platform,)
        self.check(exported, FUSED, "mixed_bfloat16")

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_model_of_one_step(self, policy):
        step = self.one_step(build(FUSED, policy))
        module = self.export(*step, *self.PLATFORMS).mlir_module()

        self.check_device_only(module)
        assert not re.findall(r"stablehlo\.while", module)
        if policy == "mixed_bfloat16":
            check_products(self.products(module), PLAIN)

    def test_what_is_written_for_all_platforms_computes_the_same(self, rng):
        import jax

        model = build(FUSED, "float32")
        function, arguments = self.inference(model)
        exported = self.export(function, arguments, "cpu", *self.PLATFORMS)
        again = jax.export.deserialize(exported.serialize())
        x = inputs(rng)
        found = again.call(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
            x,
        )

        np.testing.assert_allclose(
            array(found), model.predict(x, verbose=0), atol=1e-6
        )

    def test_the_check_sees_a_call_of_the_host(self):
        """No export is made of such a call: it is seen in what JAX lowers."""
        import jax

        def doubled(x):
            return jax.pure_callback(lambda x: 2 * x, x, x)

        module = jax.jit(doubled).lower(np.ones(3, "float32")).as_text()
        with pytest.raises(AssertionError, match="callback"):
            self.check_device_only(module)
        for platform in self.PLATFORMS:
            with pytest.raises(ValueError, match="platform"):
                self.export(doubled, [self.spec(3)], platform)

    def test_the_check_sees_an_open_shape(self):
        import jax

        shape = jax.export.symbolic_shape("batch, 3")
        x = jax.ShapeDtypeStruct(shape, "float32")
        module = self.export(lambda x: 2 * x, [x], "tpu").mlir_module()
        with pytest.raises(AssertionError, match="tensor<"):
            self.check_device_only(module)

    def test_the_check_sees_a_product_that_stays_wide(self):
        """What a model without the policy does."""
        exported = self.export(*self.inference(build(FUSED, "float32")), "tpu")
        with pytest.raises(AssertionError):
            check_products(
                self.products(self.loops(exported.mlir_module())), FUSED
            )


@on["tensorflow"]
class TestTensorFlow:
    """The same steps under XLA, which is what runs on a TPU."""

    def check_device_only(self, program):
        # A bounded dynamic dimension is written so.
        assert not re.findall(r"\[[^\]]*<=", program)
        assert not re.findall(r"custom_call_target=\S+", program)
        assert not re.findall(r" (?:infeed|outfeed|send|recv)\(", program)

    def program(self, function, *arguments):
        """The HLO of a function, before the compiler goes over it."""
        import tensorflow as tf

        compiled = tf.function(function, jit_compile=True)
        return self.program_of(compiled, *arguments)

    def program_of(self, compiled, *arguments):
        import tensorflow as tf

        tensors = tf.nest.map_structure(tf.constant, arguments)
        return compiled.experimental_get_compiler_ir(*tensors)(stage="hlo")

    def products(self, program):
        found = re.findall(
            r" dot\((\w+)\[[\d,]+\]\S* \S+ \w+\[([\d,]+)\]", program
        )
        return {
            (dtype, tuple(map(int, shape.split(",")))) for dtype, shape in found
        }

    def check(self, program, way, policy):
        self.check_device_only(program)
        if policy == "mixed_bfloat16":
            check_products(self.products(program), way)

    def train_step(self, model):
        import tensorflow as tf

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            values = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, values)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        return step

    @pytest.mark.slow_after(1, "tensorflow")
    @pytest.mark.parametrize("way", [FUSED, BARE])
    def test_the_program_of_a_training_step(self, way, rng):
        model = build(way, "mixed_bfloat16", stateful=True)
        program = self.program(
            self.train_step(model), inputs(rng), targets(rng)
        )

        self.check(program, way, "mixed_bfloat16")

    @pytest.mark.slow_after(2, "tensorflow")
    @pytest.mark.parametrize(
        "way, policy",
        [
            (FUSED, "float32"),
            (FUSED, "mixed_bfloat16"),
            (PLAIN, "float32"),
            (BARE, "mixed_bfloat16"),
        ],
    )
    def test_inference_is_the_same_under_xla(self, way, policy, rng, go):
        import tensorflow as tf

        go(way)
        model = build(way, policy)
        x = inputs(rng)

        def predict(x):
            return tf.cast(model(x, training=False), "float32")

        compiled = tf.function(predict, jit_compile=True)
        found, expected = compiled(tf.constant(x)), predict(tf.constant(x))

        off = {"float32": 1e-5, "mixed_bfloat16": 0.05}[policy]
        np.testing.assert_allclose(found, expected, atol=off)
        self.check(self.program_of(compiled, x), way, policy)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_model_of_one_step(self, policy, rng):
        step = keras_armin.step_model(build(FUSED, policy))
        states = step.initial_states(BATCH)
        program = self.program(
            lambda data: step(data, training=False),
            [inputs(rng)[:, 0], *states],
        )

        self.check(program, PLAIN, policy)
        assert " while(" not in program

    # The layer alone, compiled by XLA, is in test_fused.py.
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "stateful, policy", [(True, "float32"), (False, "mixed_bfloat16")]
    )
    def test_training_is_the_same_under_xla(
        self, stateful, policy, rng, monkeypatch
    ):
        """With the noise given: XLA has its own way to draw it."""
        fix_noise(monkeypatch, random_noise(rng))
        x, y = inputs(rng), targets(rng)
        results = []
        for jit in (False, True):
            keras.utils.set_random_seed(1)
            model = build(FUSED, policy, stateful=stateful, jit_compile=jit)
            losses = [model.train_on_batch(x, y) for _ in range(2)]
            results.append([np.array(losses), *model.get_weights()])

        off = {"float32": 1e-4, "mixed_bfloat16": 0.02}[policy]
        for found, expected in zip(*results):
            np.testing.assert_allclose(found, expected, atol=off)

    def test_the_check_sees_an_open_shape(self, rng):
        import tensorflow as tf

        program = self.program(lambda x: tf.boolean_mask(x, x > 0), inputs(rng))
        with pytest.raises(AssertionError, match="<="):
            self.check_device_only(program)

    def test_xla_refuses_a_call_of_the_host(self, rng):
        import tensorflow as tf

        def doubled(x):
            return tf.numpy_function(lambda x: 2 * x, [x], tf.float32)

        with pytest.raises(ValueError, match="unsupported operations"):
            self.program(doubled, inputs(rng))


@on["torch"]
class TestTorch:
    """What a GPU would have to wait for, on torch.

    Nothing is compiled here, and a torch without CUDA makes no tensors for
    it. So the operations are watched as they come: a number that the host
    reads stops the device until it is there, and a tensor that is made
    without saying where is made on the host.

    `keras.layers.RNN(ARMINCell(...))` is left out: Keras' own loop reads the
    number of each step from a tensor.
    """

    def watch(self, function):
        """Numbers that the host reads, and the dtypes of matrix products."""
        import torch
        from torch.utils import _python_dispatch

        reads, dtypes = [], set()

        class Watch(_python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                name = str(op)
                if "_local_scalar_dense" in name or "nonzero" in name:
                    reads.append(name)
                if re.match(r"aten\.(add)?mm_?\.", name):
                    dtypes.update(x.dtype for x in args if torch.is_tensor(x))
                return op(*args, **(kwargs or {}))

        # What is made without saying where is made on a device that goes with
        # no other: the next operation fails.
        with torch.device("meta"), Watch():
            function()
        return reads, dtypes

    def gradients(self, model, x, y):
        loss = model.compute_loss(x, y, model(x, training=True))
        loss.backward()

    def update(self, model):
        import torch

        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            model.optimizer.apply(gradients, model.trainable_variables)

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("way", [FUSED, PLAIN])
    def test_a_training_step(self, way, policy, rng, go):
        import torch

        go(way)
        reads = {}
        for time in (TIME, 2 * TIME):
            model = build(way, policy, time=time, stateful=True)
            x = torch.tensor(inputs(rng, time=time))
            y = torch.tensor(targets(rng, time=time))
            reads[time], dtypes = self.watch(
                functools.partial(self.gradients, model, x, y)
            )
            in_update, _ = self.watch(functools.partial(self.update, model))

            if policy == "mixed_bfloat16":
                assert dtypes == {torch.bfloat16}
            # Keras' SGD reads its learning rate.
            assert len(in_update) <= 1
        # Keras reads the seed of a draw. There are two, at any length: for
        # zoneout and for dropout.
        assert len(reads[TIME]) == len(reads[2 * TIME]) == 2

    @pytest.mark.parametrize("way", [FUSED, PLAIN])
    def test_inference(self, way, rng, go):
        import torch

        go(way)
        model = build(way, "float32", stateful=True)
        x = torch.tensor(inputs(rng))
        reads, _ = self.watch(lambda: model(x, training=False))

        assert not reads

    def test_a_model_of_one_step(self, rng):
        import torch

        step = keras_armin.step_model(build(FUSED, "float32"))
        states = [torch.tensor(state) for state in step.initial_states(BATCH)]
        x = torch.tensor(inputs(rng)[:, 0])
        reads, _ = self.watch(lambda: step([x, *states], training=False))

        assert not reads

    def test_the_watch_sees_what_it_looks_for(self):
        import torch

        x = torch.ones(3, 3)
        reads, _ = self.watch(lambda: x.sum().item())
        _, dtypes = self.watch(lambda: x @ x)

        assert reads
        assert dtypes == {torch.float32}
        with pytest.raises(RuntimeError, match="device"):
            self.watch(lambda: x + torch.zeros(3))
