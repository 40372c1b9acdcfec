"""Bad input raises an error that names the argument and its value."""

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import ARMINCell
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import inputs

each_class = pytest.mark.parametrize("cls", [ARMIN, ARMINCell])

BAD_ARGUMENTS = [
    ("units", 0, ValueError, "a positive integer"),
    ("units", -3, ValueError, "a positive integer"),
    ("units", 2.5, TypeError, "a positive integer"),
    ("units", "8", TypeError, "a positive integer"),
    ("units", True, TypeError, "a positive integer"),
    ("units", None, TypeError, "a positive integer"),
    ("memory_slots", 0, ValueError, "a positive integer"),
    ("memory_slots", np.bool_(True), TypeError, "a positive integer"),
    ("memory_dim", -1, ValueError, "a positive integer"),
    ("memory_dim", 1.0, TypeError, "a positive integer"),
    ("memory_dim", "third", ValueError, 'a positive integer, None or "half"'),
    ("zoneout", 1.0, ValueError, r"a number in \[0, 1\)"),
    ("zoneout", -0.1, ValueError, r"a number in \[0, 1\)"),
    ("dropout", 1.5, ValueError, r"a number in \[0, 1\)"),
    ("dropout", "much", TypeError, r"a number in \[0, 1\)"),
    ("recurrent_dropout", float("nan"), ValueError, r"a number in \[0, 1\)"),
    ("recurrent_dropout", False, TypeError, r"a number in \[0, 1\)"),
    ("temperature", 0.0, ValueError, "a finite number above 0"),
    ("temperature", -1, ValueError, "a finite number above 0"),
    ("temperature", float("inf"), ValueError, "a finite number above 0"),
    ("temperature", "cold", TypeError, "a finite number above 0"),
    ("addressing", "gumbel", ValueError, "'hard', 'relaxed', 'soft'"),
    ("addressing", None, ValueError, "'hard', 'relaxed', 'soft'"),
    ("layer_norm", 1, TypeError, "True or False"),
    ("use_bias", "yes", TypeError, "True or False"),
    ("output_read", None, TypeError, "True or False"),
    ("seed", 1.5, TypeError, "an integer or None"),
]


@each_class
@pytest.mark.parametrize(("name", "value", "error", "takes"), BAD_ARGUMENTS)
def test_bad_arguments(cls, name, value, error, takes):
    arguments = {"units": 4, name: value}
    with pytest.raises(error, match=f"`{name}` must be .*{takes}") as caught:
        cls(**arguments)

    assert repr(value) in str(caught.value)


@each_class
def test_numpy_numbers_are_accepted(cls):
    layer = cls(
        np.int64(4),
        memory_slots=np.int32(3),
        memory_dim=np.uint8(2),
        zoneout=np.float32(0.5),
        temperature=np.float64(2.0),
        seed=np.int64(1),
        layer_norm=np.bool_(True),
    )
    config = layer.get_config()

    assert (config["units"], config["memory_slots"]) == (4, 3)
    assert all(
        type(config[n]) is int for n in ("units", "memory_slots", "seed")
    )
    assert type(config["layer_norm"]) is bool


def test_unknown_activations_and_initializers_are_rejected():
    with pytest.raises(ValueError, match="tahn"):
        ARMIN(4, activation="tahn")
    with pytest.raises(ValueError, match="glorrot"):
        ARMIN(4, kernel_initializer="glorrot")
    with pytest.raises(ValueError, match="no_such_argument"):
        ARMIN(4, no_such_argument=1)


def test_several_tensors_instead_of_one(rng):
    x = inputs(rng)
    with pytest.raises(ValueError, match="one tensor.*6 of.*initial_state="):
        ARMIN(UNITS, SLOTS)([x, *good_states()])


def test_a_function_is_not_a_schedule():
    with pytest.raises(TypeError, match="keras.optimizers.schedules"):
        ARMIN(UNITS, temperature=lambda step: 1.0)


@pytest.mark.parametrize("shape", [(3, 7), (3, 7, 4, 2)])
def test_inputs_of_a_wrong_rank(shape):
    got = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"\(batch, time, features\).*{got}"):
        ARMIN(UNITS)(np.zeros(shape, "float32"))
    with pytest.raises(ValueError, match=r"\(batch, time, features\)"):
        ARMIN(UNITS)(keras.Input(shape[1:]))


