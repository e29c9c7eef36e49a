"""Stateful RNN: the state of one batch is where the next one starts; each epoch starts anew."""

import keras
import numpy as np
from keras import layers

import mpkeras


class ResetStates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].reset_states()


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    bits = np.random.choice([-1.0, 1.0], (16, 81)).astype("float32")
    x = bits[:, 1:].reshape(16, 20, 4).transpose(1, 0, 2).reshape(320, 4, 1)  # batch by batch, in the order of time
    before = bits[:, :-1].reshape(16, 20, 4).transpose(1, 0, 2).reshape(320, 4, 1)  # the bit before, of a batch before
    model = keras.Sequential(
        [
            keras.Input((4, 1), batch_size=16),
            layers.GRU(16, stateful=True, return_sequences=True),
            layers.Dense(1, activation="tanh"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    callbacks = [ResetStates(), mpkeras.callbacks.MixedPrecision(policy)]
    model.fit(x, before, batch_size=16, shuffle=False, epochs=10, verbose=0, callbacks=callbacks)
    model.layers[0].reset_states()
    return model, model.evaluate(x, before, batch_size=16, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
