"""A transformer block that classifies sequences of any length; padding is masked in attention and pooling."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras


@keras.saving.register_keras_serializable()
class TokenAndPosition(layers.Layer):
    def __init__(self, length, words, size, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(words, size, mask_zero=True)
        self.positions = layers.Embedding(length, size)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return self.tokens.compute_mask(x)


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.randint(1, 8, (512, 12))
    x[np.arange(12)[None] >= np.random.randint(4, 13, 512)[:, None]] = 0
    y = (x == 3).any(axis=-1).astype("int32")  # is there a 3?
    inputs = keras.Input((12,), dtype="int32")
    embedded = TokenAndPosition(12, 8, 16)(inputs)
    attended = layers.MultiHeadAttention(2, 8)(embedded, embedded)
    hidden = layers.LayerNormalization()(embedded + layers.Dropout(0.1)(attended))
    hidden = layers.Dense(32, activation="gelu")(hidden)
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.AdamW(5e-3), "sparse_categorical_crossentropy")
    model.fit(x, y, epochs=8, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
