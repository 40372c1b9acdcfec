"""States of validation and training inside `fit`."""

import keras

from keras_armin import keras_private
from keras_armin import validation
from keras_armin.memory_rnn import MemoryRNN


class ValidationState(keras.callbacks.Callback):
    """Separates the states of validation and training inside `fit`.

    Validation starts from the initial state of stateful layers, and training
    continues afterwards from its own state. Applies to the layers of this
    package. Use a new instance for each `fit`.

    Args:
        reset_each_epoch: bool. Also reset the state before every epoch.
            Defaults to `False`.
    """

    def __init__(self, reset_each_epoch: bool = False) -> None:
        super().__init__()
        self.reset_each_epoch = validation.flag(
            "reset_each_epoch", reset_each_epoch
        )
        self._training = False
        self._saved: list | None = None

    def _layers(self) -> list[MemoryRNN]:
        return [
            layer
            for layer in keras_private.all_layers(self.model)
            if isinstance(layer, MemoryRNN) and layer.states is not None
        ]

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._training = True

    def on_train_end(self, logs: dict | None = None) -> None:
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if self.reset_each_epoch:
            for layer in self._layers():
                layer.reset_state()

    def on_test_begin(self, logs: dict | None = None) -> None:
        if not self._training:
            return
        layers = self._layers()
        self._saved = [layer.get_state() for layer in layers]
        for layer in layers:
            layer.reset_state()

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._saved is None:
            return
        for layer, state in zip(self._layers(), self._saved):
            layer.set_state(state)
        self._saved = None
