"""Normalization layers in float32."""

import keras

from mpkeras.layers.mixin import OutputDtype


@keras.saving.register_keras_serializable(package="mpkeras")
class BatchNormalization(OutputDtype, keras.layers.BatchNormalization):
    """Batch normalization whose inputs, statistics and output are float32 under any policy.

    Args:
        *args, **kwargs: Of `keras.layers.BatchNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.

    Raises:
        ValueError: If `output_dtype` is not one of these, `dtype` is given and is not float32, or `autocast=False`
            is given.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     layer = mpkeras.layers.BatchNormalization()
    >>> outputs = layer(np.array([[1e5], [3e5]]), training=True)  # more than float16 holds
    >>> bool(keras.ops.all(keras.ops.isfinite(outputs)))
    True

    References:
        Ioffe and Szegedy, 2015, https://arxiv.org/abs/1502.03167.
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

    Raises:
        ValueError: If `output_dtype` is not one of these, `dtype` is given and is not float32, or `autocast=False`
            is given.

    Example:

    >>> layer = mpkeras.layers.LayerNormalization()
    >>> outputs = layer(keras.ops.array([[1.0, 3.0]], dtype="float16"))
    >>> keras.backend.standardize_dtype(outputs.dtype)
    'float32'

    References:
        Ba et al., 2016, https://arxiv.org/abs/1607.06450.
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

    Raises:
        ValueError: If `output_dtype` is not one of these, `dtype` is given and is not float32, or `autocast=False`
            is given.

    Example:

    >>> layer = mpkeras.layers.GroupNormalization(groups=2)
    >>> outputs = layer(keras.ops.array([[1.0, 3.0, 5.0, 7.0]], dtype="float16"))
    >>> keras.backend.standardize_dtype(outputs.dtype)
    'float32'

    References:
        Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """

    def call(self, inputs):
        return self.cast_output(super().call(inputs))


@keras.saving.register_keras_serializable(package="mpkeras")
class RMSNormalization(OutputDtype, keras.layers.RMSNormalization):
    """RMS normalization whose inputs and arithmetic are float32 under any policy.

    Args:
        *args, **kwargs: Of `keras.layers.RMSNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.

    Raises:
        ValueError: If `output_dtype` is not one of these, `dtype` is given and is not float32, or `autocast=False`
            is given.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     layer = mpkeras.layers.RMSNormalization(output_dtype="compute")
    >>> outputs = layer(np.array([[1e5, 1e5]]))  # more than float16 holds
    >>> keras.ops.convert_to_numpy(outputs)
    array([[1., 1.]], dtype=float16)

    References:
        Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """

    def call(self, inputs):
        return self.cast_output(super().call(inputs))
