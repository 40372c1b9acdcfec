"""Keras callbacks for training memory layers."""

from keras_armin.callbacks.annealing import NoiseAnnealing
from keras_armin.callbacks.annealing import SlopeAnnealing
from keras_armin.callbacks.annealing import TemperatureAnnealing
from keras_armin.callbacks.monitoring import SlotUsage
from keras_armin.callbacks.monitoring import entropy_in_bits
from keras_armin.callbacks.monitoring import read_share
from keras_armin.callbacks.monitoring import slot_usage
from keras_armin.callbacks.resume_training import ResumeTraining
from keras_armin.callbacks.validation_state import ValidationState

__all__ = [
    "NoiseAnnealing",
    "ResumeTraining",
    "SlopeAnnealing",
    "SlotUsage",
    "TemperatureAnnealing",
    "ValidationState",
    "entropy_in_bits",
    "read_share",
    "slot_usage",
]