def test_a_forgotten_return_sequences_is_suggested(rng):
    with pytest.raises(ValueError, match="return_sequences=True.*Embedding"):
        ARMIN(UNITS)(ARMIN(UNITS)(inputs(rng)))


def test_another_number_of_features_than_at_first(rng):
    layer = ARMIN(UNITS)
    layer(inputs(rng))
    with pytest.raises(ValueError, match=r"None, 4\).*\(3, 7, 5\)"):
        layer(inputs(rng, features=5))


def test_unknown_features():
    with pytest.raises(ValueError, match="known number of features"):
        ARMIN(UNITS)(keras.Input((TIME, None)))


def test_an_empty_sequence():
    with pytest.raises(ValueError, match="at least one time step"):
        ARMIN(UNITS)(np.zeros((BATCH, 0, FEATURES), "float32"))


def test_unknown_time_with_unroll():
    with pytest.raises(ValueError, match="`unroll=True`.*number of time steps"):
        ARMIN(UNITS, unroll=True)(keras.Input((None, FEATURES)))


def good_states(batch=BATCH):
    width = -(-UNITS // 2)  # the default of `memory_dim`
    sizes = [UNITS + width, UNITS, SLOTS * width, 4, SLOTS]
    return [np.zeros((batch, size), "float32") for size in sizes]


def test_a_wrong_number_of_initial_states(rng):
    layer = ARMIN(UNITS, SLOTS)
    with pytest.raises(
        ValueError,
        match="`initial_state`.*5 tensors: output, h, memory, pointer.*2 of",
    ):
        layer(inputs(rng), initial_state=good_states()[:2])
    with pytest.raises(ValueError, match="`initial_state`.*5 tensors"):
        layer(
            keras.Input((TIME, FEATURES)), initial_state=[keras.Input((UNITS,))]
        )


def test_wrong_shapes_of_initial_states(rng):
    layer = ARMIN(UNITS, SLOTS)
    states = good_states()
    states[2] = np.zeros((BATCH, SLOTS, UNITS), "float32")
    with pytest.raises(
        ValueError, match=r"initial_state \(memory\).*\(3, 15\).*\(3, 5, 6\)"
    ):
        layer(inputs(rng), initial_state=states)
    with pytest.raises(ValueError, match=r"initial_state \(output\).*\(2, 9\)"):
        layer(inputs(rng), initial_state=good_states(batch=2))


def test_initial_states_that_are_no_tensors(rng):
    with pytest.raises(TypeError, match=r"initial_state \(output\).*tensor.*0"):
        ARMIN(UNITS, SLOTS)(inputs(rng), initial_state=[0] * 5)


def test_wrong_states_of_the_cell(rng):
    cell = ARMINCell(UNITS, SLOTS)
    x = inputs(rng)[:, 0]
    cell.build(x.shape)
    with pytest.raises(ValueError, match="`states`.*5 tensors.*3 of them"):
        cell(x, good_states()[:3])
    with pytest.raises(ValueError, match=r"`states \(output\)`.*\(2, 9\)"):
        cell(x, good_states(batch=2))


def test_the_initial_state_of_an_unbuilt_learning_cell():
    with pytest.raises(ValueError, match="must be built"):
        ARMINCell(UNITS, learn_initial_state=True).get_initial_state(2)


@pytest.mark.parametrize("name", ["mask", "reset"])
def test_masks_and_resets_of_a_wrong_shape(name, rng):
    layer = ARMIN(UNITS)
    wrong = np.ones((BATCH, TIME + 1), bool)
    with pytest.raises(ValueError, match=rf"`{name}`.*\(3, 7\).*\(3, 8\)"):
        layer(inputs(rng), **{name: wrong})
    symbolic = keras.Input((TIME + 1,), dtype="bool")
    with pytest.raises(ValueError, match=rf"`{name}`.*7\).*8\)"):
        layer(keras.Input((TIME, FEATURES)), **{name: symbolic})


def test_indices_are_no_reset(rng):
    layer = ARMIN(UNITS, SLOTS)

    with pytest.raises(ValueError, match=r"`reset` must be bool.*\[0, 2, 1\]"):
        layer(inputs(rng), reset=np.array([0, 2, 1]))


@pytest.mark.slow
def test_an_unsupported_backend_is_named():
    import os
    import subprocess
    import sys

    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    run = subprocess.run(
        [sys.executable, "-c", "import keras_armin"],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert run.returncode != 0
    assert "tensorflow, jax and torch" in run.stderr
