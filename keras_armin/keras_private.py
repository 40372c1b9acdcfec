"""Everything this package uses of Keras that is not public, in one place.

tests/test_keras_private.py fails when one of these changes its behaviour.
"""

from keras.src.backend import get_keras_mask as attached_mask
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

__all__ = ["DropoutRNNCell", "all_layers", "attached_mask", "is_training"]


def is_training(layer):
    """The `training` value of the call under way, or None if not known.

    `keras.layers.RNN` prepares a cell before its loop without saying whether
    it trains.
    """
    return layer._get_call_context().get_value("training")


def all_layers(model):
    """A model's layers at any depth, cells included, each once."""
    return model._flatten_layers(include_self=True, recursive=True)
