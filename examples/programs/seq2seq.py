"""Sequence to sequence with LSTMs and masks: digits of any number are written backwards."""

import keras
import numpy as np
from keras import layers

import mpkeras

START, LENGTH = 10, 4  # 0 is padding, 1 to 9 are digits


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    lengths = np.random.randint(2, LENGTH + 1, 256)
    source, target = np.zeros((2, 256, LENGTH), "int32")
    for row, length in enumerate(lengths):
        source[row, :length] = np.random.randint(1, 10, length)
        target[row, :length] = source[row, :length][::-1]
    shifted = np.concatenate([np.full((256, 1), START, "int32"), target[:, :-1]], axis=1)

    encoder_inputs, decoder_inputs = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    embedded = layers.Embedding(11, 16, mask_zero=True)(encoder_inputs)
    _, *states = layers.LSTM(32, return_state=True)(embedded)
    embedded = layers.Embedding(11, 16, mask_zero=True)(decoder_inputs)
    decoded = layers.LSTM(32, return_sequences=True)(embedded, initial_state=states)
    model = keras.Model([encoder_inputs, decoder_inputs], layers.Dense(11, activation="softmax")(decoded))
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    precision = mpkeras.callbacks.MixedPrecision(policy)
    model.fit([source, shifted], target, epochs=15, verbose=0, callbacks=[precision])
    return model, model.evaluate([source, shifted], target, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
