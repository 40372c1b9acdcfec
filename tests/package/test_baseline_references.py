"""The comparison networks against NumPy, and their numbers of parameters."""

import keras
import numpy as np
import pytest

from keras_armin import baselines
from keras_armin import trace_boundaries
from keras_armin.noise import SequenceNoise
from keras_armin.noise import StepNoise
from tests.helpers import reference_baselines as reference
from tests.helpers.common import BATCH
from tests.helpers.common import FEATURES
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import inputs
from tests.helpers.common import randomise
from tests.helpers.common import tensor
from tests.helpers.networks import NETWORKS

TIME = 9  # more than there are slots
CASES = {
    "NTM": {"num_reads": 2, "num_writes": 2, "shift_range": 2},
    "NTM released": {"variant": "released"},
    "DNC": {"num_reads": 2},
    "DNC released": {"num_reads": 2, "variant": "released"},
    "SAM": {"num_reads": 2, "layer_norm": True},
    "SAM released": {"variant": "released"},
    # One saturated unit would make the logits equal.
    "TARDIS": {"address_units": 5},
    "TARDIS released": {
        "address_units": 5,
        "variant": "released",
        "layer_norm": True,
    },
    "AwTA": {"address_units": 5, "memory_dim": UNITS},
    "AwTA released": {
        "address_units": 5,
        "memory_dim": UNITS,
        "variant": "released",
    },
    "SAB": {"store_every": 2},
    "SAB, each step": {"memory_slots": 3, "top_k": 7},
    "IndRNN": {},
    "IndRNN normalised": {"layer_norm": True},
    "RHN": {"depth": 3},
    "RHN normalised": {"layer_norm": True, "coupled": False},
    "HyperRHN": {},
    "HyperRHN normalised": {"layer_norm": True, "coupled": False},
    "NAS": {"projection_units": 5},
    "NAS normalised": {"layer_norm": True},
    "FSLSTM": {},
    "FSLSTM of four": {"fast_cells": 4, "layer_norm": False},
    "HyperLSTM": {},
    "HyperLSTM plain": {"layer_norm": False},
    "HMLSTM": {},
    "HMLSTM normalised": {"layer_norm": True, "levels": 4},
}


def random_layer(case, rng, **options):
    network = NETWORKS[case.split()[0].strip(",")]
    layer = network.make(
        **CASES[case],
        **options,
        return_sequences=True,
        return_state=True,
        dtype="float64",
    )
    layer.build((BATCH, TIME, FEATURES))
    randomise(layer, rng)
    if case.startswith("HMLSTM"):
        # Otherwise the second level ends a segment at almost every step.
        bias = array(layer.cell.bias_2)
        bias[-1] -= 0.5
        layer.cell.bias_2.assign(bias)
    weights = {w.name: array(w) for w in layer.weights}
    return layer, weights


def starting_states(layer):
    states = layer.get_initial_state(BATCH)
    return {
        name: array(state)
        for name, state in zip(layer.cell.state_names, states)
    }


def check(case, layer, weights, x, found, noise=None):
    name = case.split()[0].strip(",")
    start = starting_states(layer)
    expected, finals = reference.run(name, layer.cell, weights, x, start, noise)
    outputs, *states = (array(y) for y in found)

    np.testing.assert_allclose(outputs, expected, atol=1e-10)
    for state_name, state in zip(layer.cell.state_names, states, strict=True):
        if state_name in finals[0]:
            last = np.array([final[state_name] for final in finals])
            np.testing.assert_allclose(
                state, last, atol=1e-10, err_msg=state_name
            )
    pointer = states[layer.cell.state_names.index("pointer")]
    assert pointer.tolist() == [[TIME, 0, 0, 0]] * BATCH


@pytest.mark.slow_after(6, "jax")
@pytest.mark.parametrize("case", CASES)
def test_inference_agrees_with_the_reference(case, rng, float64):
    layer, weights = random_layer(case, rng)
    x = inputs(rng, time=TIME, dtype="float64")

    check(case, layer, weights, x, layer(tensor(x)))


