"""Noise differs between samples, steps and calls, and follows the seed."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import noise
from tests.helpers.common import FEATURES
from tests.helpers.common import array
from tests.helpers.common import as_rnn
from tests.helpers.common import each_form

SLOTS = 16
TIME = 30


def reader(make, **options):
    """A layer whose output shows which slot each step has read.

    All weights are zero, so noise alone decides; the learnt memory holds the
    number of the slot, the output gate is half open and `output_activation`
    is linear: the last column is half the slot's number.
    """
    layer = make(
        units=1,
        memory_slots=SLOTS,
        memory_dim=2,
        learn_initial_state=True,
        output_activation=None,
        kernel_initializer="zeros",
        recurrent_initializer="zeros",
        unit_forget_bias=False,
        return_sequences=True,
        recency_addressing=False,
        **{"noise_scale": 1.0, **options},
    )
    layer.build((None, None, FEATURES))
    cell = layer.cell
    numbers = np.arange(SLOTS, dtype="float32")
    cell.initial_memory.assign(np.stack([0 * numbers, numbers + 1], axis=1))
    # Writes show too: they store the number -1.
    cell.write_bias.assign([0.0, -1.0])
    return layer


def slots_read(outputs):
    return np.round(array(outputs)[..., 2] * 2).astype(int)


@pytest.mark.slow("jax")
@each_form
def test_noise_differs_between_samples_steps_and_calls(make):
    layer = reader(make)
    x = np.zeros((3, SLOTS, FEATURES), "float32")
    first = slots_read(layer(x, training=True))
    second = slots_read(layer(x, training=True))

    # 16 steps, 16 slots: a repeat of a whole row is out of the question.
    rows = [tuple(row) for row in np.concatenate([first, second])]
    assert len(set(rows)) == 6
    assert all(len(set(row)) > 3 for row in rows)


@pytest.mark.slow("jax")
@each_form
def test_without_noise_training_is_inference(make):
    layer = reader(make, noise_scale=0.0)
    before = array(layer.cell.seed_generator.state.value)
    x = np.zeros((2, SLOTS, FEATURES), "float32")
    layer.cell.kernel.assign(layer.cell.kernel + 0.1)

    np.testing.assert_array_equal(
        array(layer(x, training=True)), array(layer(x, training=False))
    )
    np.testing.assert_array_equal(
        array(layer.cell.seed_generator.state.value), before
    )
    assert layer.cell.noise_scale is None


@pytest.mark.slow("jax", "tensorflow")
@each_form
def test_noise_counts_as_much_as_its_scale(make):
    """The best slot is ahead by 2: little noise leaves it there."""
    layer = reader(make, noise_scale=0.1)
    layer.cell.bias.assign(
        np.where(np.arange(layer.cell.bias.shape[0]) == 5, 2.0, 0.0)
    )
    x = np.zeros((200, 1, FEATURES), "float32")
    for scale, least, most in ((0.1, 200, 200), (1.0, 40, 120), (10, 5, 50)):
        layer.cell.noise_scale.assign(scale)
        slots = slots_read(layer(x, training=True))[:, 0] - 1
        assert least <= (slots == 5).sum() <= most, scale


@pytest.mark.slow("jax")
@each_form
def test_every_slot_is_read_alike_by_noise(make):
    layer = reader(make)
    x = np.zeros((200, 1, FEATURES), "float32")
    counts = np.zeros(SLOTS)
    for _ in range(10):
        slots = slots_read(layer(x, training=True))[:, 0] - 1
        counts += np.bincount(slots, minlength=SLOTS)

    # 2000 draws: 125 expected, standard deviation 11.
    assert counts.sum() == 2000
    assert (np.abs(counts - 125) < 60).all()


@each_form
def test_inference_draws_nothing(make):
    layer = reader(make, zoneout=0.5, dropout=0.5, recurrent_dropout=0.5)
    before = array(layer.cell.seed_generator.state.value)
    x = np.zeros((2, 4, FEATURES), "float32")

    assert (slots_read(layer(x)) == slots_read(layer(x, training=False))).all()
    keras.Sequential([keras.Input((4, FEATURES)), layer]).predict(x, verbose=0)
    np.testing.assert_array_equal(
        array(layer.cell.seed_generator.state.value), before
    )


class Watch(keras.callbacks.Callback):
    """Keeps the loss of each batch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


