"""GAN: one `train_step`, two optimizers, each with a loss scale of its own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([layers.Dense(32), layers.LeakyReLU(), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Dense(32), layers.LeakyReLU(), layers.Dense(2)])

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def update(self, optimizer, part, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled_loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled_loss, part.trainable_weights), part.trainable_weights)
        return loss

    def train_step(self, real):
        size = tf.shape(real)[0]
        ones, zeros = tf.ones((size, 1)), tf.zeros((size, 1))
        fake = self.generator(tf.random.normal((size, 4)))
        both, labels = tf.concat([fake, real], axis=0), tf.concat([zeros, ones], axis=0)
        d_loss = self.update(
            self.d_optimizer, self.discriminator, lambda: self.loss_fn(labels, self.discriminator(both))
        )
        noise = tf.random.normal((size, 4))
        g_loss = self.update(
            self.g_optimizer, self.generator, lambda: self.loss_fn(ones, self.discriminator(self.generator(noise)))
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def train(policy="mixed_float16", seed=0):
    """Returns the model and how far the mean of what it draws is from the data's."""
    keras.utils.set_random_seed(seed)
    real = np.random.normal((2.0, -1.0), 0.5, (1024, 2)).astype("float32")
    model = Gan()
    optimizers = [keras.optimizers.Adam(2e-3, beta_1=0.5) for _ in range(2)]
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    mpkeras.prepare(model, policy)
    model.fit(real, batch_size=64, epochs=15, verbose=0)
    fake = model.generator(np.random.normal(size=(1024, 4)).astype("float32"))
    return model, float(np.linalg.norm(np.mean(fake, axis=0) - (2.0, -1.0)))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
