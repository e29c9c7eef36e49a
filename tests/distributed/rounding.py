"""Trains on one device and on many, and prints the bits, or with `--float8` the weights, to which each of them rounds.

Small weights and slots get gradients of whole numbers and halves of them, whose sums are exact in any order, and which
know nothing of the weights. With products in float8 the second half of each batch is larger by far, and weighs nothing
in the loss: it counts for the scales alone.
"""

import warnings

from devices import ALONE, average_gradients, local_values, many_devices, parser, print_result, wrapped

STEPS, ROWS = 5, 16


def main():
    own_parser = parser(__doc__)
    own_parser.add_argument("--float8", action="store_true")
    options = own_parser.parse_args()
    devices = many_devices(options)
    warnings.simplefilter("ignore")
    if options.float8:
        one = trained_in_float8(ALONE)
        devices.begin_to_share()
        print_result({"one": one, "many": trained_in_float8(devices)})
        return
    # By `fit`; among ranks in a loop under `DistributedDataParallel` and in a step of ours.
    ways = ("loop", "step") if options.where == "ranks" else ("fit",)
    policies = (("bfloat16", None), ("mixed_bfloat16", "bfloat16"))
    cases = [(options, way, *policy) for way in ways for policy in policies]
    result = [{"case": case[1:], "one": trained(ALONE, *case)} for case in cases]
    devices.begin_to_share()
    for case, found in zip(cases, result, strict=True):
        found["many"] = trained(devices, *case)
        found["with faults"] = trained(devices, *case, faults=(0, 3))
    print_result(result)


def trained(devices, options, way, policy, slot_dtype, faults=()) -> dict:
    """Trains for `STEPS` and returns what is kept; before the steps in `faults` one with an infinite row is skipped."""
    import numpy as np

    x = np.random.default_rng(0).integers(-3, 4, size=(ROWS, 8)).astype("float32")
    bad = np.where(np.arange(ROWS)[:, None] == ROWS - 3, np.inf, x).astype("float32")
    with devices.scope():
        model, train = made(devices, options, way, policy, slot_dtype)
    first = [local_values(v)[0].tobytes() for v in model.weights]
    batches = [[bad] * (number in faults) + [np.roll(x, number, axis=1)] for number in range(STEPS)]
    train(sum(batches, []))
    kept = [v for v in [*model.weights, *model.optimizer.inner_optimizer.variables] if "float" in v.dtype]
    if options.where.endswith("parallel"):
        model.jax_state_sync()
    # Of variables that lie whole on each device: how many different values there are.
    copies = [{a.tobytes() for a in local_values(v)} for v in kept if local_values(v)[0].shape == v.shape]
    return {
        "bits": [np.asarray(v.numpy()).tobytes().hex() for v in kept],
        "copies": [len(found) for found in copies],
        "dtypes": sorted({v.dtype for v in kept}),
        "moved": [local_values(v)[0].tobytes() for v in model.weights] != first,
        "skipped": int(model.optimizer.skipped_steps.numpy()),
    }


def made(devices, options, way, policy, slot_dtype):
    """Returns a model and what trains it on batches."""
    import keras
    import numpy as np

    import mpkeras

    keras.utils.set_random_seed(1)
    kernel = keras.initializers.RandomUniform(-2.0, 2.0, seed=3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, kernel_initializer=kernel, name="dense")])
    # A rate at which nearly every weight has to be rounded.
    inner = keras.optimizers.SGD(0.001, momentum=0.9, weight_decay=0.001)
    # No rule: the one layer makes the outputs, and has small weights all the same.
    policy = mpkeras.Policy(policy, slot_dtype=slot_dtype or "auto", keep_float32=())
    if way == "fit":
        model.compile(inner, loss_of_rows(), jit_compile=keras.backend.backend() == "jax")
        mpkeras.prepare(model, policy)

        def fit(batches):
            x = np.concatenate(batches)
            model.fit(x, np.zeros((len(x), 16)), batch_size=ROWS, shuffle=False, verbose=0)

        return model, fit
    mpkeras.apply_policy(model, policy)
    model.optimizer = optimizer = mpkeras.LossScaleOptimizer(inner, slot_dtype=policy.slot_dtype)
    # Ranks make the mean of their gradients.
    loss = loss_of_rows(1.0 if devices.is_shared else 1 / 2)
    if way == "step":
        if devices.is_shared:
            average_gradients(model, options.processes)
        step = mpkeras.make_train_step(model, optimizer, loss)
        return model, lambda batches: [
            step(devices.own_rows(x), devices.own_rows(np.zeros((ROWS, 16)))) for x in batches
        ]
    step = loop_of_ranks(devices, model, lambda outputs: loss(keras.ops.zeros_like(outputs), outputs))
    return model, lambda batches: [step(x) for x in batches]


def loop_of_ranks(devices, model, loss_of):
    """Returns a step of a loop around the optimizer, on arrays of which the first is what the model is given."""
    import keras

    module = wrapped(model) if devices.is_shared else model

    def step(*batch):
        x, *others = (keras.ops.convert_to_tensor(devices.own_rows(values)) for values in batch)
        model.zero_grad()
        model.optimizer.scale_loss(loss_of(module(x, training=True), *others)).backward()
        variables = model.trainable_variables
        model.optimizer.apply([v.value.grad for v in variables], variables)

    return step


def loss_of_rows(factor=1.0):
    """Returns a loss whose gradient to the outputs is `factor`."""
    import keras

    class Sum(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return factor * keras.ops.sum(keras.ops.cast(y_pred, "float32"), axis=-1)

    return Sum(reduction="sum")


def trained_in_float8(devices) -> list:
    """Returns the weights after four steps."""
    import keras
    import numpy as np

    import mpkeras
    from mpkeras.conversion.float8 import multiplies_in_float8

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(32, 16)) * np.repeat([1.0, 2e4], 16)[:, None]).astype("float32")
    y = rng.normal(size=(32, 16)).astype("float32")
    weights = np.repeat([1.0, 0.0], 16).astype("float32")
    keras.utils.set_random_seed(0)
    with devices.scope():
        parts = [keras.layers.Dense(32, "relu", name=f"part{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((16,)), *parts, keras.layers.Dense(16, name="last")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        mpkeras.prepare(model, "mixed_float8")
    assert sum(map(multiplies_in_float8, model.layers)) == 2
    if keras.backend.backend() == "torch" and devices.is_shared:
        step = loop_of_ranks(devices, model, lambda z, y, weights: ((z.float() - y) ** 2 * weights[:, None]).mean())
        for _ in range(4):
            step(x, y, weights)
    else:
        model.fit(x, y, sample_weight=weights, batch_size=len(x), epochs=4, shuffle=False, verbose=0)
    return [np.asarray(weight, "float64").tolist() for weight in model.get_weights()]


if __name__ == "__main__":
    main()
