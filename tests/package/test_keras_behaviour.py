"""ARMIN and its bare cell behave like Keras RNNs."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import ARMIN
from keras_armin import ARMINCell
from tests.helpers import reference
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import as_rnn
from tests.helpers.common import compiled
from tests.helpers.common import each_form
from tests.helpers.common import fix_noise
from tests.helpers.common import gradients
from tests.helpers.common import inputs
from tests.helpers.common import random_noise
from tests.helpers.common import randomise

OUTPUT = UNITS + DIM
STATE_SIZES = [OUTPUT, UNITS, SLOTS * DIM, 4, SLOTS]
SIZES = {"units": UNITS, "memory_slots": SLOTS, "memory_dim": DIM}
# What the contract of all networks has for the layer already.
bare = pytest.mark.parametrize("make", [as_rnn], ids=["RNN(ARMINCell)"])


def built(make=ARMIN, rng=None, **options):
    layer = make(**{**SIZES, **options})
    layer.build((BATCH, TIME, FEATURES))
    if rng is not None:
        randomise(layer, rng)
    return layer


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(array(a), array(b), atol=atol, rtol=1e-5)


# --- masks ------------------------------------------------------------------

LENGTHS = np.array([4, 7, 2])
MASK = np.arange(TIME)[None] < LENGTHS[:, None]


@pytest.mark.slow("jax")
@each_form
@pytest.mark.parametrize("slots", [SLOTS, BATCH], ids=["", "slots = batch"])
def test_a_masked_tail_equals_a_shorter_sequence(make, slots, rng):
    layer = built(make, rng, memory_slots=slots, return_state=True)
    x = inputs(rng)
    masked = layer(x, mask=MASK)

    for b, length in enumerate(LENGTHS):
        shorter = layer(x[b : b + 1, :length])
        for whole, part in zip(masked, shorter):
            close(whole[b : b + 1], part)


@pytest.mark.slow_after(4, "jax", "tensorflow")
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("zero_output_for_mask", [False, True])
def test_masks_in_every_mode_agree_with_the_reference(
    unroll, go_backwards, zero_output_for_mask, rng
):
    options = {"memory_slots": SLOTS, "memory_dim": DIM}
    layer = built(
        rng=rng,
        return_sequences=True,
        unroll=unroll,
        go_backwards=go_backwards,
        zero_output_for_mask=zero_output_for_mask,
    )
    weights = {w.name: array(w) for w in layer.cell.trainable_weights}
    x = inputs(rng)
    mask = rng.random((BATCH, TIME)) < 0.6
    order = slice(None, None, -1 if go_backwards else 1)
    expected, *_ = reference.run(
        UNITS, options, weights, x[:, order], mask=mask[:, order]
    )
    if zero_output_for_mask:
        expected = expected * mask[:, order, None]

    close(layer(x, mask=mask), expected)
    last = built(
        unroll=unroll,
        go_backwards=go_backwards,
        zero_output_for_mask=zero_output_for_mask,
    )
    last.set_weights(layer.get_weights())
    close(last(x, mask=mask), expected[:, -1])


@each_form
def test_a_mask_from_masking_and_from_embedding(make, rng):
    layer = built(make, rng)
    x = inputs(rng)
    padded = np.where(MASK[..., None], x, 0.0).astype("float32")
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), keras.layers.Masking(), layer]
    )
    close(model(padded), layer(x, mask=MASK))

    tokens = np.where(MASK, rng.integers(1, 9, (BATCH, TIME)), 0)
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True)
    embedded = keras.Sequential(
        [keras.Input((TIME,), dtype="int32"), embedding, layer]
    )
    vectors = array(embedding(tokens))
    close(embedded.predict(tokens, verbose=0), layer(vectors, mask=MASK))


def test_an_attached_mask_counts_beside_initial_state_and_reset(rng):
    layer = built(rng=rng)
    tokens = np.where(MASK, rng.integers(1, 9, (BATCH, TIME)), 0)
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True)
    states = [
        rng.normal(size=(BATCH, s)).astype("float32") for s in STATE_SIZES
    ]
    states[3] = np.array([[2.0, 0, 0, 0]] * BATCH, "float32")
    states[4] = np.zeros((BATCH, SLOTS), "float32")
    token_input = keras.Input((TIME,), dtype="int32")
    state_inputs = [keras.Input((size,)) for size in STATE_SIZES]
    model = keras.Model(
        [token_input, *state_inputs],
        layer(embedding(token_input), initial_state=state_inputs),
    )
    vectors = array(embedding(tokens))
    expected = layer(vectors, initial_state=states, mask=MASK)
    assert np.abs(array(layer(vectors, initial_state=states) - expected)).max()

    close(model([tokens, *states]), expected)
    close(
        layer(embedding(tokens), reset=np.zeros(BATCH, bool)),
        layer(vectors, mask=MASK),
    )


def test_the_first_masked_step_repeats_the_carried_output(rng):
    layer = built(rng=rng, return_sequences=True)
    states = [
        rng.normal(size=(BATCH, s)).astype("float32") for s in STATE_SIZES
    ]
    states[3:] = [np.zeros((BATCH, n), "float32") for n in (4, SLOTS)]
    mask = np.ones((BATCH, TIME), bool)
    mask[:, 0] = False

    outputs = layer(inputs(rng), initial_state=states, mask=mask)

    close(outputs[:, 0], states[0])


@pytest.mark.slow("jax")
def test_the_output_mask_is_reversed_with_the_outputs(rng):
    x = inputs(rng)
    first = built(rng=rng, return_sequences=True, go_backwards=True)
    second = ARMIN(UNITS, SLOTS)
    padded = np.where(MASK[..., None], x, 0.0).astype("float32")
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), keras.layers.Masking(), first, second]
    )

    expected = second(first(x, mask=MASK), mask=MASK[:, ::-1])
    close(model(padded), expected)


@pytest.mark.slow_after(2, "tensorflow")
@pytest.mark.slow("jax")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("addressing", ["hard", "relaxed", "soft"])
def test_nan_in_masked_steps_reaches_nothing(addressing, training, rng):
    layer = built(
        rng=rng, addressing=addressing, write_inputs=True, return_sequences=True
    )
    x = inputs(rng)
    poisoned = np.where(MASK[..., None], x, np.nan).astype("float32")

    close(layer(poisoned, mask=MASK), layer(x, mask=MASK))
    found, found_x = gradients(layer, poisoned, training=training, mask=MASK)
    for name, gradient in found.items():
        assert gradient is None or np.isfinite(gradient).all(), name
    assert np.isfinite(found_x).all()
    assert (found_x[~MASK] == 0).all()


@pytest.mark.slow_after(2, "jax", "tensorflow")
@each_form
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("addressing", ["hard", "relaxed", "soft"])
def test_nan_in_one_sample_reaches_no_other(
    make, addressing, training, rng, monkeypatch
):
    fix_noise(monkeypatch, random_noise(rng))
    layer = built(make, rng, addressing=addressing, content_addressing=True)
    x = inputs(rng)
    expected = array(layer(x, training=training))
    x[1, 2, 0] = np.nan
    outputs = array(layer(x, training=training))

    assert np.isnan(outputs[1]).any()
    close(outputs[[0, 2]], expected[[0, 2]])


# --- shapes and states ------------------------------------------------------


@bare
@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("return_sequences", [False, True])
def test_symbolic_and_eager_shapes_agree(
    make, return_sequences, return_state, rng
):
    layer = make(
        **SIZES, return_sequences=return_sequences, return_state=return_state
    )
    symbolic = layer(keras.Input((None, FEATURES)))
    eager = layer(inputs(rng))
    computed = layer.compute_output_shape((BATCH, TIME, FEATURES))
    if not return_state:
        symbolic, eager, computed = [symbolic], [eager], [computed]

    assert len(symbolic) == len(eager) == (6 if return_state else 1)
    output = (TIME, OUTPUT) if return_sequences else (OUTPUT,)
    shapes = [output, *((size,) for size in STATE_SIZES)]
    for s, e, c, expected in zip(symbolic, eager, computed, shapes):
        assert tuple(e.shape) == tuple(c) == (BATCH, *expected)
        assert tuple(s.shape)[-1] == expected[-1] and len(s.shape) == len(
            e.shape
        )


@bare
def test_two_halves_with_the_state_passed_on_equal_the_whole(make, rng):
    layer = built(make, rng, return_state=True)
    x = inputs(rng)
    whole = layer(x)
    _, *state = layer(x[:, :3])
    rest = layer(x[:, 3:], initial_state=state)

    for a, b in zip(whole, rest):
        close(a, b)


@each_form
def test_encoder_to_decoder(make, rng):
    encoder_input = keras.Input((None, FEATURES))
    decoder_input = keras.Input((None, 2))
    _, *state = make(**SIZES, return_state=True)(encoder_input)
    decoder = make(**SIZES, return_sequences=True)
    outputs = keras.layers.Dense(2)(decoder(decoder_input, initial_state=state))
    model = keras.Model([encoder_input, decoder_input], outputs)
    model.compile("sgd", "mse")
    x, y = inputs(rng), inputs(rng, features=2)
    before = model.layers[2].get_weights()

    model.fit([x, y], y, verbose=0)

    after = model.layers[2].get_weights()
    assert any(np.abs(a - b).max() > 0 for a, b in zip(before, after))


@bare
def test_go_backwards_reads_from_the_end(make, rng):
    forward = built(make, rng, return_sequences=True)
    backward = built(make, return_sequences=True, go_backwards=True)
    backward.set_weights(forward.get_weights())
    x = inputs(rng)

    close(backward(x), forward(x[:, ::-1].copy()))


@bare
def test_unroll_changes_nothing(make, rng):
    loop = built(make, rng, return_sequences=True)
    unrolled = built(make, return_sequences=True, unroll=True)
    unrolled.set_weights(loop.get_weights())
    x = inputs(rng)

    close(unrolled(x), loop(x))


@bare
def test_bidirectional(make, rng):
    layer = keras.layers.Bidirectional(make(**SIZES, return_sequences=True))
    x = inputs(rng)
    y = array(layer(x, mask=MASK))
    forward, backward = layer.forward_layer, layer.backward_layer

    assert y.shape == (BATCH, TIME, 2 * OUTPUT)
    assert not np.array_equal(
        array(forward.cell.kernel), array(backward.cell.kernel)
    )
    close(y[..., :OUTPUT], forward(x, mask=MASK))
    turned = array(backward(x, mask=MASK))[:, ::-1]
    close(y[..., OUTPUT:], turned)


@pytest.mark.slow("jax")
def test_bidirectional_with_states(rng):
    layer = keras.layers.Bidirectional(ARMIN(**SIZES, return_state=True))
    outputs = layer(inputs(rng))
    again = layer(inputs(rng), initial_state=outputs[1:])

    assert len(outputs) == len(again) == 11
    assert tuple(outputs[3].shape) == (BATCH, SLOTS * DIM)


@pytest.mark.slow("jax", "tensorflow")
def test_stacked_with_other_cells(rng):
    cells = [
        keras.layers.LSTMCell(3),
        ARMINCell(**SIZES, zoneout=0.1),
        keras.layers.GRUCell(2),
    ]
    rnn = keras.layers.RNN(cells, return_sequences=True)
    x = inputs(rng)
    one_by_one = x
    y = array(rnn(x))
    for cell in cells:
        one_by_one = keras.layers.RNN(cell, return_sequences=True)(one_by_one)
    close(y, one_by_one)

    model = compiled(rnn, (None, TIME, FEATURES))
    history = model.fit(x, rng.normal(size=(BATCH, TIME, 2)), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


STACK_OF_ONE = pytest.mark.xfail(
    BACKEND == "jax",
    reason="keras.layers.StackedRNNCells unwraps the states of a lone cell, "
    "which JAX's scan refuses",
    raises=TypeError,
    strict=True,
)


@STACK_OF_ONE
def test_a_stack_of_one_bare_cell(rng):
    rnn = keras.layers.RNN([ARMINCell(**SIZES)])
    assert tuple(rnn(inputs(rng)).shape) == (BATCH, OUTPUT)


@pytest.mark.slow("jax", "tensorflow")
def test_time_distributed(rng):
    layer = built(rng=rng)
    x = np.stack([inputs(rng), inputs(rng)], axis=1)
    y = keras.layers.TimeDistributed(layer)(x)

    close(y[:, 0], layer(x[:, 0]))
    close(y[:, 1], layer(x[:, 1]))


@pytest.mark.slow("jax", "tensorflow")
@each_form
def test_layer_and_cell_as_a_plain_call_with_any_batch_and_time(make, rng):
    layer = built(make, rng)
    model = keras.Sequential([keras.Input((None, FEATURES)), layer])
    for batch, time in ((1, 1), (2, 9), (BATCH, TIME)):
        x = inputs(rng, batch, time)
        close(model.predict(x, verbose=0), layer(x))


# --- models and training ----------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.head(self.layer(x, training=training))


def functional(layer):
    x = keras.Input((None, FEATURES))
    return keras.Model(x, keras.layers.Dense(2)(layer(x)))


def sequential(layer):
    return keras.Sequential([layer, keras.layers.Dense(2)])


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_form
@pytest.mark.parametrize("style", [sequential, functional, Subclassed])
def test_every_style_of_model_trains(make, style, rng):
    model = style(make(**SIZES, zoneout=0.1, dropout=0.1, seed=3))
    model.compile(keras.optimizers.Adam(0.02), "mse")
    x, y = inputs(rng, 8), rng.normal(size=(8, 2))

    history = model.fit(x, y, batch_size=8, epochs=25, verbose=0)

    losses = history.history["loss"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert model.predict(x, verbose=0).shape == (8, 2)


@pytest.mark.slow("jax", "tensorflow")
@bare
@pytest.mark.parametrize(
    "jit_compile",
    # torch makes C++ of the whole loop, which takes minutes.
    [False, pytest.param(True, marks=pytest.mark.slow("torch"))],
)
def test_training_with_and_without_jit(make, jit_compile, rng):
    # Without noise the loss has to fall.
    model = compiled(
        make(**SIZES, addressing="soft"),
        (None, None, FEATURES),
        jit_compile=jit_compile,
    )
    x, y = inputs(rng, 4, 2), rng.normal(size=(4, 2))
    first = model.train_on_batch(x, y)
    for _ in range(4):
        last = model.train_on_batch(x, y)

    assert np.isfinite([first, last]).all()
    assert float(last) < float(first)


def train_by_hand(model, x, y, steps):
    """The loop of each backend's own guide, in short."""
    losses = []
    optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.MeanSquaredError()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_weights)
            optimizer.apply(grads, model.trainable_weights)
            return loss

        optimizer.build(model.trainable_weights)
        losses = [float(step()) for _ in range(steps)]
    elif BACKEND == "torch":
        for _ in range(steps):
            model.zero_grad()
            loss = loss_of(y, model(x, training=True))
            loss.backward()
            grads = [v.value.grad for v in model.trainable_weights]
            import torch

            with torch.no_grad():
                optimizer.apply(grads, model.trainable_weights)
            losses.append(float(loss))
    else:
        import jax

        def loss_and_state(trainable, state):
            outputs, state = model.stateless_call(
                trainable, state, x, training=True
            )
            return loss_of(y, outputs), state

        optimizer.build(model.trainable_variables)
        grad_of = jax.jit(jax.value_and_grad(loss_and_state, has_aux=True))
        trainable = [v.value for v in model.trainable_variables]
        state = [v.value for v in model.non_trainable_variables]
        slots = [v.value for v in optimizer.variables]
        for _ in range(steps):
            (loss, state), grads = grad_of(trainable, state)
            trainable, slots = optimizer.stateless_apply(
                slots, grads, trainable
            )
            losses.append(float(loss))
    return losses


