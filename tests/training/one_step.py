"""One step of training, by each of the ways there are."""

import keras

import mpkeras


def loss_of_one_step(model, policy, way, x, y) -> float:
    """Returns the loss that one step reports, at a learning rate of 0 and a loss scale of 1.

    By `fit` after `prepare`, or by `make_train_step`.
    """
    if way == "fit":
        model.compile(keras.optimizers.SGD(0.0), "mse")
        mpkeras.prepare(model, policy, loss_scale=1.0)
        return model.fit(x, y, verbose=0, batch_size=len(x)).history["loss"][0]
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=1.0)
    step = mpkeras.make_train_step(mpkeras.apply_policy(model, policy), optimizer, "mse")
    return float(keras.ops.convert_to_numpy(step(x, y)["loss"]))
