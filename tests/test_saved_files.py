"""Files that were written by earlier versions still load.

tests/saved_0_1 holds what version 0.1 wrote, on JAX: a layer with its defaults
and a stack with most options, each as a whole model and as weights alone.
"""

import pathlib

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell

FOLDER = pathlib.Path(__file__).with_name("saved_0_1")
OUTPUTS = np.load(FOLDER / "outputs.npz")


@pytest.mark.parametrize("name", ["plain", "options"])
def test_a_model_of_0_1_gives_the_same_numbers(name):
    model = keras.models.load_model(FOLDER / f"{name}.keras")

    np.testing.assert_allclose(
        model.predict(OUTPUTS["x"], verbose=0), OUTPUTS[name], atol=1e-6
    )


@pytest.mark.parametrize("name", ["plain", "options"])
def test_weights_of_0_1_give_the_same_numbers(name):
    model = keras.models.load_model(FOLDER / f"{name}.keras")
    for weight in model.weights:
        weight.assign(weight + 1)
    model.load_weights(FOLDER / f"{name}.weights.h5")

    np.testing.assert_allclose(
        model.predict(OUTPUTS["x"], verbose=0), OUTPUTS[name], atol=1e-6
    )


def test_weights_of_0_1_are_not_taken_for_those_of_new_defaults():
    def model(**arguments):
        layer = ARMIN(4, memory_slots=3, **arguments)
        return keras.Sequential(
            [keras.Input((None, 3)), layer, keras.layers.Dense(2)]
        )

    with pytest.raises(ValueError, match=r"\*\*keras_armin.PAPER"):
        model().load_weights(FOLDER / "plain.weights.h5")
    old = model(**keras_armin.PAPER)
    old.load_weights(FOLDER / "plain.weights.h5")

    np.testing.assert_allclose(
        old.predict(OUTPUTS["x"], verbose=0), OUTPUTS["plain"], atol=1e-6
    )


def test_a_model_of_0_1_trains_as_it_did():
    model = keras.models.load_model(FOLDER / "plain.keras")
    layer = model.layers[0]

    assert float(layer.noise_scale.numpy()) == 1.0
    assert layer.recency_addressing is False
    assert layer.state_activation is keras.activations.linear


@pytest.mark.parametrize("cls", [ARMIN, ARMINCell])
def test_a_config_without_the_new_arguments_means_the_old_defaults(cls):
    config = cls(4, noise_scale=0.0, recency_addressing=True).get_config()
    meant = {
        "noise_scale": 1.0,
        "recency_addressing": False,
        "unit_gate_bias": False,
    }
    for name in meant:
        del config[name]
    old = cls.from_config(config).get_config()

    assert {name: old[name] for name in meant} == meant
