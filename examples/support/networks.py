"""The networks that the example scripts train, by name.

`build` makes the layer that `--model` selects from the options that
`add_options` adds to a parser. Options of other networks are ignored.
"""

import bisect
import math

import keras

from examples.support import cli
from examples.support.cli import at_least_zero
from examples.support.cli import positive
from examples.support.cli import rate
from keras_armin import ARMIN
from keras_armin.baselines import DNC
from keras_armin.baselines import FSLSTM
from keras_armin.baselines import HMLSTM
from keras_armin.baselines import NAS
from keras_armin.baselines import NTM
from keras_armin.baselines import RHN
from keras_armin.baselines import SAB
from keras_armin.baselines import SAM
from keras_armin.baselines import TARDIS
from keras_armin.baselines import AwTA
from keras_armin.baselines import HyperLSTM
from keras_armin.baselines import HyperRHN
from keras_armin.baselines import IndRNN
from keras_armin.baselines import LayerNormLSTM

# How the equations differ between the paper and the authors' released code,
# which bounds the state by tanh and applies no activation to the output.
# Neither bounds what is written; "long" does, for long sequences.
_BOUNDED = {
    "state_activation": "tanh",
    "output_activation": None,
    "write_activation": None,
}
_RELEASED = {**_BOUNDED, "learn_initial_state": True}
CELLS = {
    "paper": {
        "state_activation": None,
        "output_activation": "tanh",
        "write_activation": None,
    },
    "bounded": _BOUNDED,
    "algorithmic": {**_RELEASED, "write_inputs": True},
    "pixels": _RELEASED,
    "long": {**_RELEASED, "write_activation": "tanh"},
}

# Each network is a layer and its arguments, as "argument" or, where the option
# has another name, "argument=option".
_LSTM = (
    *("units", "layer_norm", "seed"),
    *("zoneout_cell=zoneout", "zoneout_hidden"),
)
_PLAIN = ("units", "layer_norm", "seed")
_SLOTS = ("memory_slots=slots", "memory_dim")
_MEMORY = (*_SLOTS, "variant", "learn_initial_state")
_HEADS = (*_LSTM, *_MEMORY, "num_reads=reads")
_ADDRESSED = ("addressing", "temperature")
_GATED = ("units", "noise_scale", "layer_norm", "zoneout", "seed", *_ADDRESSED)
_BEYOND_PAPER = ("content_addressing", "recency_addressing", "unit_gate_bias")
NETWORKS = {
    "armin": (ARMIN, (*_GATED, *_SLOTS, *_BEYOND_PAPER)),
    "lstm": (keras.layers.LSTM, ("units", "seed")),
    "ln-lstm": (LayerNormLSTM, _LSTM),
    "ntm": (NTM, _HEADS),
    "dnc": (DNC, _HEADS),
    "sam": (SAM, (*_HEADS, "top_k")),
    "tardis": (TARDIS, (*_LSTM, *_MEMORY, *_ADDRESSED, "key_dim")),
    "awta": (AwTA, (*_GATED, *_MEMORY, "key_dim")),
    "sab": (
        SAB,
        (*_LSTM, _SLOTS[0], "top_k", "store_every", "truncate_every"),
    ),
    "indrnn": (IndRNN, (*_PLAIN, "max_length")),
    "rhn": (RHN, (*_PLAIN, "depth")),
    "hyper-rhn": (HyperRHN, (*_PLAIN, "depth", "hyper_units")),
    "nas": (NAS, (*_PLAIN, "projection_units=projection")),
    "fs-lstm": (FSLSTM, (*_LSTM, "slow_units", "fast_cells")),
    "hyper-lstm": (
        HyperLSTM,
        (*_LSTM, "hyper_units", "embedding_units=hyper_embedding"),
    ),
    "hm-lstm": (HMLSTM, (*_PLAIN, "levels", "slope")),
}
_WITH_CELLS = ("armin", "awta")
_WITH_VARIANTS = ("ntm", "dnc", "sam", "tardis", "awta")
# Networks whose slots can be drawn.
WITH_MEMORY = tuple(
    name for name, (_, names) in NETWORKS.items() if _SLOTS[0] in names
)

