"""Transfer learning: a new head on a frozen trunk first, then all of it with a small learning rate."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss on the new task."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    old, new = x[:, :1] * x[:, 1:2], (x[:, 0] * x[:, 1] > 0.2).astype("int32")
    trunk = keras.Sequential(
        [keras.Input((8,)), layers.Dense(64, "tanh"), layers.BatchNormalization(), layers.Dense(32, "tanh")]
    )
    pretrained = keras.Sequential([trunk, layers.Dense(1)])
    pretrained.compile(keras.optimizers.Adam(1e-2), "mse")
    pretrained.fit(x, old, epochs=12, verbose=0)  # in float32, by somebody else

    inputs = keras.Input((8,))
    trunk.trainable = False
    model = keras.Model(inputs, layers.Dense(2, "softmax")(trunk(inputs, training=False)))
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    mpkeras.prepare(model, policy)
    model.fit(x, new, epochs=5, verbose=0)

    trunk.trainable = True
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")  # it stays prepared
    model.fit(x, new, epochs=5, verbose=0)
    return model, model.evaluate(x, new, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
