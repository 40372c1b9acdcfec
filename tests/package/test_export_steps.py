"""Exported steps, run one after another without Keras."""

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import UNITS
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.exported import run_exported
from tests.package.test_export import FORMATS

STEPS = 1000


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    "format",
    [
        FORMATS[0],
        *(pytest.param(x, marks=pytest.mark.slow) for x in FORMATS[1:]),
    ],
)
def test_an_exported_step_equals_the_sequence_over_a_thousand_steps(
    format, tmp_path, rng
):
    model = keras.Sequential(
        [
            keras.Input((None, FEATURES), name="x"),
            ARMIN(UNITS, SLOTS, layer_norm=True, return_sequences=True),
            keras.layers.Dense(3),
        ]
    )
    randomise(model, rng)
    step = keras_armin.step_model(model)
    file = tmp_path / f"step{keras_armin.export_lib.ENDINGS[format]}"

    keras_armin.export(step, file, format)

    sequences = [inputs(rng, 1, STEPS)]
    if format != "litert":
        # Once, in a whole run of the suite, a LiteRT step was wrong after its
        # batch size had changed. It could not be made to happen again.
        sequences.append(inputs(rng, 3, 20))
    calls = [
        {"x": x, **initial_states(step, batch_size=len(x))} for x in sequences
    ]
    found = run_exported(tmp_path, {"step": (format, file, calls)}, True)
    for x, (stepped,) in zip(sequences, found["step"]):
        whole = model.predict(x, verbose=0)  # compiled, unlike a call
        np.testing.assert_allclose(stepped, whole, atol=1e-4)


def initial_states(step, batch_size):
    names = [x.name for x in step.inputs[-step.num_states :]]
    return dict(zip(names, step.initial_states(batch_size)))
