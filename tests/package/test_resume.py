"""Training that is interrupted and resumed: the same as in one go."""

import json

import keras
import numpy as np
import pytest

from keras_armin import ARMIN
from keras_armin import callbacks
from keras_armin.callbacks import ResumeTraining
from tests.helpers.common import BACKEND
from tests.helpers.common import array

BATCH, TIME, FEATURES = 4, 3, 2
EPOCHS, STEPS = 3, 2


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends training in the middle of the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 0):
            raise Interrupted


def build_model(seed=1):
    """Has noise, dropout, schedules and carried states."""
    keras.utils.set_random_seed(seed)
    schedule = keras.optimizers.schedules.PolynomialDecay(2.0, 9, 0.5)
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH, TIME, FEATURES)),
            ARMIN(
                3,
                memory_slots=2,
                memory_dim=2,
                noise_scale=1.0,
                addressing="relaxed",
                temperature=schedule,
                stateful=True,
                return_sequences=True,
            ),
            keras.layers.Dropout(0.3),
            keras.layers.SimpleRNN(2, stateful=True),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.1, EPOCHS * STEPS)
    model.compile(keras.optimizers.Adam(rate), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, *others, epochs=EPOCHS):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(STEPS * BATCH, TIME, FEATURES)).astype("float32")
    y = rng.normal(size=(STEPS * BATCH, 2)).astype("float32")
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(others),
    )


def variables(model):
    return [*model.variables, *model.optimizer.variables]


def different(model, other):
    """The names of the variables that differ."""
    found, expected = variables(model), variables(other)
    assert len(found) == len(expected) > 20
    return {
        x.name
        for x, y in zip(found, expected)
        if not np.allclose(array(x), array(y), rtol=1e-6, atol=1e-7)
    }


@pytest.fixture(scope="module")
def whole():
    model = build_model()
    fit(model)
    return model


def interrupted(callback):
    with pytest.raises(Interrupted):
        fit(build_model(), callback, Interrupt())


def test_an_interrupted_fit_ends_as_a_whole_one(whole, tmp_path):
    path = tmp_path / "new" / "resume.npz"
    interrupted(ResumeTraining(path))
    resume = ResumeTraining(path)
    assert resume.completed_epochs == 2
    model = build_model(seed=2)
    assert different(model, whole)
    history = fit(model, resume)

    assert different(model, whole) == set()
    assert history.epoch == [2]
    assert [logs["epoch"] for logs in resume.history] == [0, 1, 2]
    expected = whole.history.history["loss"]
    found = [logs["loss"] for logs in resume.history]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ResumeTraining(path).history == resume.history
    assert [p.name for p in path.parent.iterdir()] == ["resume.npz"]


@pytest.mark.slow("tensorflow")
def test_backup_and_restore_loses_seeds_and_states(whole, tmp_path):
    """If this fails, `ResumeTraining` may no longer be needed."""
    callback = keras.callbacks.BackupAndRestore(
        tmp_path, delete_checkpoint=False
    )
    interrupted(callback)
    model = build_model(seed=2)
    fit(model, keras.callbacks.BackupAndRestore(tmp_path))

    lost = different(model, whole)
    assert {"seed_generator_state", "state_memory"} <= lost, lost
    assert "kernel" in lost, "so the weights are others"
    assert "iterations" not in lost


@pytest.mark.slow("jax", "tensorflow")
def test_a_complete_run_is_restored_and_can_be_continued(whole, tmp_path):
    path = tmp_path / "resume.npz"
    fit(build_model(), ResumeTraining(path))
    model = build_model(seed=2)
    assert fit(model, ResumeTraining(path)).epoch == []
    assert different(model, whole) == set()
    # Without the callback `fit` starts with the first epoch again.
    assert fit(model, epochs=1).epoch == [0]
    assert fit(model, ResumeTraining(path), epochs=EPOCHS + 1).epoch == [EPOCHS]


@pytest.mark.slow("tensorflow")
def test_variables_can_be_restored_without_training(whole, tmp_path):
    path = tmp_path / "resume.npz"
    fit(build_model(), ResumeTraining(path))
    resume, model = ResumeTraining(path), build_model(seed=2)
    resume.set_model(model)
    resume.restore()
    assert different(model, whole) == set()


@pytest.mark.slow("jax", "tensorflow")
def test_the_callbacks_of_this_package_go_with_it(tmp_path):
    """Annealing by epochs, and states apart for validation."""

    def others():
        return [
            callbacks.NoiseAnnealing(lambda epoch: 1 / (1 + epoch), "epoch"),
            callbacks.ValidationState(),
        ]

    def train(model, *more):
        fit(model, *others(), *more)
        return model

    expected = train(build_model())
    with pytest.raises(Interrupted):
        train(build_model(), ResumeTraining(tmp_path / "x"), Interrupt())
    model = train(build_model(seed=2), ResumeTraining(tmp_path / "x"))
    assert different(model, expected) == set()


def dense_model(units=2, optimizer="adam", **options):
    """For what does not depend on the model."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units, **options)]
    )
    model.compile(optimizer, "mse")
    return model


def fit_dense(model, path, epochs=1):
    x, y = np.ones((2, 3)), np.ones((2, 1))
    callback = ResumeTraining(path)
    model.fit(x, y, epochs=epochs, verbose=0, callbacks=[callback])


def test_bfloat16_comes_back(tmp_path):
    first, second = (dense_model(dtype="bfloat16") for _ in range(2))
    fit_dense(first, tmp_path / "x")
    fit_dense(second, tmp_path / "x")
    for found, expected in zip(second.variables, first.variables):
        assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
        np.testing.assert_array_equal(array(found), array(expected))


def test_damaged_files_are_explained(tmp_path):
    path = tmp_path / "resume.npz"
    fit_dense(dense_model(), path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing of the kind", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="resume.npz is damaged.*Delete"):
            ResumeTraining(path)
    np.savez(path, history=json.dumps([]), other=np.zeros(2))
    with pytest.raises(ValueError, match="resume.npz is damaged.*variable_0"):
        ResumeTraining(path)


def test_a_file_of_another_model_is_explained(tmp_path):
    path = tmp_path / "resume.npz"
    fit_dense(dense_model(), path)
    words = r"does not fit.*kernel' of shape \(3, 4\), and .* shape \(3, 2\)"
    with pytest.raises(ValueError, match=words):
        fit_dense(dense_model(units=4), path)
    with pytest.raises(
        ValueError, match=r"does not fit.*have 4 variables, and the file 8"
    ):
        fit_dense(dense_model(optimizer="sgd"), path)


def test_a_kill_while_writing_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "resume.npz"
    fit_dense(dense_model(), path)

    def killed(file, **arrays):
        file.write(b"half of it")
        raise Interrupted

    monkeypatch.setattr(np, "savez", killed)
    with pytest.raises(Interrupted):
        fit_dense(dense_model(), path, epochs=2)
    assert ResumeTraining(path).completed_epochs == 1


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="other backends build the model in `fit`"
)
def test_a_model_that_is_not_built_is_explained(tmp_path):
    model = keras.Sequential([ARMIN(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is built before `fit`.*keras.Input"):
        model.fit(
            np.zeros((2, 3, 2)),
            np.zeros((2, 3)),
            callbacks=[ResumeTraining(tmp_path / "x")],
        )
