"""The layer, the bare cell and the NumPy reference give the same numbers."""

import functools
import itertools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_armin
from keras_armin import ARMIN
from tests.helpers import reference
from tests.helpers.common import BATCH
from tests.helpers.common import BOTH
from tests.helpers.common import DIM
from tests.helpers.common import FEATURES
from tests.helpers.common import SLOTS
from tests.helpers.common import TIME
from tests.helpers.common import UNITS
from tests.helpers.common import array
from tests.helpers.common import as_rnn
from tests.helpers.common import fix_noise
from tests.helpers.common import inputs
from tests.helpers.common import random_noise
from tests.helpers.common import set_cell_weights
from tests.helpers.common import tensor

AXES = {
    "addressing": ["hard", "relaxed", "soft"],
    "layer_norm": [False, True],
    "memory_dim": [None, DIM],
    "write_inputs": [False, True],
    "state_activation": [None, "tanh"],
    "output_activation": [None, "tanh"],
    "learn_initial_state": [False, True],
    "content_addressing": [False, True],
    "recency_addressing": [False, True],
    "noise_scale": [0.0, 0.7],
}


def rows():
    return [
        dict(zip(AXES, values)) for values in itertools.product(*AXES.values())
    ]


@functools.cache
def covering(strength):
    """Few rows in which any values of so many axes occur together."""
    every = rows()
    together = [
        set(itertools.combinations(row.items(), strength)) for row in every
    ]
    missing = list(dict.fromkeys(itertools.chain(*together)))
    covers = np.array([[x in found for x in missing] for found in together])
    chosen = []
    while covers.any():
        best = covers.sum(axis=1).argmax()
        chosen.append(every[best])
        covers[:, covers[best]] = False
    return chosen


def combinations():
    """Grouped by the first three axes, to keep the number of tests readable.

    Those in which each pair occurs, then, slow, each three.
    """
    for name, strength, marks in (
        ("pairs", 2, []),
        ("triples", 3, [pytest.mark.slow]),
    ):
        groups = {}
        for row in covering(strength):
            groups.setdefault(tuple(row.values())[:3], []).append(row)
        for key, group in groups.items():
            case = "-".join([name, *map(str, key)])
            yield pytest.param(group, id=case, marks=marks)


def name_of(options):
    return "-".join(f"{v}" for v in options.values())


def compare(
    options,
    dtype,
    training,
    rng,
    tolerance,
    time=TIME,
    slots=SLOTS,
    arguments=None,
):
    """`arguments` are those of the layer, if they are not `options`."""
    options = {"memory_slots": slots, "temperature": 0.6, **options}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, time=time, dtype=dtype)
    noise = random_noise(rng, time=time, slots=slots) if training else {}
    expected, finals, _, _ = reference.run(
        UNITS, options, weights, x, training, noise
    )
    memory = np.array([final.memory.ravel() for final in finals])
    with pytest.MonkeyPatch.context() as patch:
        fix_noise(patch, noise)
        for make in BOTH.values():
            layer = make(
                units=UNITS,
                dtype=dtype,
                return_sequences=True,
                return_state=True,
                **(
                    {"memory_slots": slots, **arguments}
                    if arguments
                    else options
                ),
            )
            layer.build(x.shape)
            set_cell_weights(layer.cell, weights)
            outputs, last, h, final_memory, *_ = layer(
                tensor(x), training=training
            )
            assert keras.backend.standardize_dtype(outputs.dtype) == dtype
            close = {"rtol": tolerance, "atol": tolerance}
            np.testing.assert_allclose(array(outputs), expected, **close)
            np.testing.assert_allclose(array(last), expected[:, -1], **close)
            np.testing.assert_allclose(
                array(h), [final.h for final in finals], **close
            )
            np.testing.assert_allclose(array(final_memory), memory, **close)


@pytest.mark.slow_after(1, "jax")
@pytest.mark.slow_after(6, "tensorflow")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("group", combinations())
def test_combinations_agree_in_float64(group, training, rng, float64, no_jit):
    for options in group:
        # Two steps fill the memory, the third overwrites a slot of it.
        compare(options, "float64", training, rng, 1e-10, time=3, slots=2)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", covering(2), ids=name_of)
def test_pairwise_set_agrees_in_float32(options, training, rng):
    compare(options, "float32", training, rng, 1e-5)


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False, "memory_dim": DIM, "write_inputs": True},
        {"write_activation": None, "memory_dim": DIM},
        {"write_activation": "softsign", "write_inputs": True},
        {"output_read": False},
        {"output_read": False, "layer_norm": True, "memory_dim": DIM},
        {"zoneout": 0.4},
        {"zoneout": 0.4, "layer_norm": True, "addressing": "relaxed"},
        {
            "activation": "softsign",
            "recurrent_activation": "hard_sigmoid",
            "state_activation": "softsign",
            "output_activation": "sigmoid",
        },
    ],
    ids=name_of,
)
def test_other_options_agree_in_float64(
    options, training, rng, float64, no_jit
):
    compare(options, "float64", training, rng, 1e-10)


