"""Metrics with familiar names."""

import keras


@keras.saving.register_keras_serializable(package="keras_armin_examples")
class BitsWrong(keras.metrics.Mean):
    """Wrong bits in the answer to a sequence, on average."""

    def update_state(self, targets, logits, sample_weight):
        wrong = keras.ops.logical_xor(logits > 0, targets > 0.5)
        counted = wrong & (sample_weight[..., None] > 0)
        return super().update_state(
            keras.ops.sum(keras.ops.cast(counted, "float32"), axis=(1, 2))
        )
