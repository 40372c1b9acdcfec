"""Baselines that ARMIN is compared with, with the same interface."""

from keras_armin.baselines.awta import AwTA
from keras_armin.baselines.awta import AwTACell
from keras_armin.baselines.dnc import DNC
from keras_armin.baselines.dnc import DNCCell
from keras_armin.baselines.fs_lstm import FSLSTM
from keras_armin.baselines.fs_lstm import FSLSTMCell
from keras_armin.baselines.hm_lstm import HMLSTM
from keras_armin.baselines.hm_lstm import HMLSTMCell
from keras_armin.baselines.hyper_lstm import HyperLSTM
from keras_armin.baselines.hyper_lstm import HyperLSTMCell
from keras_armin.baselines.hyper_rhn import HyperRHN
from keras_armin.baselines.hyper_rhn import HyperRHNCell
from keras_armin.baselines.indrnn import IndRNN
from keras_armin.baselines.indrnn import IndRNNCell
from keras_armin.baselines.lstm import LayerNormLSTM
from keras_armin.baselines.lstm import LayerNormLSTMCell
from keras_armin.baselines.nas import NAS
from keras_armin.baselines.nas import NASCell
from keras_armin.baselines.ntm import NTM
from keras_armin.baselines.ntm import NTMCell
from keras_armin.baselines.rhn import RHN
from keras_armin.baselines.rhn import RHNCell
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
    "FSLSTM",
    "FSLSTMCell",
    "HMLSTM",
    "HMLSTMCell",
    "HyperLSTM",
    "HyperLSTMCell",
    "HyperRHN",
    "HyperRHNCell",
    "IndRNN",
    "IndRNNCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "NAS",
    "NASCell",
    "NTM",
    "NTMCell",
    "RHN",
    "RHNCell",
    "SAB",
    "SABCell",
    "SAM",
    "SAMCell",
    "TARDIS",
    "TARDISCell",
]
