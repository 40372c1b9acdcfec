"""Temperature and noise: weights, schedules of the layer, or callbacks."""

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin.callbacks import NoiseAnnealing
from keras_armin.callbacks import TemperatureAnnealing
from tests.helpers.common import BACKEND
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import TIME
from tests.helpers.common import array
from tests.helpers.common import each_form
from tests.helpers.common import inputs


def halving(start=8.0):
    """start, start / 2, start / 4, ... one step each."""
    return keras.optimizers.schedules.ExponentialDecay(start, 1, 0.5)


def scheduled(**options):
    return ARMIN(4, 3, temperature=halving(), **options)


def fit(model, rng, batches=3, epochs=1, **options):
    x = inputs(rng, BATCH * batches)
    y = np.zeros((BATCH * batches, 1))
    return model.fit(
        x, y, batch_size=BATCH, epochs=epochs, verbose=0, **options
    )


def model_with(layer):
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), layer, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def test_a_schedule_counts_training_calls(rng):
    layer = scheduled()
    x = inputs(rng)
    layer.build(x.shape)
    seen = [(0, float(layer.temperature.numpy()))]
    for training in (True, False, True, True, None):
        layer(x, training=training)
        seen.append(
            (
                int(layer.temperature_step.numpy()),
                float(layer.temperature.numpy()),
            )
        )

    assert seen == [(0, 8.0), (1, 8.0), (1, 8.0), (2, 4.0), (3, 2.0), (3, 2.0)]


@pytest.mark.slow("jax", "tensorflow")
def test_a_schedule_counts_batches_of_fit_alone(rng):
    layer = scheduled()
    model = model_with(layer)
    fit(model, rng, batches=3, epochs=2, validation_split=0.4)
    model.predict(inputs(rng), verbose=0)
    model.evaluate(inputs(rng), np.zeros((BATCH, 1)), verbose=0)

    # Three batches, less 0.4 for validation: two of them, in each epoch.
    assert int(layer.temperature_step.numpy()) == 4
    assert float(layer.temperature.numpy()) == 1.0


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=False):
        return self.layer(x, training=training)[:, :1]


@pytest.mark.slow("tensorflow")
def test_building_a_model_does_not_count(rng):
    layer = scheduled()
    x = keras.Input((TIME, FEATURES))
    model = keras.Model(x, layer(x, training=True))
    keras.models.clone_model(model)
    assert int(layer.temperature_step.numpy()) == 0

    inner = scheduled()
    subclassed = Subclassed(inner)
    subclassed.compile("sgd", "mse")
    fit(subclassed, rng, batches=2)
    assert int(inner.temperature_step.numpy()) == 2


@pytest.mark.slow("jax", "tensorflow")
def test_the_schedule_and_its_count_are_saved(rng, tmp_path):
    layer = scheduled()
    model = model_with(layer)
    fit(model, rng, batches=2)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")

    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = model_with(scheduled())
    again.load_weights(tmp_path / "model.weights.h5")

    for copy in (loaded.layers[0], again.layers[0]):
        assert int(copy.temperature_step.numpy()) == 2
        assert float(copy.temperature.numpy()) == 4.0
    fit(loaded, rng, batches=1)
    assert float(loaded.layers[0].temperature.numpy()) == 2.0


@pytest.mark.slow("jax", "tensorflow")
def test_a_schedule_that_ends_at_zero_stays_finite(rng):
    layer = ARMIN(
        4, 3, temperature=keras.optimizers.schedules.CosineDecay(2.0, 2)
    )
    model = model_with(layer)
    history = fit(model, rng, batches=2, epochs=3)

    assert np.isfinite(history.history["loss"]).all()
    assert float(layer.temperature.numpy()) == pytest.approx(1e-3)