@pytest.mark.slow("jax")
def test_dropout_masks_enter_products_only(rng, float64, monkeypatch):
    options = {
        "memory_slots": SLOTS,
        "memory_dim": DIM,
        "write_inputs": True,
        "content_addressing": True,
    }
    rates = {"dropout": 0.5, "recurrent_dropout": 0.5}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, dtype="float64")
    noise = {
        "gumbel": rng.gumbel(size=(BATCH, TIME, SLOTS)),
        "dropout": rng.integers(0, 2, (BATCH, FEATURES)) * 2.0,
        "recurrent_dropout": rng.integers(0, 2, (BATCH, UNITS + DIM)) * 2.0,
    }
    expected, *_ = reference.run(UNITS, options, weights, x, True, noise)
    fix_noise(monkeypatch, noise)

    for make in BOTH.values():
        layer = make(
            units=UNITS,
            dtype="float64",
            return_sequences=True,
            **options,
            **rates,
        )
        layer.build(x.shape)
        set_cell_weights(layer.cell, weights)
        outputs = array(layer(tensor(x), training=True))
        np.testing.assert_allclose(outputs, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow("jax")
@given(
    batch=st.integers(1, 4),
    time=st.integers(1, 6),
    features=st.integers(1, 4),
    units=st.integers(1, 5),
    slots=st.integers(1, 5),
    memory_dim=st.one_of(st.none(), st.integers(1, 5)),
    addressing=st.sampled_from(AXES["addressing"]),
    layer_norm=st.booleans(),
    write_inputs=st.booleans(),
    content_addressing=st.booleans(),
    recency_addressing=st.booleans(),
    output_read=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 1000),
)
def test_any_size_agrees_with_the_reference(
    batch, time, features, units, dtype, seed, slots, **options
):
    if dtype == "float64" and keras.backend.backend() == "jax":
        dtype = "float32"  # float64 on JAX has its own tests, with x64 on
    rng = np.random.default_rng(seed)
    options["memory_slots"] = slots
    weights = reference.random_weights(rng, features, units, options)
    x = inputs(rng, batch, time, features, dtype)
    expected, *_ = reference.run(units, options, weights, x)
    layer = ARMIN(units, return_sequences=True, dtype=dtype, **options)
    layer.build(x.shape)
    set_cell_weights(layer.cell, weights)

    outputs = array(layer(tensor(x)))

    tolerance = 2e-5 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(
        outputs, expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("training", [False, True])
def test_the_papers_own_network_is_one_call_away(training, rng, float64):
    compare(
        {**reference.PAPER, "temperature": 1.0, "noise_scale": 1.0},
        "float64",
        training,
        rng,
        1e-10,
        arguments=keras_armin.PAPER,
    )


@pytest.mark.slow_after(2, "jax", "tensorflow")
@pytest.mark.slow("jax")
@pytest.mark.parametrize("case", reference.GOLDEN_CASES)
@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
def test_golden_file(case, make):
    golden = np.load(reference.GOLDEN)
    weights = {
        key.rsplit("/", 1)[1]: golden[key]
        for key in golden.files
        if key.startswith(f"{case}/weights/")
    }
    x = golden[f"{case}/x"].astype("float32")
    layer = make(
        units=reference.GOLDEN_SIZES["units"],
        return_sequences=True,
        return_state=True,
        **reference.GOLDEN_CASES[case],
    )
    layer.build(x.shape)
    set_cell_weights(layer.cell, weights)

    outputs, _, _, memory, _ = layer(x)

    np.testing.assert_allclose(
        array(outputs), golden[f"{case}/outputs"], rtol=2e-5, atol=2e-5
    )
    np.testing.assert_allclose(
        array(memory),
        golden[f"{case}/memory"].reshape(memory.shape),
        rtol=2e-5,
        atol=2e-5,
    )


def test_golden_file_is_what_the_reference_gives():
    golden = np.load(reference.GOLDEN)
    made = reference.make_golden()

    assert set(golden.files) == set(made)
    for key in golden.files:
        np.testing.assert_allclose(golden[key], made[key], rtol=1e-12)


@pytest.mark.slow("jax")
def test_a_hand_written_loop_over_the_cell_agrees(rng):
    rnn = as_rnn(units=UNITS, memory_slots=SLOTS, return_sequences=True)
    x = inputs(rng)
    expected = array(rnn(x))

    states = rnn.cell.get_initial_state(batch_size=BATCH)
    outputs = []
    for t in range(TIME):
        output, states = rnn.cell(x[:, t], states)
        outputs.append(array(output))

    np.testing.assert_allclose(np.stack(outputs, 1), expected, atol=1e-6)


@pytest.mark.slow("jax")
def test_a_batch_equals_its_samples_one_by_one(rng):
    layer = ARMIN(UNITS, memory_slots=BATCH, return_sequences=True)
    x = inputs(rng)
    together = array(layer(x))
    alone = np.concatenate([array(layer(x[b : b + 1])) for b in range(BATCH)])

    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
def test_a_batch_of_one_agrees_with_the_reference(
    make, training, rng, float64, monkeypatch
):
    """It has a way of its own to write on TensorFlow."""
    options = {"memory_slots": 2, "memory_dim": DIM}
    weights = reference.random_weights(rng, FEATURES, UNITS, options)
    x = inputs(rng, batch=1, dtype="float64")
    noise = random_noise(rng, batch=1, slots=2) if training else {}
    expected, *_ = reference.run(UNITS, options, weights, x, training, noise)
    fix_noise(monkeypatch, noise)
    layer = make(units=UNITS, dtype="float64", return_sequences=True, **options)
    layer.build(x.shape)
    set_cell_weights(layer.cell, weights)

    outputs = array(layer(tensor(x), training=training))

    np.testing.assert_allclose(outputs, expected, rtol=1e-10, atol=1e-10)
