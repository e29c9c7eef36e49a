"""Keras' softmax, activations and normalization layers, computed in float32 under any policy."""

import math
from collections.abc import Callable, Sequence

import keras
from keras import ops

from mpkeras.layers.mixin import OutputDtype


@keras.saving.register_keras_serializable(package="mpkeras")
class Softmax(OutputDtype, keras.layers.Softmax):
    """Softmax computed in float32 under any policy.

    As the last layer of a classifier it trains where a 16-bit softmax gets a gradient of 0: on TensorFlow
    Keras finds the logits behind it, and elsewhere, during training, no probability falls below the 1e-7 at
    which Keras clips.

    Args:
        axis: The axis, or axes, of the classes.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction. A
            classifier's last layer should stay in float32.
        **kwargs: Of `keras.layers.Layer`, without `dtype`.

    Call arguments:
        inputs: Logits of any shape and float dtype.
        mask: Boolean, broadcastable to `inputs`; where it is false the output is exactly 0, also in a row
            without any true.
        training: Whether a loss will be computed from the output.

    Returns:
        Probabilities, of the shape of `inputs`.

    Raises:
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

    Example:

    >>> layer = mpkeras.layers.Softmax()
    >>> outputs = layer(keras.ops.array([[0.0, 0.0]], dtype="float16"))
    >>> keras.ops.convert_to_numpy(outputs)
    array([[0.5, 0.5]], dtype=float32)
    """

    def __init__(self, axis: int | Sequence[int] = -1, *, output_dtype: str | None = None, **kwargs) -> None:
        super().__init__(axis=axis, output_dtype=output_dtype, **kwargs)

    def call(self, inputs, mask=None, training=None):
        # Weights of an attention over a mask are no classifier's output, and are left exact.
        if training and mask is None and isinstance(self.axis, int) and not _is_fused():
            return self.cast_output(_trainable_softmax(inputs, axis=self.axis))
        outputs = super().call(inputs, mask=mask)
        if mask is not None:
            # Keras 3.9 leaves a row without any true at its unmasked weights.
            outputs = ops.where(ops.greater(ops.cast(mask, "float32"), 0.5), outputs, 0.0)
        return self.cast_output(outputs)


@keras.saving.register_keras_serializable(package="mpkeras")
class Activation(OutputDtype, keras.layers.Activation):
    """An activation computed in float32 under any policy.

    `"softmax"` and `"sigmoid"` train as `Softmax` does.

    Args:
        activation: The name of a Keras activation, or a function.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.
        **kwargs: Of `keras.layers.Layer`, without `dtype`.

    Raises:
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

    Example:

    >>> layer = mpkeras.layers.Activation("linear")  # as the last layer: float32 logits
    >>> outputs = layer(keras.ops.array([1.0, 2.0], dtype="float16"))
    >>> keras.backend.standardize_dtype(outputs.dtype)
    'float32'
    """

    def __init__(self, activation: str | Callable, *, output_dtype: str | None = None, **kwargs) -> None:
        super().__init__(activation, output_dtype=output_dtype, **kwargs)

    def call(self, inputs, training=None):
        if training and not _is_fused():
            if self.activation is keras.activations.softmax:
                return self.cast_output(_trainable_softmax(inputs))
            if self.activation is keras.activations.sigmoid:
                return self.cast_output(_trainable_sigmoid(inputs))
        return self.cast_output(super().call(inputs))


@keras.saving.register_keras_serializable(package="mpkeras")
class BatchNormalization(OutputDtype, keras.layers.BatchNormalization):
    """Batch normalization whose inputs, statistics and output are float32 under any policy.

    Args:
        *args, **kwargs: Of `keras.layers.BatchNormalization`, without `dtype`.
        output_dtype: `None`: float32. `"compute"`: the compute dtype of the global policy at construction.

    Raises:
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

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
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

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
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

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
        ValueError: As of `Float32Mixin`, or if `output_dtype` is not one of these.

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


# Softmax and sigmoid whose crossentropy gradient does not vanish, for backends that do not fuse the two. Keras clips
# probabilities to `[epsilon, 1 - epsilon]` (1e-7) in its crossentropies. A label whose probability is below that gets
# the gradient 0: the worst mistakes teach nothing. TensorFlow is spared, as Keras finds the logits there and fuses.
# Elsewhere these functions stay just inside the clip, and gradients pass unclipped.


def _is_fused() -> bool:
    """Whether the crossentropies of the active backend find the logits of a probability."""
    return keras.backend.backend() == "tensorflow"


def _trainable_softmax(logits, axis=-1):
    """Returns probabilities of at least about `2 * epsilon`, with the gradient of the exact softmax.

    Through a crossentropy that normalizes and clips, the gradient is `softmax(logits) - one_hot(label)` up to
    `2 * epsilon` for each class: 2e-7 for two classes, 1e-3 for five thousand.
    """
    log_probabilities = ops.log_softmax(logits, axis=axis)
    floor = math.log(2 * keras.config.epsilon())
    # exp(log p) has the derivative p' d(log p), where p' is the floored probability: the crossentropy divides
    # by the same p', and what is left is the exact gradient.
    floored = ops.exp(_with_value(ops.maximum(log_probabilities, floor), gradient_of=log_probabilities))
    return floored / ops.stop_gradient(ops.sum(floored, axis=axis, keepdims=True))


def _trainable_sigmoid(logits):
    """Returns probabilities at least `3 * epsilon` away from 0 and 1, whose gradient reaches the logits.

    Through a binary crossentropy the gradient is `sigmoid(logits) - label` up to `3 * epsilon`.
    """
    limit = -math.log(3 * keras.config.epsilon())
    return ops.sigmoid(_with_value(ops.clip(logits, -limit, limit), gradient_of=logits))


def _with_value(value, gradient_of):
    """Returns a tensor that is `value`, and through which gradients flow as through `gradient_of`."""
    return gradient_of + ops.stop_gradient(value - gradient_of)
