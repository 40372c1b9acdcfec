"""The examples' training: a kill and a resume, to the same bits.

The same file is the script that the test of the kill runs in processes of
its own: `python -m tests.examples.test_training FOLDER`.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

tf = pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

import keras  # noqa: E402

from examples.support import cli  # noqa: E402
from examples.support import networks  # noqa: E402
from examples.support import runs  # noqa: E402
from examples.support.cli import RunError  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
EPOCHS, STEPS = 4, 3
TINY = [
    *("--units", "3", "--slots", "2", "--memory-dim", "4"),
    # Noise, and a temperature that is counted: what a resume can get wrong.
    *("--zoneout", "0.2", "--temperature", "2", "--annealing", "8"),
]


def parse(*argv, preset=""):
    parser = cli.parser("")
    cli.add_run_options(parser, {"only": "there is no other"})
    networks.add_options(parser)
    return cli.parse(parser, argv, lambda arguments: preset)


def tiny_model(*argv):
    model = keras.Sequential(
        [
            keras.Input((4, 2)),
            networks.build(parse(*TINY, *argv)),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(1),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(0.1, EPOCHS * STEPS)
    model.compile(keras.optimizers.Adam(schedule), "mse")
    return model


def numbers(first_step):
    """Batches that are a function of the step."""

    def batch(step):
        seed = tf.stack([step, 1])
        x = tf.random.stateless_normal((5, 4, 2), seed)
        return x, tf.reduce_sum(x, axis=(1, 2))[:, None]

    return tf.data.Dataset.range(first_step, 10**6).map(batch)


def train(run, model, epochs=EPOCHS, **options):
    return run.train(
        model,
        numbers,
        epochs=epochs,
        steps_per_epoch=STEPS,
        validation_data=numbers(1000).take(1),
        monitor="val_loss",
        **options,
    )


class KillInTheMiddle(keras.callbacks.Callback):
    """Ends the process in the third epoch, as a full machine would."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def script(folder):
    """First an undisturbed run and one that is killed, then its resume."""
    folder = pathlib.Path(folder)
    runs.seed_everything(3, deterministic=True)
    resume = (folder / "killed").exists()
    if not resume:
        model = tiny_model()
        train(runs.Run(folder / "whole", {}), model)
        save(model, folder / "whole")
        runs.seed_everything(3, deterministic=True)
    run = runs.Run(folder / "killed", {}, resume=resume)
    model = tiny_model()
    train(run, model, callbacks=[] if resume else [KillInTheMiddle()])
    save(model, folder / "killed")


def save(model, folder):
    arrays = [keras.ops.convert_to_numpy(v.value) for v in model.variables]
    np.savez(folder / "variables.npz", *arrays)


