"""Trains a model with products in float8 on one device and on two with half of each batch, and prints the weights.

What the second half holds is larger by far, and weighs nothing in the loss: it counts for the scales alone.
"""

from devices import ALONE, many_devices, parser, print_result, wrapped

ROWS, STEPS = 32, 4


def main():
    options = parser(__doc__).parse_args()
    devices = many_devices(options)
    result = {"one": trained(ALONE)}
    devices.begin_to_share()
    print_result({**result, "two": trained(devices)})


def trained(devices) -> list:
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(ROWS, 16)) * np.repeat([1.0, 2e4], ROWS // 2)[:, None]).astype("float32")
    y = rng.normal(size=(ROWS, 16)).astype("float32")
    weights = np.repeat([1.0, 0.0], ROWS // 2).astype("float32")
    with devices.scope():
        model = built()
    if keras.backend.backend() == "torch" and devices.is_shared:
        loop_of_ranks(model, *map(devices.own_rows, (x, y, weights)))
    else:
        model.fit(x, y, sample_weight=weights, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return [np.asarray(weight, "float64").tolist() for weight in model.get_weights()]


def built():
    import keras

    import mpkeras
    from mpkeras.conversion.float8 import multiplies_in_float8

    keras.utils.set_random_seed(0)
    parts = [keras.layers.Dense(32, "relu", name=f"part{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((16,)), *parts, keras.layers.Dense(16, name="last")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpkeras.prepare(model, "mixed_float8")
    assert sum(map(multiplies_in_float8, model.layers)) == 2
    return model


def loop_of_ranks(model, x, y, weights):
    import torch

    module = wrapped(model)
    x, y, weights = map(torch.tensor, (x, y, weights))
    for _ in range(STEPS):
        loss = ((module(x, training=True).float() - y) ** 2 * weights[:, None]).mean()
        model.zero_grad()
        model.optimizer.scale_loss(loss).backward()
        variables = model.trainable_variables
        model.optimizer.apply([v.value.grad for v in variables], variables)


if __name__ == "__main__":
    main()
