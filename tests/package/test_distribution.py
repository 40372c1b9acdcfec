"""Gradients that are clipped on several devices as on one.

The same file is the program that the test runs, with two devices:
`python -m tests.package.test_distribution "loss scale"`.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_armin import distribution

BACKEND = keras.backend.backend()
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIMIZERS = {
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.5), initial_scale=8.0
    ),
}


def trained(optimizer):
    """Weights after some updates, far from where gradients are small."""
    rng = np.random.default_rng(3)
    layer = keras.layers.Dense(
        2, kernel_initializer="ones", bias_initializer="ones"
    )
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(optimizer, "mse", jit_compile=False)
    # The gradients of the first and the second half are very different.
    x = rng.normal(size=(8, 3)) * np.repeat([5.0, 0.1], 4)[:, None]
    y = np.zeros((8, 2))
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return np.concatenate([w.ravel() for w in model.get_weights()]).tolist()


def main(name):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    found = []
    for clip in (lambda x: x, distribution.clip_summed_gradients):
        with tf.distribute.MirroredStrategy(devices).scope():
            found.append(trained(clip(OPTIMIZERS[name]())))
    print(json.dumps(found))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="is about `tf.distribute`")
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_devices_clip_as_one(name):
    done = subprocess.run(
        [sys.executable, "-m", "tests.package.test_distribution", name],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    default, summed = json.loads(done.stdout.splitlines()[-1])
    expected = trained(OPTIMIZERS[name]())

    np.testing.assert_allclose(summed, expected, rtol=1e-5)
    assert np.abs(np.subtract(default, expected)).max() > 1e-2


@pytest.mark.slow("jax")
def test_on_one_device_nothing_changes():
    for make in OPTIMIZERS.values():
        optimizer = make()
        assert distribution.clip_summed_gradients(optimizer) is optimizer
        np.testing.assert_allclose(trained(optimizer), trained(make()))


def test_only_optimizers_are_accepted():
    with pytest.raises(TypeError, match="`optimizer`.*Received: 'adam'"):
        distribution.clip_summed_gradients("adam")


if __name__ == "__main__":
    main(sys.argv[1])
