"""The networks that the example scripts train, by name.

A network is a function from command line options (those of `add_options`) and
layer arguments to a layer. It uses the options it knows and ignores the others.
"""

import argparse

import keras

from examples.support.command_types import at_least_zero
from examples.support.command_types import positive
from examples.support.command_types import rate
from keras_armin import ARMIN
from keras_armin.baselines import DNC
from keras_armin.baselines import NTM
from keras_armin.baselines import SAB
from keras_armin.baselines import SAM
from keras_armin.baselines import TARDIS
from keras_armin.baselines import AwTA
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


def armin(options, **layer_arguments):
    return ARMIN(
        options.units,
        memory_slots=options.slots,
        memory_dim=options.memory_dim,
        addressing=options.addressing,
        temperature=_temperature(options),
        content_addressing=options.content_addressing,
        noise_scale=options.noise_scale,
        recency_addressing=options.recency_addressing,
        unit_gate_bias=options.unit_gate_bias,
        layer_norm=options.layer_norm,
        zoneout=options.zoneout,
        seed=options.seed,
        **CELLS[options.cell],
        **layer_arguments,
    )


def lstm(options, **layer_arguments):
    return keras.layers.LSTM(
        options.units, seed=options.seed, **layer_arguments
    )


def _of_lstm(options, **others):
    """What every network that is driven by an LSTM takes."""
    return {
        "units": options.units,
        "layer_norm": options.layer_norm,
        "zoneout_cell": options.zoneout,
        "zoneout_hidden": options.zoneout_hidden,
        "seed": options.seed,
        **others,
    }


def layer_norm_lstm(options, **layer_arguments):
    return LayerNormLSTM(**_of_lstm(options), **layer_arguments)


def sab(options, **layer_arguments):
    return SAB(
        **_of_lstm(
            options,
            memory_slots=options.slots,
            top_k=options.top_k,
            store_every=options.store_every,
            truncate_every=options.truncate_every,
        ),
        **layer_arguments,
    )


def _with_heads(layer, *names):
    """A network with heads on a memory, and its further options."""

    def make(options, **layer_arguments):
        given = {name: getattr(options, name) for name in names}
        return layer(
            **_of_lstm(options, **_of_memory(options), **given),
            num_reads=options.reads,
            **layer_arguments,
        )

    return make


def _of_memory(options):
    return {
        "memory_slots": options.slots,
        "memory_dim": options.memory_dim,
        "variant": options.variant,
        "learn_initial_state": options.learn_initial_state,
    }


def _of_tardis(options):
    return {
        **_of_memory(options),
        "key_dim": options.key_dim,
        "addressing": options.addressing,
        "temperature": _temperature(options),
    }


def tardis(options, **layer_arguments):
    return TARDIS(**_of_lstm(options, **_of_tardis(options)), **layer_arguments)


def awta(options, **layer_arguments):
    return AwTA(
        options.units,
        noise_scale=options.noise_scale,
        layer_norm=options.layer_norm,
        zoneout=options.zoneout,
        seed=options.seed,
        **{**_of_tardis(options), **CELLS[options.cell]},
        **layer_arguments,
    )


NETWORKS = {
    "armin": armin,
    "lstm": lstm,
    "ln-lstm": layer_norm_lstm,
    "ntm": _with_heads(NTM),
    "dnc": _with_heads(DNC),
    "sam": _with_heads(SAM, "top_k"),
    "tardis": tardis,
    "awta": awta,
    "sab": sab,
}
WITH_VARIANTS = ("ntm", "dnc", "sam", "tardis", "awta")
DEFAULTS = {
    "units": 100,
    "slots": 20,
    "memory_dim": None,
    "layer_norm": False,
    "zoneout": 0.0,
    "zoneout_hidden": 0.0,
    "cell": "paper",
    "addressing": "hard",
    "content_addressing": False,
    "noise_scale": 1.0,
    "recency_addressing": False,
    "unit_gate_bias": False,
    "temperature": 1.0,
    "final_temperature": 0.3,
    "annealing": 0,
    "reads": 1,
    "top_k": 4,
    "store_every": 1,
    "truncate_every": 10,
    "key_dim": 16,
    "variant": "published",
    "learn_initial_state": False,
}
# Whose slots can be drawn.
WITH_MEMORY = tuple(name for name in NETWORKS if "lstm" not in name)


