"""A GAN with an optimizer for each of its parts."""

import keras
from keras import layers, ops


class Gan(keras.Model):
    """A small DCGAN: noise in, the discriminator's opinion of an image made of it out."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(16),
                layers.Reshape((2, 2, 4)),
                layers.Conv2DTranspose(4, 3, strides=2, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.5),
                layers.ReLU(),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, strides=2, padding="same"),
                layers.LeakyReLU(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.built = True

    def compile_with(self, d_optimizer, g_optimizer):
        self.compile()
        self.optimizers = {"d": d_optimizer, "g": g_optimizer}

    def call(self, noise):
        return self.discriminator(self.generator(noise))

    def d_loss(self, noise, real, weight):
        fake = self.generator(noise, training=True)
        return discriminator_loss(self.discriminator(real), self.discriminator(fake), weight)

    def g_loss(self, noise):
        return generator_loss(self.discriminator(self.generator(noise, training=True)))

    def train_step(self, data):
        noise, real, weight = map(ops.convert_to_tensor, keras.utils.unpack_x_y_sample_weight(data))
        d_loss = self._update("d", self.discriminator, lambda: self.d_loss(noise, real, weight))
        g_loss = self._update("g", self.generator, lambda: self.g_loss(noise))
        return {"d_loss": d_loss, "g_loss": g_loss}

    def _update(self, name, part, loss_fn):
        optimizer, variables = self.optimizers[name], part.trainable_variables
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_fn()
                scaled_loss = optimizer.scale_loss(loss)
            scaled_grads = tape.gradient(scaled_loss, variables)
        else:
            self.zero_grad()
            loss = loss_fn()
            optimizer.scale_loss(loss).backward()
            scaled_grads = [v.value.grad for v in variables]
        optimizer.apply(scaled_grads, variables)
        return loss


def discriminator_loss(on_real, on_fake, weight):
    on_real, on_fake = ops.cast(on_real, "float32"), ops.cast(on_fake, "float32")
    return ops.mean(weight * ops.squeeze(ops.softplus(-on_real) + ops.softplus(on_fake), -1))


def generator_loss(on_fake):
    return ops.mean(ops.softplus(-ops.cast(on_fake, "float32")))
