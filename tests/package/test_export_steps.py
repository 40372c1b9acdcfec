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
from tests.helpers.exported import call_model
from tests.helpers.exported import run_exported
from tests.package.test_export import FORMATS
from tests.package.test_export import NATIVE

STEPS = 1000


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
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


def step_with_call(rng):
    """A step of two outputs, the first also a state, and a call of it."""
    x = keras.Input((None, FEATURES), name="x")
    y = ARMIN(UNITS, SLOTS, name="reader")(x)
    # A name that a converter may give to some value by itself.
    model = keras.Model(x, [y, keras.layers.Softmax(name="softmax")(y)])
    randomise(model, rng)
    step = keras_armin.step_model(model, reads=True)
    return step, {"x": inputs(rng, 2)[:, 0], **initial_states(step, 2)}


@pytest.mark.slow("jax", "torch")
def test_an_onnx_step_names_its_outputs(tmp_path, rng):
    import onnxruntime

    step, call = step_with_call(rng)
    keras_armin.export(step, tmp_path / "step.onnx")

    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    assert [x.name for x in session.get_outputs()] == step.output_names
    given = {x.name: call[x.name] for x in session.get_inputs()}
    for found, expected in zip(
        session.run(None, given), call_model(step, call), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow("jax")
@pytest.mark.skipif(NATIVE == "torch", reason="refused, see test_export.py")
def test_a_saved_step_works_by_name_and_in_order(tmp_path, rng):
    import tensorflow as tf

    step, call = step_with_call(rng)
    keras_armin.export(step, tmp_path / "step")

    loaded = tf.saved_model.load(tmp_path / "step")
    call = {name: tf.constant(x) for name, x in call.items()}
    by_name = loaded.signatures["serving_default"](**call)
    in_order = loaded.serve(list(call.values()))
    assert by_name.keys() == set(step.output_names)
    for name, found, expected in zip(
        step.output_names, in_order, call_model(step, call), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_array_equal(by_name[name], found)


def initial_states(step, batch_size):
    names = [x.name for x in step.inputs[-step.num_states :]]
    return dict(zip(names, step.initial_states(batch_size)))
