"""ARMIN, a recurrent network with a memory, as Keras 3 layers."""

from keras_armin import baselines
from keras_armin import callbacks
from keras_armin import distribution
from keras_armin.armin import ARMIN
from keras_armin.armin_cell import PAPER
from keras_armin.armin_cell import ARMINCell
from keras_armin.export_lib import export
from keras_armin.generation import Generator
from keras_armin.generation import generate
from keras_armin.inspection import MemoryTrace
from keras_armin.inspection import trace_boundaries
from keras_armin.inspection import trace_memory
from keras_armin.plots import plot_boundaries
from keras_armin.plots import plot_memory
from keras_armin.step_model import StepModel
from keras_armin.step_model import step_model
from keras_armin.streaming_model import StreamingModel
from keras_armin.streaming_model import streaming_model
from keras_armin.version import __version__

__all__ = [
    "ARMIN",
    "ARMINCell",
    "Generator",
    "MemoryTrace",
    "PAPER",
    "StepModel",
    "StreamingModel",
    "__version__",
    "baselines",
    "callbacks",
    "distribution",
    "export",
    "generate",
    "plot_boundaries",
    "plot_memory",
    "step_model",
    "streaming_model",
    "trace_boundaries",
    "trace_memory",
]
