"""WGAN-GP: the penalty is a gradient within the loss. Only the outer loss is scaled."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras


class WganGp(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [layers.Dense(32), layers.LeakyReLU(), layers.Dense(32, "tanh"), layers.Dense(1)]
        )
        self.generator = keras.Sequential([layers.Dense(32), layers.LeakyReLU(), layers.Dense(2)])

    def compile(self, c_optimizer, g_optimizer):
        super().compile()
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def gradient_penalty(self, real, fake):
        mixed = fake + tf.random.uniform((tf.shape(real)[0], 1)) * (real - fake)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = tf.reduce_sum(self.critic(mixed))  # not scaled: the penalty wants its gradient to be 1
        return tf.reduce_mean((tf.norm(tape.gradient(score, mixed), axis=-1) - 1.0) ** 2)

    def update(self, optimizer, part, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled_loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled_loss, part.trainable_weights), part.trainable_weights)
        return loss

    def train_step(self, real):
        size = tf.shape(real)[0]
        for _ in range(3):
            fake = self.generator(tf.random.normal((size, 4)))
            c_loss = self.update(
                self.c_optimizer,
                self.critic,
                lambda fake=fake: (
                    tf.reduce_mean(self.critic(fake))
                    - tf.reduce_mean(self.critic(real))
                    + 10.0 * self.gradient_penalty(real, fake)
                ),
            )
        noise = tf.random.normal((size, 4))
        g_loss = self.update(
            self.g_optimizer, self.generator, lambda: -tf.reduce_mean(self.critic(self.generator(noise)))
        )
        return {"c_loss": c_loss, "g_loss": g_loss}


def train(policy="mixed_float16", seed=0):
    """Returns the model and how far the mean of what it draws is from the data's."""
    keras.utils.set_random_seed(seed)
    real = np.random.normal((1.0, -0.5), 0.3, (512, 2)).astype("float32")
    model = WganGp()
    model.compile(*[keras.optimizers.Adam(3e-3, beta_1=0.5, beta_2=0.9) for _ in range(2)])
    mpkeras.prepare(model, policy)
    model.fit(real, batch_size=64, epochs=40, verbose=0)
    fake = model.generator(np.random.normal(size=(1024, 4)).astype("float32"))
    return model, float(np.linalg.norm(np.mean(fake, axis=0) - (1.0, -0.5)))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
