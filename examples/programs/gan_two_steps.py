"""GAN in a loop of two compiled steps, on every backend: the discriminator is frozen while the generator learns."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the generator and how far the mean of what it draws is from the data's."""
    keras.utils.set_random_seed(seed)
    real = np.random.normal((2.0, -1.0), 0.5, (1024, 2)).astype("float32")
    with mpkeras.policy_scope(policy):
        discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(32, "leaky_relu"), layers.Dense(1)])
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(32, "leaky_relu"), layers.Dense(2)])
        mpkeras.apply_policy(generator)  # what it draws is float32: NumPy's sums in bfloat16 are wrong
        noise = keras.Input((4,))
        judged = keras.Model(noise, discriminator(generator(noise)))
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    d_step = mpkeras.make_train_step(discriminator, keras.optimizers.Adam(2e-3, beta_1=0.5), loss_fn)
    discriminator.trainable = False
    g_step = mpkeras.make_train_step(judged, keras.optimizers.Adam(2e-3, beta_1=0.5), loss_fn)

    for _ in range(12):
        for start in range(0, len(real), 64):
            batch = real[start : start + 64]
            fake = generator(np.random.normal(size=(64, 4)).astype("float32"))
            both = np.concatenate([keras.ops.convert_to_numpy(fake), batch])
            discriminator.trainable = True
            d_step(both, np.repeat([[0.0], [1.0]], 64, axis=0).astype("float32"))
            discriminator.trainable = False
            g_step(np.random.normal(size=(64, 4)).astype("float32"), np.ones((64, 1), "float32"))
    fake = keras.ops.convert_to_numpy(generator(np.random.normal(size=(1024, 4)).astype("float32")))
    return generator, float(np.linalg.norm(fake.mean(axis=0) - (2.0, -1.0)))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
