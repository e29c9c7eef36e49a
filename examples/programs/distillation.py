"""Knowledge distillation: a small student learns from a trained teacher, in `compute_loss`."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras


class Distiller(keras.Model):
    def __init__(self, student, teacher, temperature=3.0):
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher, temperature
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        student_loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        teacher_pred = self.teacher(x, training=False)
        distillation_loss = keras.losses.kl_divergence(
            ops.softmax(teacher_pred / self.temperature), ops.softmax(y_pred / self.temperature)
        )
        return ops.mean(0.1 * student_loss + 0.9 * self.temperature**2 * distillation_loss)


def train(policy="mixed_float16", seed=0):
    """Returns the model and the share of examples that the student gets wrong."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int32")
    teacher = keras.Sequential([keras.Input((8,)), layers.Dense(64, activation="relu"), layers.Dense(3)])
    teacher.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mpkeras.prepare(teacher, policy)
    teacher.fit(x, y, epochs=10, verbose=0)

    student = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    model = Distiller(student, teacher)
    model.compile(keras.optimizers.Adam(1e-2))
    mpkeras.prepare(model, policy)
    model.fit(x, y, epochs=20, verbose=0)
    return model, float(np.mean(model.predict(x, verbose=0).argmax(axis=-1) != y))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