@pytest.mark.slow("jax", "tensorflow")
def test_a_layer_with_a_schedule_can_be_used_twice_in_a_model(rng):
    layer = scheduled(return_sequences=True)
    a, b = keras.Input((TIME, FEATURES)), keras.Input((TIME, FEATURES))
    model = keras.Model([a, b], keras.layers.Dense(1)(layer(a) - layer(b)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = inputs(rng)
    model.fit([x, x[::-1].copy()], np.ones((BATCH, TIME, 1)), verbose=0)

    assert int(layer.temperature_step.numpy()) == 2


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("first", ["schedule", "number"])
@pytest.mark.slow("jax", "tensorflow")
def test_weights_pass_between_a_schedule_and_a_number(first, rng, tmp_path):
    layers = [scheduled(), ARMIN(4, 3, temperature=0.5)]
    if first == "number":
        layers.reverse()
    models = [model_with(layer) for layer in layers]
    fit(models[0], rng, batches=2)
    models[0].save_weights(tmp_path / "a.weights.h5")
    models[1].load_weights(tmp_path / "a.weights.h5")

    expected = 4.0 if first == "schedule" else 0.5
    assert float(layers[1].temperature.numpy()) == expected
    np.testing.assert_array_equal(
        array(layers[1].cell.kernel), array(layers[0].cell.kernel)
    )


@pytest.mark.slow("jax", "tensorflow")
def test_the_temperature_matters(rng):
    """Low temperatures bring a soft read close to the best slot."""
    x = inputs(rng)
    layer = ARMIN(4, 3, addressing="soft", learn_initial_state=True)
    layer.build(x.shape)
    for weight in layer.trainable_weights:
        weight.assign(rng.normal(size=tuple(weight.shape)))
    hard = ARMIN(4, 3, addressing="hard", learn_initial_state=True)
    hard.build(x.shape)
    hard.set_weights(layer.get_weights())
    # Until it is full the soft write is one-hot too.
    expected = array(hard(x[:, :3]))

    distances = {}
    for temperature in (10.0, 0.001):
        layer.temperature.assign(temperature)
        distances[temperature] = np.abs(array(layer(x[:, :3])) - expected).max()

    assert distances[10.0] > 0.1
    assert distances[0.001] < 1e-4


def test_a_cell_refuses_a_schedule():
    with pytest.raises(TypeError, match="temperature.*TemperatureAnnealing"):
        ARMINCell(4, temperature=halving())


class Temperatures(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        layer = self.model.layers[0]
        self.seen.append(float(array(layer.cell.temperature.value)))


@each_form
def test_the_callback_anneals_per_batch(make, rng):
    model = model_with(make(units=4, memory_slots=3))
    seen = Temperatures()
    history = fit(
        model, rng, 3, 2, callbacks=[TemperatureAnnealing(halving()), seen]
    )

    assert seen.seen == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25]
    assert history.history["temperature"] == [2.0, 0.25]
    assert float(array(model.layers[0].cell.temperature.value)) == 0.25


@each_form
def test_the_callback_anneals_per_epoch(make, rng):
    model = model_with(make(units=4, memory_slots=3))
    seen = Temperatures()
    callback = TemperatureAnnealing(lambda epoch: 3.0 - epoch, per="epoch")
    fit(model, rng, 2, 2, callbacks=[callback, seen])

    assert seen.seen == [3.0, 3.0, 2.0, 2.0]


@pytest.mark.slow("jax", "tensorflow")
def test_the_callback_can_be_used_again(rng):
    callback = TemperatureAnnealing(lambda epoch: 3.0, per="epoch")
    for _ in range(2):
        layer = ARMIN(4, 3)
        fit(model_with(layer), rng, 1, callbacks=[callback])
        assert float(layer.temperature.numpy()) == 3.0


@pytest.mark.slow("jax", "tensorflow")
def test_the_callback_stays_above_zero(rng):
    layer = ARMIN(4, 3)
    history = fit(
        model_with(layer), rng, callbacks=[TemperatureAnnealing(lambda _: 0.0)]
    )

    assert float(layer.temperature.numpy()) == pytest.approx(1e-3)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.slow("jax", "tensorflow")
def test_the_callback_goes_on_counting_in_the_next_fit(rng):
    model = model_with(ARMIN(4, 3))
    callback, seen = TemperatureAnnealing(halving()), Temperatures()
    for _ in range(2):
        fit(model, rng, 2, callbacks=[callback, seen])

    assert seen.seen == [8.0, 4.0, 2.0, 1.0]
    start = TemperatureAnnealing(halving(), initial_step=3)
    fit(model, rng, 1, callbacks=[start, seen])
    assert seen.seen[-1] == 1.0


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.skipif(
    BACKEND == "torch", reason="Keras refuses steps_per_execution on torch"
)
def test_the_callback_counts_batches_of_longer_executions(rng):
    model = model_with(ARMIN(4, 3))
    model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=2)
    callback = TemperatureAnnealing(halving())
    fit(model, rng, 4, 2, callbacks=[callback])

    assert callback.step == 8
    assert float(model.layers[0].temperature.numpy()) == 8.0 / 2**6


@pytest.mark.slow("jax", "tensorflow")
def test_the_callback_finds_cells_at_any_depth(rng):
    inner = keras.Sequential(
        [
            keras.layers.Bidirectional(ARMIN(4, 3, return_sequences=True)),
            keras.layers.RNN([keras.layers.GRUCell(3), ARMINCell(4, 3)]),
        ]
    )
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), inner, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    fit(model, rng, 1, callbacks=[TemperatureAnnealing(halving())])
    wrapper, stack = inner.layers
    cells = [
        wrapper.forward_layer.cell,
        wrapper.backward_layer.cell,
        stack.cell.cells[1],
    ]

    assert [float(array(c.temperature.value)) for c in cells] == [8.0] * 3


