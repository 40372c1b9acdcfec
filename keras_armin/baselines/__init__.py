"""Baselines that ARMIN is compared with, with the same interface."""

from keras_armin.baselines.awta import AwTA
from keras_armin.baselines.awta import AwTACell
from keras_armin.baselines.dnc import DNC
from keras_armin.baselines.dnc import DNCCell
from keras_armin.baselines.lstm import LayerNormLSTM
from keras_armin.baselines.lstm import LayerNormLSTMCell
from keras_armin.baselines.ntm import NTM
from keras_armin.baselines.ntm import NTMCell
from keras_armin.baselines.sab import SAB
from keras_armin.baselines.sab import SABCell
from keras_armin.baselines.sam import SAM
from keras_armin.baselines.sam import SAMCell
from keras_armin.baselines.tardis import TARDIS
from keras_armin.baselines.tardis import TARDISCell

__all__ = [
    "AwTA",
    "AwTACell",
    "DNC",
    "DNCCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "NTM",
    "NTMCell",
    "SAB",
    "SABCell",
    "SAM",
    "SAMCell",
    "TARDIS",
    "TARDISCell",
]
