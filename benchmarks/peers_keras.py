"""What the peers are compared on, and the training steps of mpkeras and of stock Keras on it.

Every library gets the same initial weights and the same batch, so that the losses of the first steps agree and a
difference in time is not one in arithmetic: `tests/benchmarks/test_peers.py` compares them.
"""

from typing import NamedTuple


class Sizes(NamedTuple):
    """A multilayer perceptron with ReLU and its batch; the inputs are as wide as the layers."""

    hidden: int = 6
    width: int = 512
    classes: int = 10
    batch_size: int = 256


# Small: the loss stays finite, and the loss scale where it is, for as long as the rounds last.
LEARNING_RATE = 1e-4
# Keras' default, smaller than optax' and torch's: the same for all.
EPSILON = 1e-7
# Where every dynamic loss scale starts; the interval after which it grows is 2000 steps in each library.
LOSS_SCALE = 2.0**15


def make_data(sizes: Sizes):
    """Returns `(weights, x, y)`: pairs of kernel and bias, layer by layer, and a batch of float32 and of classes."""
    import numpy as np

    generator = np.random.default_rng(0)
    widths = [sizes.width] * (sizes.hidden + 1) + [sizes.classes]
    weights = [
        (
            (generator.normal(size=(rows, columns)) * (2.0 / rows) ** 0.5).astype("float32"),
            np.zeros(columns, "float32"),
        )
        for rows, columns in zip(widths, widths[1:], strict=False)
    ]
    x = generator.normal(size=(sizes.batch_size, sizes.width)).astype("float32")
    y = generator.integers(0, sizes.classes, size=sizes.batch_size).astype("int32")
    return weights, x, y


def make_model(keras, policy: str, sizes: Sizes, weights):
    """Returns the model of Keras or of tf_keras; its logits come out in float32."""
    layers = keras.layers
    stack = [layers.Dense(sizes.width, activation="relu", dtype=policy) for _ in range(sizes.hidden)]
    # The product in 16 bits like the others, the loss in float32.
    head = [layers.Dense(sizes.classes, dtype=policy), layers.Activation("linear", dtype="float32")]
    model = keras.Sequential([keras.Input((sizes.width,)), *stack, *head])
    model.set_weights([array for pair in weights for array in pair])
    return model


def training_steps(jit_compile: bool, sizes: Sizes, peers: list[str]):
    """Returns `{name: step}`: mpkeras under `train_on_batch` and in a loop of one's own, stock Keras if wanted."""
    import keras

    import mpkeras

    weights, x, y = make_data(sizes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def optimizer():
        return keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON)

    def on_batch(library):
        model = make_model(keras, "mixed_bfloat16", sizes, weights)
        if library == "mpkeras":
            model.compile(optimizer(), loss, jit_compile=jit_compile, auto_scale_loss=False)
            mpkeras.prepare(model, "mixed_bfloat16", loss_scale=mpkeras.DynamicLossScale(LOSS_SCALE))
        else:
            scaled = keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=LOSS_SCALE)
            model.compile(scaled, loss, jit_compile=jit_compile, auto_scale_loss=False)
        return lambda: float(model.train_on_batch(x, y))

    def loop():
        model = make_model(keras, "mixed_bfloat16", sizes, weights)
        scaled = mpkeras.LossScaleOptimizer(optimizer(), loss_scale=mpkeras.DynamicLossScale(LOSS_SCALE))
        step = mpkeras.make_train_step(model, scaled, loss, jit_compile=jit_compile)
        # On the device already, as in every peer's loop; `train_on_batch`, also that of tf_keras, gets NumPy arrays.
        batch = [keras.ops.convert_to_tensor(values) for values in (x, y)]
        return lambda: float(step(*batch)["loss"])

    steps = {"mpkeras train_on_batch": on_batch("mpkeras"), "mpkeras loop": loop()}
    return steps | ({"keras train_on_batch": on_batch("keras")} if "keras" in peers else {})
