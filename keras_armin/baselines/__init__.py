"""What ARMIN is compared with, to the same contract."""

from keras_armin.baselines.lstm import LayerNormLSTM
from keras_armin.baselines.lstm import LayerNormLSTMCell

__all__ = ["LayerNormLSTM", "LayerNormLSTMCell"]