@pytest.mark.slow("jax")
def test_the_callback_says_what_is_wrong(rng):
    with pytest.raises(TypeError, match="schedule"):
        TemperatureAnnealing(0.5)
    with pytest.raises(ValueError, match="`initial_step` must be .*-1"):
        TemperatureAnnealing(halving(), initial_step=-1)
    with pytest.raises(TypeError, match="`initial_step` must be .*'a'"):
        TemperatureAnnealing(halving(), initial_step="a")
    with pytest.raises(ValueError, match="per.*'batch', 'epoch'.*'step'"):
        TemperatureAnnealing(halving(), per="step")
    with pytest.raises(ValueError, match="has its own schedule"):
        fit(
            model_with(scheduled()),
            rng,
            callbacks=[TemperatureAnnealing(halving())],
        )
    with pytest.raises(ValueError, match="no ARMIN"):
        fit(
            model_with(keras.layers.LSTM(2)),
            rng,
            callbacks=[TemperatureAnnealing(halving())],
        )
    with pytest.raises(
        ValueError, match="at least 0. Received: -1.0 at step 0"
    ):
        fit(
            model_with(ARMIN(4)),
            rng,
            callbacks=[TemperatureAnnealing(lambda step: -1.0)],
        )


# --- noise ------------------------------------------------------------------


@pytest.mark.slow("jax", "tensorflow")
def test_the_noise_follows_a_schedule_of_its_own(rng, tmp_path):
    layer = ARMIN(4, 3, noise_scale=halving(), temperature=halving(2.0))
    model = model_with(layer)
    fit(model, rng, batches=3)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[0]
    again = ARMIN(4, 3, noise_scale=halving())
    model_with(again).load_weights(tmp_path / "model.weights.h5")

    for copy in (layer, loaded, again):
        assert int(copy.noise_scale_step.numpy()) == 3
        assert float(copy.noise_scale.numpy()) == 2.0
        assert float(copy.temperature.numpy()) == 0.5


@pytest.mark.slow("jax", "tensorflow")
def test_a_schedule_may_start_without_noise_and_end_so(rng):
    up_and_down = keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [0.0, 3.0, 0.0]
    )
    layer = ARMIN(4, 3, noise_scale=up_and_down)
    model, seen = model_with(layer), Noises()
    fit(model, rng, batches=3, callbacks=[seen])

    assert seen.seen == [0.0, 3.0, 0.0]


class Noises(Temperatures):
    def on_train_batch_end(self, batch, logs=None):
        cell = self.model.layers[0].cell
        self.seen.append(float(array(cell.noise_scale.value)))


@pytest.mark.slow("jax", "tensorflow")
@each_form
def test_the_callback_anneals_the_noise(make, rng):
    model = model_with(make(units=4, memory_slots=3, noise_scale=1.0))
    seen = Noises()
    history = fit(model, rng, callbacks=[NoiseAnnealing(halving()), seen])

    assert seen.seen == [8.0, 4.0, 2.0]
    assert history.history["noise_scale"] == [2.0]


def test_what_has_no_noise_cannot_be_annealed(rng):
    with pytest.raises(ValueError, match="`noise_scale=0` never draws"):
        fit(model_with(ARMIN(4, 3)), rng, callbacks=[NoiseAnnealing(halving())])
    with pytest.raises(TypeError, match="noise_scale.*NoiseAnnealing"):
        ARMINCell(4, noise_scale=halving())
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="`noise_scale` must be"):
            ARMIN(4, noise_scale=value)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_weights_pass_between_layers_with_and_without_noise(first, tmp_path):
    layers = [ARMIN(4, 3, noise_scale=x) for x in (first, 1.0 - first)]
    models = [model_with(layer) for layer in layers]
    models[0].save_weights(tmp_path / "a.weights.h5")
    models[1].load_weights(tmp_path / "a.weights.h5")

    np.testing.assert_array_equal(
        array(layers[1].cell.kernel), array(layers[0].cell.kernel)
    )
