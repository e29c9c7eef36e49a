"""A `train_step` of your own on TensorFlow: `GradientTape` and `optimizer.scale_loss`."""

import keras
import numpy as np
import tensorflow as tf

import mpkeras


class Regressor(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(32, activation="tanh")
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.head = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            scaled_loss = self.optimizer.scale_loss(loss)  # the loss itself where nothing is scaled
        gradients = tape.gradient(scaled_loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def train(policy="mixed_float16", seed=0):
    """Returns the model and its mean squared error."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = np.sin(x[:, :1]) * x[:, 1:2]
    model = Regressor()
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    mpkeras.prepare(model, policy)
    model.fit(x, y, epochs=15, verbose=0)
    return model, model.evaluate(x, y, verbose=0, return_dict=True)["loss"]


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
