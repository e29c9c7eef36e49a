"""A loop of your own on every backend: `make_train_step`, with metrics and accumulated gradients."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int32")
    with mpkeras.policy_scope(policy):
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(32, "relu"), layers.BatchNormalization(), layers.Dense(3, "softmax")]
        )
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    optimizer = keras.optimizers.Adam(1e-2)
    step = mpkeras.make_train_step(model, optimizer, loss_fn, metrics=[accuracy], accumulate_steps=2)
    for _ in range(15):
        accuracy.reset_state()
        order = np.random.permutation(512)
        for start in range(0, 512, 32):
            rows = order[start : start + 32]
            step(x[rows], y[rows])
    return model, float(loss_fn(y, keras.ops.convert_to_numpy(model(x))))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
