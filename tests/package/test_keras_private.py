"""The private Keras API that the package uses behaves as expected."""

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import keras_private
from tests.helpers.common import BACKEND
from tests.helpers.common import array


class Probe(keras_private.DropoutRNNCell, keras.layers.Layer):
    """Notes what `keras.layers.RNN` does before and after its loop."""

    state_size = output_size = 2

    def __init__(self):
        super().__init__()
        self.events = []

    def get_dropout_mask(self, step_input):
        self.events.append(("before", keras_private.is_training()))

    def get_recurrent_dropout_mask(self, step_input):
        pass

    def reset_dropout_mask(self):
        self.events.append("after")

    def reset_recurrent_dropout_mask(self):
        pass

    def call(self, inputs, states, training=False):
        self.events.append("step")
        return states[0], states


@pytest.mark.parametrize("training", [True, False])
def test_rnn_prepares_the_cell_before_each_loop_and_training_is_known(training):
    cell = Probe()
    keras.layers.RNN(cell)(np.zeros((1, 2, 2), "float32"), training=training)

    assert cell.events[0] == ("before", training)
    assert "step" in cell.events
    assert cell.events[-1] == "after"


def test_training_is_inherited_from_the_model():
    cell = Probe()
    model = keras.Sequential([keras.Input((2, 2)), keras.layers.RNN(cell)])
    cell.events.clear()
    model(np.zeros((1, 2, 2), "float32"), training=True)

    assert cell.events[0] == ("before", True)


def test_outside_of_a_call_it_is_unknown():
    assert keras_private.is_training() is None


def test_masks_are_attached_to_tensors():
    x = np.array([[1, 0]])
    embedded = keras.layers.Embedding(2, 3, mask_zero=True)(x)
    mask = keras_private.attached_mask(embedded)

    assert keras.ops.convert_to_numpy(mask).tolist() == [[True, False]]
    assert keras_private.attached_mask(keras.ops.zeros((1, 2))) is None


def test_all_layers_finds_cells():
    layer = ARMIN(2)
    wrapped = keras.layers.Bidirectional(ARMIN(2))
    model = keras.Sequential([keras.Sequential([layer]), wrapped])
    found = keras_private.all_layers(model)

    for cell in (layer.cell, wrapped.forward_layer.cell):
        assert sum(cell is other for other in found) == 1


def dtypes_of_results():
    """Of three functions, no two backends narrow the same ones."""
    x = keras.ops.ones((2, 2), dtype="float64")
    results = [keras.ops.tanh(x), keras.ops.matmul(x, x), keras.ops.mean(x)]
    return {keras.backend.standardize_dtype(y.dtype) for y in results}


class Float64Layer:
    compute_dtype = "float64"

    @keras_private.preserve_float64
    def call(self):
        return dtypes_of_results()


def test_keras_still_narrows_float64_and_we_keep_it(float64):
    """If the first part fails, `preserve_float64` is no longer needed."""
    outside = dtypes_of_results()
    assert ("float32" in outside) == (BACKEND != "tensorflow")

    assert Float64Layer().call() == {"float64"}
    assert dtypes_of_results() == outside


def test_float64_without_x64_stays_what_jax_makes_of_it():
    expected = "float32" if BACKEND == "jax" else "float64"

    assert Float64Layer().call() == {expected}


def test_a_model_can_be_run_through_with_other_inputs():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    extra = keras.Input((2,))
    given = keras.Input((3,))
    functional = keras.Model(model.inputs, model.outputs)

    (output,) = keras_private.run_through_graph(
        functional, [given], lambda layer, x: layer(x) + extra
    )

    run = keras.Model([given, extra], output)
    x, ones = np.ones((1, 3)), np.ones((1, 2))
    expected = array(model(x)) + ones
    np.testing.assert_allclose(array(run([x, ones])), expected, rtol=1e-6)


def test_a_callback_can_set_the_first_epoch_of_a_fit():
    class StartLater(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            keras_private.set_initial_epoch(self.model, 2)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((2, 1))
    arguments = {"epochs": 3, "verbose": 0}
    fitted = model.fit(x, x, **arguments, callbacks=[StartLater()])
    assert fitted.epoch == [2]
    keras_private.set_initial_epoch(model, None)
    assert model.fit(x, x, **arguments).epoch == [0, 1, 2]


def test_train_asked_for_by_fit_is_told_from_that_of_a_user():
    """Only on PyTorch is a layer a module, and has `fit` such a mode."""
    asked = []

    class Layer(keras.layers.Layer):
        def train(self, mode=True):
            asked.append((mode, keras_private.is_called_by_keras()))
            return super().train(mode)

        def call(self, x):
            return x

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = Layer()

        def call(self, x):
            return self.inner(x)

    model = Model()
    model.compile(loss="mse")
    x = np.zeros((2, 1))
    model.fit(x, x, verbose=0)
    if BACKEND != "torch":
        assert not asked
        return
    assert {(True, True), (False, True)} == set(asked)
    asked.clear()
    model.train()
    model.eval()

    assert asked == [(True, False), (False, False)]
