"""U-Net: each pixel of a picture gets a class."""

import keras
import numpy as np
from keras import layers

import mpkeras


def convolved(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.8)(x))


def unet(size):
    inputs = keras.Input((size, size, 1))
    fine = convolved(inputs, 8)
    middle = convolved(layers.MaxPooling2D()(fine), 16)
    coarse = convolved(layers.MaxPooling2D()(middle), 16)
    x = layers.concatenate([layers.UpSampling2D()(coarse), middle])
    x = layers.concatenate([layers.UpSampling2D()(convolved(x, 16)), fine])
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(convolved(x, 8)))


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    rows, columns = np.mgrid[:16, :16]
    middle = np.random.uniform(4, 12, (2, 128, 1, 1))
    y = ((rows - middle[0]) ** 2 + (columns - middle[1]) ** 2 < 16).astype("int32")[..., None]  # a disk
    x = (y + 0.5 * np.random.normal(size=y.shape)).astype("float32")
    model = unet(16)
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
