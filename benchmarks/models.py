"""The models that whole training steps are measured on, their batches, and the modes they are compiled in."""

# The name of the mode, and `jit_compile`, by backend.
MODES = {
    "tensorflow": (("tensorflow graph", False), ("tensorflow XLA", True)),
    "jax": (("jax jit", True),),
    "torch": (("torch eager", False),),
}


def cnn(keras):
    """Three convolutions with BatchNormalization: state besides the weights that a skip must not touch."""
    layers = keras.layers
    stack = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        stack += [layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)]
        stack += [layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])


def transformer(keras):
    """Two pre-norm blocks over 64 tokens."""
    layers = keras.layers
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(2000, 128)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(128)(layers.Dense(512, activation="gelu")(y))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def lstm(keras):
    """One LSTM over 32 steps."""
    return keras.Sequential(
        [keras.Input((32, 32)), keras.layers.LSTM(128), keras.layers.Dense(10)],
    )


def mlp(keras):
    """Twelve layers of 512: 3 M parameters and a small batch, so that the update is most of the step.

    The hardest case for a step that is skipped as a whole: no weight may change before the last gradient is
    there, while `bare` updates each layer as soon as its gradient is computed and still in the cache. On JAX
    and two free cores that waiting alone, without any check, was measured at 1.11.
    """
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(12)]
    return keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(10)])


MODELS = {"cnn": (cnn, 32), "transformer": (transformer, 16), "lstm": (lstm, 32), "mlp": (mlp, 32)}


def ratios_by_case(results: list[dict]) -> dict:
    """Returns the ratios to `bare` as `harness.write_bar_plot` takes them: by model and mode, then by variant."""
    groups = {}
    for result in results:
        if result["variant"] != "bare":
            name = f"{result['model']}\n{result['mode']}"
            groups.setdefault(name, {})[result["variant"]] = result["ratio"]
    return groups


def make_batch(model, batch_size: int):
    """Returns a seeded batch `(x, y)` of what `model` takes, and of ten classes."""
    import numpy as np

    generator = np.random.default_rng(0)
    (inputs,) = model.inputs
    shape = (batch_size, *inputs.shape[1:])
    if inputs.dtype == "int32":
        x = generator.integers(0, 2000, size=shape).astype("int32")
    else:
        x = generator.normal(size=shape).astype("float32")
    return x, generator.integers(0, 10, size=batch_size).astype("int32")
