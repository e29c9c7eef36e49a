"""Small models that `keras.RematScope` does not train on one backend or another (Keras 3.15): with `remat` they train.

In Keras "full" and the other modes fail in graphs of TensorFlow, and on JAX with dropout, statistics or a `training`
argument. Here each model trains as the same run without rematerialization.
"""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(32, 16)).astype("float32")
IMAGES = RNG.normal(size=(8, 16, 16, 3)).astype("float32")
SEQUENCES = RNG.normal(size=(8, 8, 16)).astype("float32")


class Block(layers.Layer):
    """With a mask of dropout, which a `training` argument switches."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.drop = layers.Dense(width, activation="relu"), layers.Dropout(0.1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, training=None):
        return x + self.drop(self.dense(x), training=training)


class BlockWithoutTraining(Block):
    def call(self, x):
        return x + self.dense(x)


def chain(shape, *inner):
    return keras.Sequential([keras.Input(shape), *inner, layers.Dense(1)])


def attention():
    x = inputs = keras.Input((8, 16))
    x = layers.MultiHeadAttention(2, 8)(x, x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


MODELS = {
    "dense": (lambda: chain((16,), layers.Dense(16, "relu")), ROWS),
    "normalization": (lambda: chain((16,), layers.Dense(16, "gelu"), layers.LayerNormalization()), ROWS),
    "dropout": (lambda: chain((16,), layers.Dense(16, "relu"), layers.Dropout(0.1)), ROWS),
    "statistics": (lambda: chain((16,), layers.Dense(16), layers.BatchNormalization()), ROWS),
    "convolution": (
        lambda: chain((16, 16, 3), layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D()),
        IMAGES,
    ),
    "attention": (attention, SEQUENCES),
    "block": (lambda: chain((16,), Block(16, name="block")), ROWS),
    "block without `training`": (lambda: chain((16,), BlockWithoutTraining(16, name="block")), ROWS),
}


def losses(name, kept=None):
    """Returns the loss of each step; `kept(model)` returns the layers whose outputs are kept."""
    make, x = MODELS[name]
    keras.utils.set_random_seed(0)
    model = make()
    model.compile("adam", "mse")
    mpkeras.prepare(model, "float32", remat=None if kept is None else kept(model))
    found = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(float(logs["loss"])))
    y = np.zeros((len(x), 1), "float32")
    model.fit(x, y, epochs=2, batch_size=4, verbose=0, shuffle=False, callbacks=[log])
    return found, mpkeras.audit(model).computed_again


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_computed_again(name):
    """As Keras' "full" and "larger_than" ask for it."""
    again, parts = losses(name, lambda model: model.layers)
    # The last layer keeps everything.
    assert parts and all(first == last for first, last in parts)
    np.testing.assert_allclose(again, losses(name)[0], rtol=1e-5)


@pytest.mark.slow
def test_a_named_layer_computed_again():
    """As "list_of_layers" does."""
    again, parts = losses("block", lambda model: ["path:block$"])
    ((first, last),) = parts
    assert first == last and first.endswith("block")
    np.testing.assert_allclose(again, losses("block")[0], rtol=1e-5)
