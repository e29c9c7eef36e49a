"""A loop of your own on torch: a `DataLoader`, `backward`, and a Keras optimizer."""

import keras
import numpy as np
import torch
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int64")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(3, "softmax")])
    mpkeras.apply_policy(model, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for _ in range(10):
        for batch, target in torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True):
            model.zero_grad()
            loss = loss_fn(target, model(batch, training=True))
            optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in model.trainable_variables])
    return model, float(loss_fn(y, model(x)).detach())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
