"""A small language model, fine-tuned with LoRA: only the low-rank parts of its layers are trained."""

import keras
import numpy as np
from keras import layers

import mpkeras


def text(rows, step):
    """Returns numbers that go up by `step`, each one more than 15 starting from 0 again, as inputs and targets."""
    numbers = (np.random.randint(0, 16, (rows, 1)) + step * np.arange(9)) % 16
    return numbers[:, :-1], numbers[:, 1:]


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss on the new text."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,), dtype="int32")
    tokens = layers.Embedding(16, 32)(inputs)
    attended = layers.MultiHeadAttention(2, 16)(tokens, tokens, use_causal_mask=True)
    hidden = layers.RMSNormalization()(tokens + attended)
    hidden = layers.Dense(64, "gelu", name="hidden")(hidden)
    model = keras.Model(inputs, layers.Dense(16, name="logits")(hidden))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2), loss_fn)
    mpkeras.prepare(model, policy)
    model.fit(*text(256, step=1), epochs=5, verbose=0)

    for layer in model.layers:
        if layer.name in ("hidden", "logits"):
            layer.enable_lora(4)
        else:
            layer.trainable = False
    model.compile(keras.optimizers.AdamW(1e-2), loss_fn)  # it stays prepared
    x, y = text(256, step=3)
    model.fit(x, y, epochs=8, verbose=0)
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
