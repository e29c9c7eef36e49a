"""Denoising diffusion: a network learns the noise in data that were mixed with it, and then draws new ones."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras

STEPS = 20
KEPT = np.cumprod(1 - np.linspace(0.01, 0.4, STEPS)).astype("float32")  # share of the signal after each step


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)
        self.time = layers.Embedding(STEPS, 16)
        self.net = keras.Sequential([layers.Dense(64, "silu"), layers.Dense(64, "silu"), layers.Dense(2)])

    def noise_in(self, mixed, time):
        return self.net(ops.concatenate([ops.cast(mixed, self.compute_dtype), self.time(time)], axis=-1))

    def call(self, x, training=False):
        time = keras.random.randint((ops.shape(x)[0],), 0, STEPS, seed=self.seed_generator)
        noise = keras.random.normal(ops.shape(x), dtype="float32", seed=self.seed_generator)
        kept = ops.take(ops.convert_to_tensor(KEPT), time)[:, None]
        found = self.noise_in(ops.sqrt(kept) * ops.cast(x, "float32") + ops.sqrt(1 - kept) * noise, time)
        self.add_loss(ops.mean(ops.square(ops.cast(found, "float32") - noise)))
        return found

    def draw(self, rows):
        x = np.random.normal(size=(rows, 2)).astype("float32")
        for time in reversed(range(STEPS)):
            noise = ops.convert_to_numpy(self.noise_in(x, np.full(rows, time, "int32"))).astype("float32")
            rate = 1 - KEPT[time] / (KEPT[time - 1] if time else 1.0)
            x = (x - rate / np.sqrt(1 - KEPT[time]) * noise) / np.sqrt(1 - rate)
            if time:
                x += np.sqrt(rate) * np.random.normal(size=x.shape).astype("float32")
        return x


def train(policy="mixed_float16", seed=0):
    """Returns the model and how far its points are from the circle of the data, on average."""
    keras.utils.set_random_seed(seed)
    angle = np.random.uniform(0, 2 * np.pi, 1024)
    x = np.stack([np.sin(angle), np.cos(angle)], axis=1).astype("float32")
    model = Diffusion()
    model.compile(keras.optimizers.Adam(5e-3))
    mpkeras.prepare(model, policy)
    model.fit(x, batch_size=64, epochs=40, verbose=0)
    return model, float(np.abs(np.linalg.norm(model.draw(512), axis=1) - 1).mean())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
