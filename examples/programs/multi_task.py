"""Several outputs: a class, a number and a vector, each with a loss and a weight of its own."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its weighted loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = {
        "kind": (x[:, 0] > x[:, 1]).astype("int32"),
        "price": 1_000 * (3 + x[:, 2:3] + x[:, 3:4]),
        "place": np.tanh(x[:, 4:7]),
    }
    inputs = keras.Input((8,))
    trunk = layers.BatchNormalization(momentum=0.9)(layers.Dense(32, activation="relu")(inputs))
    outputs = {
        "kind": layers.Dense(2, activation="softmax", name="kind")(trunk),
        "price": layers.Rescaling(1_000, name="price")(layers.Dense(1)(trunk)),
        "place": layers.Dense(3, activation="tanh", name="place")(trunk),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-2),
        loss={"kind": "sparse_categorical_crossentropy", "price": "mse", "place": "mse"},
        loss_weights={"kind": 1.0, "price": 1e-6, "place": 1.0},
        metrics={"kind": ["accuracy"], "price": ["mae"]},
    )
    mpkeras.prepare(model, policy)
    model.fit(x, y, epochs=12, verbose=0)
    return model, model.evaluate(x, y, verbose=0, return_dict=True)["loss"]


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
