"""Ten small models of different kinds, each with a batch: what `plan_memory` is asked about."""

import keras
from keras import layers, ops

WIDTH = 32


@keras.saving.register_keras_serializable(package="tests")
class Block(layers.Layer):
    """Two dense layers with dropout, and what they are given."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.up = layers.Dense(4 * width, "gelu")
        self.down = layers.Dense(width)
        self.dropout = layers.Dropout(0.1)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))
        self.built = True

    def call(self, x, training=None):
        return x + self.dropout(self.down(self.up(x)), training=training)

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """A list of blocks without a graph."""

    def __init__(self, blocks=3, **kwargs):
        super().__init__(**kwargs)
        self.number = blocks
        self.blocks = [Block(WIDTH, name=f"block_{number}") for number in range(blocks)]
        self.head = layers.Dense(1)

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)
        self.head.build(shape)
        self.built = True

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)

    def get_config(self):
        return {**super().get_config(), "blocks": self.number}


def rows(*shape):
    return keras.Input(shape)


def tokens(length=16):
    return keras.Input((length,), dtype="int32")


def mlp():
    hidden = [layers.Dense(4 * WIDTH, "relu") for _ in range(4)]
    return keras.Sequential([rows(WIDTH), *hidden, layers.Dense(1)])


def residual():
    x = inputs = rows(WIDTH)
    for _ in range(4):
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dense(8 * WIDTH, "gelu")(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


def batch_normalization():
    stack = [rows(16, 16, 3)]
    for _ in range(3):
        stack += [layers.Conv2D(16, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(1)])


def lstm():
    return keras.Sequential(
        [rows(12, 8), layers.LSTM(WIDTH, return_sequences=True), layers.LSTM(WIDTH), layers.Dense(1)]
    )


def causal_transformer():
    inputs = tokens()
    x = layers.Embedding(50, WIDTH)(inputs)
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 16, dropout=0.1)(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(y))])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def nested():
    inner = [keras.Sequential([rows(WIDTH), layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)]) for _ in range(3)]
    return keras.Sequential([rows(WIDTH), *inner, layers.Dense(1)])


def two_inputs():
    left, right = rows(WIDTH), rows(8)
    x = layers.Concatenate()([layers.Dense(WIDTH)(left), layers.Dense(WIDTH)(right)])
    for _ in range(3):
        x = layers.Dense(2 * WIDTH, "relu")(x)
    return keras.Model([left, right], layers.Dense(1)(x))


def two_outputs():
    x = inputs = rows(WIDTH)
    for _ in range(3):
        x = layers.Dense(4 * WIDTH, "relu")(x)
    return keras.Model(inputs, [layers.Dense(1)(x), layers.Dense(3)(x)])


def subclassed():
    model = Subclassed()
    model.build((None, WIDTH))
    return model


def shared_layer():
    shared = layers.Dense(WIDTH, "tanh")
    x = inputs = rows(WIDTH)
    for _ in range(4):
        x = layers.Add()([x, shared(layers.Dense(WIDTH, "relu")(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


MODELS = {
    build.__name__: build
    for build in (
        residual,
        causal_transformer,
        batch_normalization,
        lstm,
        subclassed,
        mlp,
        nested,
        two_inputs,
        two_outputs,
        shared_layer,
    )
}


def batch_for(model, size):
    """Returns a batch `(x, y)` of ones of what a model takes and returns."""

    def ones(tensor):
        return ops.ones((size, *tensor.shape[1:]), tensor.dtype)

    # A subclassed model has none of its own.
    inputs = getattr(model, "inputs", None) or [keras.KerasTensor((None, WIDTH))]
    outputs = getattr(model, "outputs", None) or [keras.KerasTensor((None, 1))]
    x, y = [[ones(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
    return (x[0] if len(x) == 1 else x), (y[0] if len(y) == 1 else y)
