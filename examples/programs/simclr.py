"""SimCLR: two noisy views of each example are to be found among all views of the batch."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras


class ContrastiveModel(keras.Model):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.noise = layers.GaussianNoise(0.3, seed=7)
        # `UnitNormalization` is kept in float32; `ops.normalize` would be float16, where its epsilon is 0.
        self.encoder = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(16), layers.UnitNormalization()])

    def call(self, x, training=False):
        views = [self.encoder(self.noise(x, training=training)) for _ in range(2)]
        return ops.stack(views, axis=1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        first, second = y_pred[:, 0], y_pred[:, 1]
        similarity = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(similarity)[0])
        loss = keras.losses.sparse_categorical_crossentropy(labels, similarity, from_logits=True)
        reverse = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(similarity), from_logits=True)
        return ops.mean(loss + reverse)


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss in the last epoch."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 16)).astype("float32")
    model = ContrastiveModel()
    model.compile(keras.optimizers.Adam(3e-3))
    mpkeras.prepare(model, policy)
    history = model.fit(x, batch_size=64, epochs=8, verbose=0).history
    return model, history["loss"][-1]


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
