"""Files that were written by earlier versions still load.

tests/saved_0_1 holds what version 0.1 wrote, on JAX: a layer with its defaults
and a stack with most options, each as a whole model and as weights alone.
tests/saved_0_2 holds the same from a state of 0.2 before slots became narrower
and what is written to them bounded.
"""

import pathlib

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin import ARMINCell
from tests.helpers.common import array

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "saved_0_1"

each_file = pytest.mark.parametrize(
    "path",
    [
        pytest.param(HERE / folder / name, id=f"{folder}/{name}")
        for folder in ("saved_0_1", "saved_0_2")
        for name in ("plain", "options")
    ],
)


def assert_saved_outputs(model, path):
    saved = np.load(path.with_name("outputs.npz"))
    # Not `predict`: it may compile, which takes minutes on torch.
    np.testing.assert_allclose(
        array(model(saved["x"])), saved[path.name], atol=1e-6
    )


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_file
def test_an_earlier_model_gives_the_same_numbers(path):
    assert_saved_outputs(keras.models.load_model(f"{path}.keras"), path)


@pytest.mark.slow_after(1, "jax", "tensorflow")
@each_file
def test_earlier_weights_give_the_same_numbers(path):
    model = keras.models.load_model(f"{path}.keras")
    for weight in model.weights:
        weight.assign(weight + 1)
    model.load_weights(f"{path}.weights.h5")

    assert_saved_outputs(model, path)


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

    assert_saved_outputs(old, FOLDER / "plain")


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
        "write_activation": "linear",
    }
    for name in meant:
        del config[name]
    old = cls.from_config(config).get_config()

    assert {name: old[name] for name in meant} == meant