OPTIONS = {
    "units": (positive, 100, "hidden units"),
    "slots": (positive, 20, "memory slots"),
    "memory_dim": (positive, None, "size of a slot (default: --units)"),
    "layer_norm": (bool, False, "layer normalisation"),
    "zoneout": (rate, 0.0, "zoneout rate of the state"),
    "zoneout_hidden": (rate, 0.0, "zoneout rate of the output of an LSTM"),
    "cell": (
        tuple(CELLS),
        "paper",
        "armin, awta: equations of the paper, with a bounded state, of the "
        "released code for algorithmic tasks or pixels, or for long sequences",
    ),
    "addressing": (
        ("hard", "relaxed", "soft"),
        "hard",
        "armin, awta, tardis: how slots are read during training",
    ),
    "content_addressing": (
        bool,
        False,
        "armin: also address by what the slots hold (not in the paper)",
    ),
    "noise_scale": (
        float,
        1.0,
        "armin, awta: scale of the Gumbel noise during training; the paper's "
        "is 1",
    ),
    "recency_addressing": (
        bool,
        False,
        "armin: favour slots written long ago (not in the paper)",
    ),
    "unit_gate_bias": (
        bool,
        False,
        "armin: start the biases of the input gates at 1 (not in the paper)",
    ),
    "temperature": (float, 1.0, "armin, awta, tardis: initial temperature"),
    "final_temperature": (float, 0.3, "temperature after annealing"),
    "annealing": (at_least_zero, 0, "updates of linear annealing, 0 for none"),
    "reads": (positive, 1, "ntm, dnc, sam: read heads"),
    "top_k": (positive, 4, "sam, sab: number of rows to read"),
    "store_every": (positive, 1, "sab: steps between stored states"),
    "truncate_every": (positive, 10, "sab: steps of backpropagation"),
    "key_dim": (positive, 16, "tardis, awta: size of the key of a slot"),
    "variant": (
        ("published", "released"),
        "published",
        "ntm, dnc, sam, tardis, awta: the published equations, or those that "
        "the paper's figures come from",
    ),
    "max_length": (positive, None, "indrnn: steps that bound its weights"),
    "depth": (positive, 5, "rhn, hyper-rhn: highway layers in a step"),
    "hyper_units": (positive, 128, "hyper-rhn, hyper-lstm: the small network"),
    "hyper_embedding": (positive, 4, "hyper-lstm: size of an embedding"),
    "projection": (positive, None, "nas: size of the output"),
    "slow_units": (positive, None, "fs-lstm: slow cell (default: --units)"),
    "fast_cells": (positive, 2, "fs-lstm: fast cells"),
    "levels": (positive, 3, "hm-lstm: levels"),
    "slope": (float, 1.0, "hm-lstm: initial slope of the boundaries"),
    "final_slope": (float, 5.0, "hm-lstm: slope after annealing"),
    "learn_initial_state": (
        bool,
        False,
        "ntm, dnc, sam, tardis: learn the initial state",
    ),
}


def add_options(parser):
    model = {"model": (tuple(NETWORKS), "armin", "the network")}
    title = "network (the preset may have other defaults)"
    cli.add_options(parser, title, {**model, **OPTIONS})


def build(options, **layer_arguments):
    """The layer that `--model` and the other options describe.

    `layer_arguments` are further arguments, or override options.
    """
    layer, names = NETWORKS[options.model]
    found = {}
    for name in names:
        argument, _, option = name.partition("=")
        found[argument] = getattr(options, option or argument)
    for name in {"temperature", "slope"} & set(found):
        if options.annealing:
            final = getattr(options, f"final_{name}")
            found[name] = annealed(found[name], final, options.annealing)
    if options.model in _WITH_CELLS:
        found.update(CELLS[options.cell])
    return layer(**{**found, **layer_arguments})


def is_released(options):
    """Whether the equations are those that the paper's figures come from."""
    return options.variant == "released" or options.model not in _WITH_VARIANTS


def annealed(start, end, updates):
    """A number that changes linearly and then stays."""
    return keras.optimizers.schedules.PolynomialDecay(
        start, decay_steps=updates, end_learning_rate=end
    )


def parameters(model):
    """Number of trainable parameters."""
    return sum(math.prod(w.shape) for w in model.trainable_weights)


def count_parameters(build):
    """Those of the model that `build()` makes, without initialising them."""
    with keras.StatelessScope(initialize_variables=False):
        model = build()
    # Or Keras would initialise them when another model is trained.
    keras.utils.clear_session(free_memory=False)
    return parameters(model)


def nearest_units(count, target, most):
    """The units, at most `most`, with which `count(units)` is nearest."""
    units = range(1, most + 1)
    above = bisect.bisect_left(units, target, key=count)
    near = units[max(0, above - 1) : above + 1]
    return min(near, key=lambda number: abs(count(number) - target))


# --- metrics, and models for the algorithmic tasks ---------------------------


@keras.saving.register_keras_serializable(package="keras_armin_examples")
class BitsPerCharacter(keras.metrics.Mean):
    """Mean cross-entropy of the next character, in bits."""

    def __init__(self, name="bpc", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, targets, logits, sample_weight=None):
        nats = keras.ops.sparse_categorical_crossentropy(
            targets, logits, from_logits=True
        )
        return super().update_state(nats / math.log(2), sample_weight)


@keras.saving.register_keras_serializable(package="keras_armin_examples")
class BitsWrong(keras.metrics.Mean):
    """Mean number of wrong bits in the answer to a sequence."""

    def update_state(self, targets, logits, sample_weight):
        wrong = keras.ops.logical_xor(logits > 0, targets > 0.5)
        counted = wrong & (sample_weight[..., None] > 0)
        return super().update_state(
            keras.ops.sum(keras.ops.cast(counted, "float32"), axis=(1, 2))
        )


def bit_model(task, layer, optimizer):
    """A compiled model of one recurrent layer for a task of `sequences`."""
    model = keras.Sequential(
        [
            keras.Input((None, task.inputs)),
            layer,
            keras.layers.Dense(task.outputs, name="logits"),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.BinaryCrossentropy(from_logits=True),
        weighted_metrics=[BitsWrong(name="bits_wrong")],
        # XLA takes seconds to compile for each of the many shapes.
        jit_compile=False
        if keras.backend.backend() == "tensorflow"
        else "auto",
    )
    return model