@each_form
def test_a_hand_written_training_loop(make, rng):
    model = keras.Sequential(
        [
            keras.Input((TIME, FEATURES)),
            make(**SIZES, zoneout=0.1, seed=3),
            keras.layers.Dense(2),
        ]
    )
    x = inputs(rng)
    y = rng.normal(size=(BATCH, 2)).astype("float32")

    losses = train_by_hand(model, x, y, 20)

    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.slow("jax", "tensorflow")
def test_a_small_copy_task_is_learnt(rng):
    """Three bits in, three bits out: below 0.1 nats from 0.69."""
    bits = rng.integers(0, 2, (256, 3)).astype("float32")
    x = np.zeros((256, 6, 2), "float32")
    x[:, :3, 0], x[:, 3:, 1] = bits, 1.0
    model = keras.Sequential(
        [
            keras.Input((6, 2)),
            ARMIN(16, 6, return_sequences=True, seed=1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    weight = np.zeros((256, 6), "float32")
    weight[:, 3:] = 2.0
    y = np.concatenate([bits * 0, bits], axis=1)[..., None]

    model.fit(x, y, sample_weight=weight, epochs=30, batch_size=32, verbose=0)

    loss = model.evaluate(x, y, sample_weight=weight, verbose=0)
    assert loss < 0.1


# --- what keras.layers.RNN itself breaks ------------------------------------


@pytest.mark.slow("jax")
@pytest.mark.xfail(
    BACKEND == "torch",
    reason="keras.layers.RNN on torch fails with unroll, mask and go_backwards",
    strict=True,
)
def test_the_bare_cell_unrolled_backwards_with_a_mask(rng):
    layer = built(as_rnn, rng, unroll=True, go_backwards=True)
    plain = built(as_rnn, go_backwards=True)
    plain.set_weights(layer.get_weights())
    x = inputs(rng)

    close(layer(x, mask=MASK), plain(x, mask=MASK))


@pytest.mark.xfail(
    BACKEND == "jax",
    reason="keras.layers.RNN on JAX forgets zero_output_for_mask with unroll",
    strict=True,
)
def test_the_bare_cell_unrolled_with_zero_output_for_mask(rng):
    options = {"return_sequences": True, "zero_output_for_mask": True}
    layer = built(as_rnn, rng, unroll=True, **options)
    plain = built(as_rnn, **options)
    plain.set_weights(layer.get_weights())
    x = inputs(rng)

    close(layer(x, mask=MASK), plain(x, mask=MASK))


def test_an_intermediate_output_can_be_had(rng):
    """`ops` on symbolic outputs, as people use a layer inside a model."""
    x = keras.Input((TIME, FEATURES))
    layer = ARMIN(**SIZES, return_sequences=True)
    model = keras.Model(x, ops.max(layer(x), axis=1))

    assert model.predict(inputs(rng), verbose=0).shape == (BATCH, OUTPUT)
