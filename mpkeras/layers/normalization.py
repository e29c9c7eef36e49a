"""Normalization layers in float32."""

import keras

from mpkeras.layers.output_dtype import OutputDtype


@keras.saving.register_keras_serializable(package="mpkeras")
class BatchNormalization(OutputDtype, keras.layers.BatchNormalization):
    """Batch normalization whose inputs, statistics and output are float32 under any policy.

    Args:
        *args, **kwargs: Of `keras.layers.BatchNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.
    """

    def call(self, inputs, training=None, mask=None):
        return self.cast_output(super().call(inputs, training=training, mask=mask))


@keras.saving.register_keras_serializable(package="mpkeras")
class LayerNormalization(OutputDtype, keras.layers.LayerNormalization):
    """Layer normalization in float32 under any policy.

    The stock layer sums in float32 too, but rounds its result to the dtype of its input even with
    `dtype="float32"`.

    Args:
        *args, **kwargs: Of `keras.layers.LayerNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.
    """

    def call(self, inputs):
        return self.cast_output(super().call(inputs))


@keras.saving.register_keras_serializable(package="mpkeras")
class GroupNormalization(OutputDtype, keras.layers.GroupNormalization):
    """Group normalization in float32 under any policy.

    The stock layer sums in float32 too, but rounds its result to the dtype of its input even with
    `dtype="float32"`.

    Args:
        *args, **kwargs: Of `keras.layers.GroupNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.
    """

    def call(self, inputs):
        return self.cast_output(super().call(inputs))


@keras.saving.register_keras_serializable(package="mpkeras")
class RMSNormalization(OutputDtype, keras.layers.RMSNormalization):
    """RMS normalization whose inputs and arithmetic are float32 under any policy.

    Args:
        *args, **kwargs: Of `keras.layers.RMSNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.
    """

    def call(self, inputs):
        return self.cast_output(super().call(inputs))
