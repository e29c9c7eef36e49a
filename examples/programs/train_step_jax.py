"""A `train_step` of your own on JAX: the state is a tuple that goes in and comes out."""

import jax
import keras
import numpy as np

import mpkeras


class Regressor(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(32, activation="tanh")
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.head = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))

    def scaled_loss(self, trainable, non_trainable, optimizer_variables, x, y):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        # The scale is a variable of the optimizer, and so part of the state.
        mapping = list(zip(self.optimizer.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.optimizer.scale_loss(loss), (loss, y_pred, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer_variables, metrics_variables = state
        x, y = data
        grad_fn = jax.grad(self.scaled_loss, has_aux=True)
        gradients, (loss, y_pred, non_trainable) = grad_fn(trainable, non_trainable, optimizer_variables, x, y)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        logs, new_metrics_variables = {}, []
        for metric in self.metrics:
            start = len(new_metrics_variables)
            values = metrics_variables[start : start + len(metric.variables)]
            arguments = (loss,) if metric.name == "loss" else (y, y_pred)
            values = metric.stateless_update_state(values, *arguments)
            logs[metric.name] = metric.stateless_result(values)
            new_metrics_variables += values
        return logs, (trainable, non_trainable, optimizer_variables, new_metrics_variables)


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