def build(options, **layer_arguments):
    """The layer that `--model` and the other options ask for."""
    return NETWORKS[options.model](options, **layer_arguments)


def _temperature(options):
    """A straight line to the final temperature, then level."""
    if not options.annealing:
        return options.temperature
    return keras.optimizers.schedules.PolynomialDecay(
        options.temperature,
        decay_steps=options.annealing,
        end_learning_rate=options.final_temperature,
    )


def add_options(parser):
    """Options of the networks, for an `argparse` parser."""
    network = parser.add_argument_group("network")
    network.add_argument("--units", type=positive, help="hidden units")
    network.add_argument("--slots", type=positive, help="memory slots")
    network.add_argument(
        "--memory-dim", type=positive, help="size of a slot (default: --units)"
    )
    network.add_argument(
        "--layer-norm",
        action=argparse.BooleanOptionalAction,
        help="layer normalisation",
    )
    network.add_argument(
        "--zoneout", type=rate, help="zoneout rate of the state"
    )
    network.add_argument(
        "--zoneout-hidden",
        type=rate,
        help="the same for the output of an LSTM, also where it drives heads",
    )
    network.add_argument(
        "--cell",
        choices=CELLS,
        help="armin, awta: equations of the paper, with a bounded state, of "
        "the released code for algorithmic tasks or pixels, or for long "
        "sequences",
    )
    network.add_argument(
        "--addressing",
        choices=("hard", "relaxed", "soft"),
        help="armin, awta, tardis: how they read while training",
    )
    network.add_argument(
        "--content-addressing",
        action=argparse.BooleanOptionalAction,
        help="armin: match what the slots hold, beyond the paper",
    )
    network.add_argument(
        "--noise-scale",
        type=float,
        help="armin, awta: how much Gumbel noise training adds; 1 as in the "
        "paper, 0 for none",
    )
    network.add_argument(
        "--recency-addressing",
        action=argparse.BooleanOptionalAction,
        help="armin: prefer slots that were written long ago, beyond the paper",
    )
    network.add_argument(
        "--unit-gate-bias",
        action=argparse.BooleanOptionalAction,
        help="armin: start with the input gates more open than the paper's",
    )
    network.add_argument(
        "--temperature", type=float, help="initial temperature of those reads"
    )
    network.add_argument("--final-temperature", type=float, help="at the end")
    network.add_argument(
        "--annealing",
        type=at_least_zero,
        help="updates of annealing; 0 keeps the initial temperature",
    )
    network.add_argument(
        "--reads", type=positive, help="ntm, dnc, sam: read heads"
    )
    network.add_argument(
        "--top-k", type=positive, help="sam, sab: rows that are read"
    )
    network.add_argument(
        "--store-every", type=positive, help="sab: steps between stored states"
    )
    network.add_argument(
        "--truncate-every",
        type=positive,
        help="sab: steps that a gradient passes through its LSTM",
    )
    network.add_argument(
        "--key-dim", type=positive, help="tardis, awta: size of a slot's key"
    )
    network.add_argument(
        "--variant",
        choices=("published", "released"),
        help="all but armin, lstm and sab: the published equations, or those "
        "that the paper's figures come from",
    )
    network.add_argument(
        "--learn-initial-state",
        action=argparse.BooleanOptionalAction,
        help="ntm, dnc, sam, tardis: learn the state a sequence starts with",
    )
    network.set_defaults(**DEFAULTS)


def as_in_the_paper(options, preset):
    """Whether the network is the one whose figures the paper has.

    `preset` holds the paper's settings; all others have to be at their
    defaults, but for the variant, which has to be the released one.
    """
    values = {**DEFAULTS, **preset}
    if options.model in WITH_VARIANTS:
        values["variant"] = "released"
    return all(getattr(options, k) == v for k, v in values.items())