@pytest.mark.slow("tensorflow")
@each_form
def test_noise_is_fresh_inside_fit(make):
    """With a learning rate of 0 only noise can change the loss."""
    layer = reader(make)
    model = keras.Sequential([keras.Input((TIME, FEATURES)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.zeros((4, TIME, FEATURES), "float32")
    watch = Watch()
    model.fit(x, np.zeros((4, TIME, 3)), epochs=6, verbose=0, callbacks=[watch])

    assert len(set(watch.losses)) == 6


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_form
@pytest.mark.parametrize("rate", ["zoneout", "dropout", "recurrent_dropout"])
@pytest.mark.slow("jax", "tensorflow")
def test_each_kind_of_noise_acts_in_training_only(make, rate, rng):
    layer = make(units=8, addressing="soft", memory_slots=2, **{rate: 0.5})
    x = rng.normal(size=(2, 5, FEATURES)).astype("float32")
    calm = array(layer(x))
    a, b = (array(layer(x, training=True)) for _ in range(2))

    assert np.abs(a - b).max() > 1e-4
    np.testing.assert_array_equal(array(layer(x)), calm)
    assert not np.array_equal(a[0], a[1])


@pytest.mark.slow("jax", "tensorflow")
@each_form
def test_zoneout_is_fresh_at_each_step(make):
    """f = 1, i g = 1: each step adds 1 to the units that zoneout lets go."""
    layer = make(
        units=40,
        addressing="soft",
        memory_slots=2,
        zoneout=0.5,
        activation=None,
        state_activation=None,
        kernel_initializer="zeros",
        recurrent_initializer="zeros",
        return_state=True,
    )
    layer.build((None, None, FEATURES))
    bias = np.full(layer.cell.bias.shape, 50.0, "float32")
    g = slice(2 + 60 + 80, 2 + 60 + 120)
    bias[g] = 1.0
    layer.cell.bias.assign(bias)
    x = np.zeros((1, 8, FEATURES), "float32")

    h = array(layer(x, training=True)[2])

    # Binomial(8, 1/2): the same mask at each step would give only 0 and 8.
    assert len(set(np.round(h[0]))) > 3
    assert abs(h.mean() - 4.0) < 1.0
    np.testing.assert_allclose(array(layer(x)[2]), 8 * 0.5, atol=1e-3)


@each_form
def test_dropout_masks_are_the_same_at_each_step(make):
    """With all weights but the candidate's zero, h counts the kept inputs."""
    layer = make(
        units=1,
        addressing="soft",
        memory_slots=2,
        dropout=0.5,
        activation=None,
        state_activation=None,
        kernel_initializer="zeros",
        recurrent_initializer="zeros",
        return_state=True,
    )
    layer.build((None, None, 1))
    kernel = np.zeros(layer.cell.kernel.shape, "float32")
    g = 2 + 2 + 2
    kernel[0, g] = 1.0
    bias = np.full(layer.cell.bias.shape, 50.0, "float32")
    bias[g] = 0.0
    layer.cell.kernel.assign(kernel)
    layer.cell.bias.assign(bias)
    x = np.ones((64, 6, 1), "float32")

    h = np.round(array(layer(x, training=True)[2])).ravel()

    assert set(h) == {0.0, 12.0}


def fit_once(make, seed, rng_seed=0):
    keras.utils.set_random_seed(123)
    rng = np.random.default_rng(rng_seed)
    layer = make(
        units=4,
        memory_slots=3,
        noise_scale=1.0,
        zoneout=0.2,
        dropout=0.2,
        recurrent_dropout=0.2,
        kernel_initializer=keras.initializers.GlorotUniform(seed=1),
        recurrent_initializer=keras.initializers.GlorotUniform(seed=2),
        seed=seed,
    )
    model = keras.Sequential(
        [
            keras.Input((5, FEATURES)),
            layer,
            keras.layers.Dense(
                1, kernel_initializer=keras.initializers.HeNormal(seed=3)
            ),
        ]
    )
    model.compile("sgd", "mse")
    x = rng.normal(size=(8, 5, FEATURES)).astype("float32")
    y = rng.normal(size=(8, 1)).astype("float32")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.slow("tensorflow")
@each_form
def test_a_seed_reproduces_a_whole_fit(make):
    first, again, other = (fit_once(make, seed) for seed in (5, 5, 6))

    for a, b in zip(first, again):
        np.testing.assert_array_equal(a, b)
    assert any(np.abs(a - b).max() > 1e-5 for a, b in zip(first, other))


@pytest.mark.slow("tensorflow")
def test_the_global_seed_reproduces_an_unseeded_layer():
    runs = [fit_once(ARMIN, None) for _ in range(2)]

    for a, b in zip(*runs):
        np.testing.assert_array_equal(a, b)


def test_layers_of_neighbouring_seeds_share_no_noise():
    draws = []
    for seed in (1, 2, 3):
        cell = ARMINCell(2, memory_slots=8, noise_scale=1.0, seed=seed)
        for _ in range(4):
            step_noise, _ = cell.draw_noise(1, 1)
            draws.append(tuple(np.ravel(array(step_noise.gumbel))))

    assert len(set(draws)) == len(draws)


def test_gumbel_noise_is_finite_and_has_the_right_moments():
    seeds = keras.random.SeedGenerator(1)
    draws = array(noise.gumbel((100_000,), seeds))

    assert np.isfinite(draws).all()
    assert draws.mean() == pytest.approx(0.5772, abs=0.02)
    assert draws.var() == pytest.approx(np.pi**2 / 6, abs=0.05)


def test_extreme_uniforms_give_finite_noise(monkeypatch):
    extremes = ops.convert_to_tensor(np.array([0.0, 1.0], "float32"))
    monkeypatch.setattr(keras.random, "uniform", lambda *a, **k: extremes)

    assert np.isfinite(array(noise.gumbel((2,), None))).all()


@pytest.mark.slow("jax", "tensorflow")
@each_form
def test_a_failed_call_leaves_no_stale_noise(make):
    """A trace that dies half-way must not hand its seed to the next call."""
    failing = [True]

    def fragile(x):
        if failing[0]:
            raise RuntimeError("half-way")
        return x

    layer = make(units=2, memory_slots=3, noise_scale=1.0, activation=fragile)
    model = keras.Sequential([keras.Input((3, FEATURES)), layer])
    model.compile("sgd", "mse")
    x = np.zeros((2, 3, FEATURES), "float32")
    with pytest.raises(RuntimeError, match="half-way"):
        model.fit(x, np.zeros((2, 3)), verbose=0)
    failing[0] = False

    assert tuple(layer(x, training=True).shape) == (2, 3)
    model.fit(x, np.zeros((2, 3)), verbose=0)


@pytest.mark.slow("jax")
def test_the_bare_cell_called_alone_draws_fresh_noise():
    rnn = reader(as_rnn)
    states = rnn.cell.get_initial_state(batch_size=40)
    x = np.zeros((40, FEATURES), "float32")
    a, b = (
        np.round(array(rnn.cell(x, states, training=True)[0])[:, 2] * 2)
        for _ in range(2)
    )

    assert (a != b).any()


@pytest.mark.slow("jax")
def test_left_padded_samples_do_not_freeze_the_noise_of_others():
    """Sample 0 writes nothing while the others step."""
    rnn = reader(as_rnn)
    mask = np.ones((3, SLOTS), bool)
    mask[0, :-1] = False
    x = np.zeros((3, SLOTS, FEATURES), "float32")
    slots = slots_read(rnn(x, mask=mask, training=True))

    assert len(set(slots[1])) > 3 and len(set(slots[2])) > 3
