"""All networks of the package, for tests that apply to each of them."""

from typing import Any
from typing import NamedTuple

import keras
import pytest

from keras_armin import ARMIN
from keras_armin import ARMINCell
from keras_armin import baselines
from tests.helpers.common import DIM
from tests.helpers.common import FULL
from tests.helpers.common import KERAS_OBJECTS
from tests.helpers.common import LAYER_ONLY
from tests.helpers.common import SLOTS
from tests.helpers.common import UNITS


class Network(NamedTuple):
    layer: Any
    cell: Any
    small: dict  # sizes for a quick test
    full: dict  # every argument of the cell, none at its default

    def make(self, **arguments):
        """The layer at small sizes."""
        return self.layer(**{**self.small, **arguments})

    def make_bare(self, layer, **arguments):
        """`keras.layers.RNN` around a cell like that of `layer`."""
        cell = self.cell.from_config(layer.cell.get_config())
        return keras.layers.RNN(cell, dtype=layer.dtype_policy, **arguments)


_LSTM = {
    "units": UNITS,
    "activation": "softsign",
    "recurrent_activation": "hard_sigmoid",
    "use_bias": False,
    "unit_forget_bias": False,
    "layer_norm": True,
    "zoneout_cell": 0.4,
    "zoneout_hidden": 0.3,
    **KERAS_OBJECTS,
    "dropout": 0.2,
    "recurrent_dropout": 0.1,
    "seed": 6,
}
# Without the arguments of an LSTM.
_PLAIN = {
    name: value
    for name, value in _LSTM.items()
    if not name.startswith(("zoneout", "unit_forget"))
}
_SIZES = {"units": UNITS, "memory_slots": SLOTS, "memory_dim": DIM}
_HEADS = {
    **_LSTM,
    **_SIZES,
    "num_reads": 2,
    "variant": "released",
    "learn_initial_state": True,
}
_ADDRESSED = {"key_dim": 3, "address_units": 7, "variant": "released"}


def _without(arguments, *names):
    return {k: v for k, v in arguments.items() if k not in names}


def _network(name, small, full):
    return Network(
        getattr(baselines, name), getattr(baselines, f"{name}Cell"), small, full
    )


NETWORKS = {
    "ARMIN": Network(ARMIN, ARMINCell, _SIZES, FULL),
    "LayerNormLSTM": _network(
        "LayerNormLSTM", {"units": UNITS}, {**_LSTM, "layer_norm": False}
    ),
    "NTM": _network(
        "NTM", _SIZES, {**_HEADS, "num_writes": 2, "shift_range": 2}
    ),
    "DNC": _network("DNC", _SIZES, _HEADS),
    "SAM": _network(
        "SAM",
        {**_SIZES, "top_k": 2},
        {**_HEADS, "variant": "published", "top_k": 3},
    ),
    "TARDIS": _network(
        "TARDIS",
        {**_SIZES, "key_dim": 3},
        {
            **_LSTM,
            **_SIZES,
            **_ADDRESSED,
            "addressing": "relaxed",
            "temperature": 0.7,
            "learn_initial_state": True,
        },
    ),
    "AwTA": _network("AwTA", {**_SIZES, "key_dim": 3}, {**FULL, **_ADDRESSED}),
    "SAB": _network(
        "SAB",
        {"units": UNITS, "memory_slots": SLOTS, "top_k": 2},
        {
            **_LSTM,
            "memory_slots": SLOTS,
            "top_k": 3,
            "store_every": 2,
            "truncate_every": 4,
            "address_units": 7,
        },
    ),
    "IndRNN": _network(
        "IndRNN",
        {"units": UNITS},
        {**_without(_PLAIN, "recurrent_activation"), "max_length": 9},
    ),
    "RHN": _network(
        "RHN",
        {"units": UNITS, "depth": 2},
        {**_PLAIN, "depth": 3, "coupled": False, "transform_bias": -1.0},
    ),
    "HyperRHN": _network(
        "HyperRHN",
        {"units": UNITS, "depth": 2, "hyper_units": 3},
        {
            **_PLAIN,
            "hyper_units": 3,
            "depth": 3,
            "coupled": False,
            "transform_bias": -1.0,
        },
    ),
    "NAS": _network(
        "NAS",
        {"units": UNITS},
        {
            **_without(_PLAIN, "activation", "recurrent_activation"),
            "projection_units": 5,
        },
    ),
    "FSLSTM": _network(
        "FSLSTM",
        {"units": UNITS, "slow_units": 5},
        {**_LSTM, "layer_norm": False, "slow_units": 5, "fast_cells": 3},
    ),
    "HyperLSTM": _network(
        "HyperLSTM",
        {"units": UNITS, "hyper_units": 5, "embedding_units": 2},
        {
            **_LSTM,
            "layer_norm": False,
            "hyper_units": 5,
            "embedding_units": 2,
        },
    ),
    "HMLSTM": _network(
        "HMLSTM",
        {"units": UNITS},
        {**_PLAIN, "unit_forget_bias": False, "levels": 2, "slope": 2.0},
    ),
}
# Arguments that support only their default.
FIXED = {
    "SAM": {"variant"},
    "AwTA": {"content_addressing", "recency_addressing"},
}
for _name in FIXED["AwTA"]:
    NETWORKS["AwTA"].full[_name] = False
NETWORKS["AwTA"].full["unit_gate_bias"] = True

# Where a graph is compiled, a loop of each of the others takes seconds.
QUICK = ("ARMIN", "NTM")


def marks_of(name):
    return [] if name in QUICK else [pytest.mark.slow("jax", "tensorflow")]


def _each(names):
    return pytest.mark.parametrize(
        "network",
        [pytest.param(NETWORKS[x], id=x, marks=marks_of(x)) for x in names],
    )


each_network = _each(NETWORKS)


# What takes long on torch too is left to the first of those without a memory.
LONG_ON_TORCH = ("RHN", "HyperRHN", "NAS", "FSLSTM", "HyperLSTM", "HMLSTM")


def armin_then_others(*slow_on):
    """Every network; those other than ARMIN are slow on these backends."""

    def marks(name):
        if name == "ARMIN":
            return []
        on = () if name in LONG_ON_TORCH else slow_on
        return [pytest.mark.slow(*on)]

    return pytest.mark.parametrize(
        "network",
        [
            pytest.param(x, id=name, marks=marks(name))
            for name, x in NETWORKS.items()
        ],
    )


each_with_memory = _each(
    name for name, x in NETWORKS.items() if "memory_slots" in x.full
)


def layer_arguments(network):
    return {**network.full, **LAYER_ONLY}