@pytest.mark.slow("jax", "tensorflow")
def test_the_case_of_hm_lstm_reaches_all_its_equations(rng, float64):
    """The first level never copies, the last one never flushes."""
    layer, _ = random_layer("HMLSTM", rng)
    z = trace_boundaries(layer, inputs(rng, time=TIME, dtype="float64"))
    below = np.pad(z, [(0, 0), (0, 0), (1, 0)], constant_values=True)
    ended = np.pad(z, [(0, 0), (1, 0), (0, 1)])[:, :-1]
    reached = {
        "copies": (~ended & ~below).any((0, 1)).tolist(),
        "updates": (~ended & below).any((0, 1)).tolist(),
        "flushes": ended.any((0, 1)).tolist(),
    }
    assert reached == {
        "copies": [False, True, True],
        "updates": [True, True, True],
        "flushes": [True, True, False],
    }


def check_with_noise(case, layer, weights, rng, noise, monkeypatch):
    x = inputs(rng, time=TIME, dtype="float64")
    drawn = StepNoise(
        **{name: tensor(value.swapaxes(0, 1)) for name, value in noise.items()}
    )
    monkeypatch.setattr(
        type(layer.cell),
        "draw_noise",
        lambda cell, time, batch: (drawn, SequenceNoise()),
    )

    check(case, layer, weights, x, layer(tensor(x), training=True), noise)


@pytest.mark.parametrize("case", ["TARDIS", "AwTA"])
@pytest.mark.slow("jax")
def test_sampled_reads_agree_with_the_reference(
    case, rng, float64, monkeypatch
):
    layer, weights = random_layer(case, rng)
    slots = layer.cell.memory_slots
    noise = {"gumbel": 3 * rng.gumbel(size=(BATCH, TIME, slots))}
    if case == "TARDIS":
        noise["switches"] = rng.logistic(size=(BATCH, TIME, 2))
    check_with_noise(case, layer, weights, rng, noise, monkeypatch)


@pytest.mark.parametrize("case", ["FSLSTM", "FSLSTM of four", "HyperLSTM"])
@pytest.mark.slow("jax")
def test_zoneout_agrees_with_the_reference(case, rng, float64, monkeypatch):
    """Which units it keeps, of which cell, and what they keep."""
    rates = {"zoneout": 0.3, "zoneout_cell": 0.4}
    layer, weights = random_layer(
        case, rng, zoneout_hidden=0.3, zoneout_cell=0.4
    )
    shape = (BATCH, TIME, layer.cell.zoneout_width)
    noise = {name: rng.random(shape) < rate for name, rate in rates.items()}
    check_with_noise(case, layer, weights, rng, noise, monkeypatch)
    noise = {name: np.full(shape, rate) for name, rate in rates.items()}
    x = inputs(rng, time=TIME, dtype="float64")

    check(case, layer, weights, x, layer(tensor(x)), noise)


# --- parameters -------------------------------------------------------------

HEADS = {"memory_slots": 128, "memory_dim": 20, "learn_initial_state": True}
WIDE = {"memory_slots": 50, "memory_dim": 32, "learn_initial_state": True}
PIXELS = {"memory_slots": 28, "memory_dim": 28, "learn_initial_state": True}
RELEASED = {"variant": "released"}
FAST = {"recurrent_initializer": "zeros", "kernel_initializer": "zeros"}


def parameters(layer, features, outputs):
    layer.build((None, None, features))
    count = sum(np.prod(w.shape, dtype=int) for w in layer.trainable_weights)
    return count + (layer.cell.output_size + 1) * outputs


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.parametrize(
    ("name", "units", "options", "features", "outputs", "expected"),
    [
        # Functional parameters of the authors' code, copying 8 bits.
        ("DNC", 120, HEADS, 10, 8, 84_516),
        ("SAM", 120, {**HEADS, **RELEASED}, 10, 8, 79_434),
        ("TARDIS", 100, {**WIDE, **RELEASED, "key_dim": 5}, 10, 8, 69_127),
        ("TARDIS", 120, {**WIDE, **RELEASED, "key_dim": 5}, 10, 8, 92_642),
        (
            "AwTA",
            100,
            {**WIDE, "key_dim": 5, "write_inputs": True},
            10,
            8,
            92_193,
        ),
        # Permuted MNIST.
        ("AwTA", 100, {**PIXELS, "key_dim": 25}, 1, 10, 82_582),
    ],
)
def test_parameters_of_the_released_code(
    name, units, options, features, outputs, expected
):
    layer = getattr(baselines, name)(units, **options, **FAST)

    assert parameters(layer, features, outputs) == expected


def test_parameters_of_the_ntm():
    """90,820 in the authors' code, some of them without any effect.

    They have a second bias in the LSTM, a write vector for the read head, and
    weights of a layer that is fed with zeros.
    """
    layer = baselines.NTM(120, **HEADS, **RELEASED, **FAST)
    second_bias, dead_write, dead_resets = 480, 2_420, 2_800

    functional = parameters(layer, 10, 8) + second_bias
    assert functional == 85_600
    assert functional + dead_write + dead_resets == 90_820


