"""The gradient of recurrent weights on torch over many steps, against that in float64."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras

pytestmark = pytest.mark.backends("torch")


def gradients(layer, x):
    import torch

    loss = keras.ops.sum(keras.ops.cast(layer(x), "float32"))
    found = torch.autograd.grad(loss, [weight.value for weight in layer.trainable_weights])
    return [gradient.double().cpu().numpy() for gradient in found]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_the_sum_over_many_steps(kind, policy):
    """Each of 700 steps adds about the same."""
    x = np.full((3, 700, 4), 0.25, "float32")
    layer = kind(6, return_sequences=True)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layers.Dense(1)(layers.Bidirectional(layer)(inputs)))
    mpkeras.apply_policy(model, policy)
    layer = model.layers[1].backward_layer
    assert layer.compute_dtype == policy.removeprefix("mixed_")
    wide = kind.from_config(layer.get_config() | {"dtype": "float64"})
    wide.build(x.shape)
    wide.set_weights(layer.get_weights())
    for found, expected in zip(gradients(layer, x), gradients(wide, x), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.04 * np.abs(expected).max())
    mpkeras.apply_policy(model, "float32")
    assert layer.use_cudnn == "auto"