def run_script(folder):
    return subprocess.run(
        [sys.executable, "-m", "tests.examples.test_training", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def rows(path):
    """The log without the time it took."""
    header, *lines = path.read_text().splitlines()
    seconds = header.split(",").index("seconds")
    return [
        [cell for i, cell in enumerate(line.split(",")) if i != seconds]
        for line in lines
    ]


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path):
    killed = run_script(tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole, resumed = tmp_path / "whole", tmp_path / "killed"
    assert len(rows(resumed / "log.csv")) == 2
    finished = run_script(tmp_path)
    assert finished.returncode == 0, finished.stderr

    with (
        np.load(whole / "variables.npz") as expected,
        np.load(resumed / "variables.npz") as found,
    ):
        assert len(expected.files) > 10
        for name in expected.files:
            np.testing.assert_array_equal(found[name], expected[name])
    assert len(rows(whole / "log.csv")) == EPOCHS
    assert rows(resumed / "log.csv") == rows(whole / "log.csv")
    model = tiny_model()
    best = []
    for folder in (whole, resumed):
        model.load_weights(folder / runs.BEST_WEIGHTS)
        best.append(model.get_weights())
    for expected, found in zip(*best):
        np.testing.assert_array_equal(found, expected)


def dense_model(units=1):
    """What a run is of makes no difference where this is used."""
    model = keras.Sequential(
        [
            keras.Input((4, 2)),
            keras.layers.Flatten(),
            keras.layers.Dense(units),
        ]
    )
    model.compile("adam", "mse")
    return model


def test_a_run_leaves_its_files_and_its_best_weights(tmp_path, capsys):
    # Validation is good after the first epoch only.
    class Forget(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = float(epoch)
            kept.append(self.model.get_weights())

    kept = []
    model = dense_model()
    run = runs.Run(tmp_path, {"seed": 1})
    history = train(run, model, epochs=2, callbacks=[Forget()])
    assert [logs["val_loss"] for logs in history] == [0.0, 1.0]
    assert run.epoch == 2 and run.seconds > 0
    assert run.best("val_loss")["epoch"] == 0
    assert run.best("val_loss", "max")["epoch"] == 1

    run.restore_best(model)
    for expected, found in zip(kept[0], model.get_weights()):
        np.testing.assert_array_equal(found, expected)
    run.finish({"loss": 0.5})
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": 0.5}
    assert capsys.readouterr().out.endswith('{"loss": 0.5}\n')
    assert list((tmp_path / "tensorboard").rglob("events.*"))
    # A finished run may be replaced, and nothing of it stays.
    runs.Run(tmp_path, {"seed": 2})
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["settings.json"]


def saved_run(folder, settings=None):
    """What a run of one epoch leaves, without training."""
    run = runs.Run(folder, settings or {})
    run.resume.set_model(dense_model())
    run.resume.on_epoch_end(0, {"val_loss": 1.0, "seconds": 2.5})
    return run


def test_a_run_stops_when_it_is_asked_to(tmp_path):
    model = dense_model()
    run = runs.Run(tmp_path, {})
    history = train(run, model, stop_when=lambda history: True)
    assert len(history) == 1
    # And does not go on when it is resumed.
    run = runs.Run(tmp_path, {}, resume=True)
    assert len(train(run, model, stop_when=lambda history: True)) == 1


def test_what_is_not_a_number_is_not_the_best(tmp_path):
    class Break(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = (float("nan"), 2.0, 3.0)[epoch]

    model = dense_model()
    run = runs.Run(tmp_path, {})
    train(run, model, epochs=1, callbacks=[Break()])
    assert run.best("val_loss") is None
    assert run.best_value("val_loss") is None
    assert not (tmp_path / runs.BEST_WEIGHTS).exists()
    run.restore_best(model)  # there is nothing to restore
    train(run, model, epochs=3, callbacks=[Break()])
    assert run.best("val_loss")["epoch"] == 1
    assert (tmp_path / runs.BEST_WEIGHTS).exists()
    (tmp_path / runs.BEST_WEIGHTS).write_bytes(b"cut off")
    with pytest.raises(RunError, match="best.weights.h5 is damaged"):
        run.restore_best(model)


def test_a_finished_run_that_goes_on_is_unfinished_again(tmp_path):
    model = dense_model()
    run = runs.Run(tmp_path, {})
    train(run, model, epochs=1)
    run.finish({})
    run = runs.Run(tmp_path, {}, resume=True)
    train(run, model, epochs=2)
    with pytest.raises(RunError, match="unfinished"):
        runs.Run(tmp_path, {})


def test_folders_tell_runs_apart():
    names = {
        cli.default_folder("copy", parse("--seed", str(seed)))
        for seed in (1, 2)
    }
    assert len(names) == 2


def test_an_unfinished_run_is_not_overwritten_by_accident(tmp_path):
    saved_run(tmp_path)
    with pytest.raises(RunError, match="unfinished.*--resume.*--overwrite"):
        runs.Run(tmp_path, {})
    runs.Run(tmp_path, {}, overwrite=True)
    assert not (tmp_path / runs.RESUME_FILE).exists()


def test_a_resume_with_other_settings_says_which(tmp_path):
    saved_run(tmp_path, {"units": 3, "seed": 1, "slots": 2})
    with pytest.raises(RunError) as caught:
        runs.Run(tmp_path, {"units": 4, "seed": 1, "new": True}, resume=True)

    message = str(caught.value)
    assert "units: 3 then, 4 now" in message
    assert "new: None then, True now" in message
    assert "seed" not in message


def test_a_resume_needs_a_run(tmp_path):
    with pytest.raises(RunError, match="there is no run in"):
        runs.Run(tmp_path / "missing", {}, resume=True)


def test_a_run_killed_before_its_first_save_begins_again(tmp_path):
    runs.Run(tmp_path, {})
    (tmp_path / "log.csv").write_text("epoch\n0\n")
    run = runs.Run(tmp_path, {}, resume=True)

    assert run.epoch == 0 and not (tmp_path / "log.csv").exists()


@pytest.mark.parametrize("name", [runs.RESUME_FILE, "settings.json"])
def test_damaged_files_are_explained(tmp_path, name):
    saved_run(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing of the kind"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(RunError, match=f"{name} is damaged"):
            runs.Run(tmp_path, {}, resume=True)


def test_a_resume_file_of_another_model_is_explained(tmp_path):
    saved_run(tmp_path)
    run = runs.Run(tmp_path, {}, resume=True)
    with pytest.raises(RunError, match="does not fit this model.*--overwrite"):
        train(run, dense_model(units=2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_without_a_traceback(number, capsys):
    # A shell makes its background jobs ignore SIGINT.
    shells = signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped, runs.explained_errors():
        os.kill(os.getpid(), number)
        signal.pause()

    assert stopped.value.code == 130
    assert "--resume" in capsys.readouterr().err
    assert signal.signal(number, shells) is before


def test_an_error_the_user_can_put_right_has_no_traceback():
    with pytest.raises(SystemExit, match="error: too small"):
        with runs.explained_errors():
            raise RunError("too small")
    with pytest.raises(ZeroDivisionError), runs.explained_errors():
        raise ZeroDivisionError


def test_an_interrupt_that_got_lost_ends_the_epoch(tmp_path):
    class Swallow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(batch)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            except KeyboardInterrupt:
                pass

    seen = []
    with pytest.raises(SystemExit), runs.explained_errors():
        train(
            runs.Run(tmp_path, {}),
            dense_model(),
            callbacks=[Swallow()],
        )
    assert seen == [0]


def test_options_come_before_the_preset_and_that_before_defaults():
    arguments = parse("--units", "5", preset="--units 6 --slots 7")

    assert (arguments.units, arguments.slots) == (5, 7)
    assert arguments.temperature == 1.0


def test_settings_leave_out_what_may_change():
    settings = cli.settings(
        parse("--output", "x", "--resume", "--minutes", "3", "--seed", "4")
    )

    assert settings["seed"] == 4 and settings["model"] == "armin"
    assert not {"output", "resume", "overwrite", "minutes"} & set(settings)
    assert settings["backend"] == keras.backend.backend()


def test_out_of_time_is_at_the_end_of_an_epoch():
    stop_when = cli.out_of_time(parse("--minutes", "0.5"))

    assert not stop_when([{"seconds": 29.0}])
    assert stop_when([{"seconds": 29.0}, {"seconds": 31.0}])
    assert not cli.out_of_time(parse())([{"seconds": 1e9}])


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        ("--units", "0", "at least 1"),
        ("--annealing", "-1", "at least 0"),
        ("--learning-rate", "0", "above 0"),
        ("--zoneout", "1", "at least 0 and below 1"),
    ],
)
def test_bad_options_are_explained(option, value, takes, capsys):
    with pytest.raises(SystemExit):
        parse(f"{option}={value}")
    assert f"{option}: must be {takes}" in capsys.readouterr().err


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_every_network_gives_finite_outputs(name, rng):
    layer = networks.build(
        parse("--model", name, *TINY, "--layer-norm"), return_sequences=True
    )
    model = keras.Sequential([keras.Input((5, 3)), layer])
    outputs = model.predict_on_batch(rng.normal(size=(2, 5, 3)))

    assert outputs.shape[:2] == (2, 5) and np.isfinite(outputs).all()
    assert np.ptp(outputs) > 0


@pytest.mark.slow_after(2, "jax")
@pytest.mark.parametrize("cell", networks.CELLS)
def test_every_cell_of_armin_builds(cell):
    layer = networks.build(parse("--cell", cell, *TINY))
    layer.build((2, 5, 3))

    assert layer.temperature_schedule is not None
    assert layer.cell.write_inputs == (cell == "algorithmic")
    learnt = ("algorithmic", "pixels", "long")
    assert layer.cell.learn_initial_state == (cell in learnt)


def test_arguments_of_the_layer_override_options():
    options = parse("--seed", "3", *TINY)
    layer = networks.build(options, seed=5, memory_slots=7, name="other")

    assert (layer.cell.seed, layer.cell.memory_slots) == (5, 7)
    assert layer.name == "other" and options.seed == 3


def test_parameters_are_the_trainable_ones():
    model = dense_model()

    assert networks.parameters(model) == 4 * 2 + 1
    model.layers[-1].trainable = False
    assert networks.parameters(model) == 0


if __name__ == "__main__":
    script(sys.argv[1])