@pytest.mark.parametrize(
    ("name", "units", "options", "expected"),
    [
        ("DNC", 800, {}, 8_196_858),
        # The paper's 9.48 million count an interface that is not used.
        ("SAM", 800, RELEASED, 9_483_264 - 2_569_608),
        ("AwTA", 800, {"memory_slots": 20, "key_dim": 25}, 10_137_190),
        ("AwTA", 800, {"memory_slots": 20, "key_dim": 100}, 10_153_690),
    ],
)
def test_parameters_of_the_language_models(name, units, options, expected):
    layer = getattr(baselines, name)(units, layer_norm=True, **options, **FAST)
    embedding = 50 * 128

    assert parameters(layer, 128, 50) + embedding == expected


SLOW = {"slow_units": 400, "layer_norm": False}


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize(
    ("name", "options", "inputs", "embedding", "outputs", "millions"),
    [
        # Characters of Penn Treebank; the weights of a layer norm apart.
        ("FSLSTM", {"units": 700, **SLOW}, 128, 50, 50, "7.2"),
        ("FSLSTM", {"units": 500, "fast_cells": 4, **SLOW}, 128, 50, 50, "6.5"),
        (
            "HyperLSTM",
            {"units": 1000, "layer_norm": False},
            *(50, 0, 50, "4.91"),
        ),
        ("HyperLSTM", {"units": 1000}, 50, 0, 50, "4.92"),
        ("HyperRHN", {"units": 1000, "depth": 7}, 128, 50, 50, "15.5"),
        # Its words, without and with one matrix for inputs and outputs.
        ("RHN", {"units": 830, "depth": 10}, 830, 10_000, 10_000, "32"),
        ("RHN", {"units": 830, "depth": 10}, 830, 0, 10_000, "23"),
    ],
)
def test_parameters_of_the_publications(
    name, options, inputs, embedding, outputs, millions
):
    layer = getattr(baselines, name)(**options, **FAST)
    count = parameters(layer, inputs, outputs) + embedding * inputs

    digits = len(millions.partition(".")[2])
    assert f"{count / 1e6:.{digits}f}" == millions


# --- learning ---------------------------------------------------------------

LEARNERS = {
    "LayerNormLSTM": {"units": 16},
    **{
        name: {"units": 16, "memory_slots": 6, "memory_dim": 6}
        for name in ("NTM", "DNC", "SAM")
    },
    "TARDIS": {"units": 16, "memory_slots": 6, "addressing": "relaxed"},
    "AwTA": {
        "units": 16,
        "memory_slots": 6,
        "addressing": "relaxed",
        "state_activation": "tanh",
    },
    "SAB": {"units": 16, "memory_slots": 6, "top_k": 2},
    "IndRNN": {"units": 32, "max_length": 6, "layer_norm": True},
    "RHN": {"units": 16, "depth": 3},
    "HyperRHN": {"units": 16, "depth": 3, "hyper_units": 8},
    "NAS": {"units": 16},
    "FSLSTM": {"units": 16, "slow_units": 8},
    "HyperLSTM": {"units": 16, "hyper_units": 8},
    "HMLSTM": {"units": 16, "levels": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("network", LEARNERS)
def test_a_small_copy_task_is_learnt(network):
    """Three bits in, three bits out: below 0.1 nats from 0.69."""
    bits = np.array(list(np.ndindex(2, 2, 2)), "float32")
    x = np.zeros((8, 6, 2), "float32")
    x[:, :3, 0], x[:, 3:, 1] = bits, 1.0
    layers = [
        getattr(baselines, network)(
            **LEARNERS[network], return_sequences=True, seed=1
        )
        # Units of IndRNN see each other in the next layer only.
        for _ in range(2 if network == "IndRNN" else 1)
    ]
    model = keras.Sequential(
        [keras.Input((6, 2)), *layers, keras.layers.Dense(1)]
    )
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    weight = np.zeros((8, 6), "float32")
    weight[:, 3:] = 2.0
    y = np.concatenate([bits * 0, bits], axis=1)[..., None]
    for _ in range(250):
        # Measured before each update: at this rate the last one may be a jump.
        loss = model.train_on_batch(x, y, sample_weight=weight)
        if loss < 0.02:
            break

    assert loss < 0.1
