"""The two models of the demo, built from stock Keras layers under the stock float32 policy."""

import keras
from keras import layers, ops

VOCABULARY_SIZE = 256  # bytes


def digits_model(width: int, hidden: int) -> keras.Model:
    """Returns a BatchNorm CNN with a softmax head for images of shape `(8, 8, 1)`.

    Most of its arithmetic is in the dense product: no CPU has a fast float16 convolution (ten times slower
    than float32 in TensorFlow), and a demo that waits for one shows little else.

    Args:
        width: Filters of the first convolution; the second has twice as many.
        hidden: Units of the dense layer.
    """
    images = layers.Input((8, 8, 1), name="images")
    x = images
    for filters, strides in ((width, 1), (2 * width, 2)):
        x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
        # Moving statistics with momentum 0.99, Keras' default, lag behind a training of 100 steps.
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(hidden, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    probabilities = layers.Dense(10, activation="softmax", name="probabilities")(x)
    return keras.Model(images, probabilities, name="digits")


def text_model(context: int, width: int, heads: int, hidden: int, blocks: int = 1) -> keras.Model:
    """Returns a causal transformer over bytes.

    It takes int32 `(batch, context)` and returns logits of shape `(batch, context, 256)`.

    Args:
        context: Bytes it reads at once.
        width: Numbers per position between the blocks; a multiple of `heads`.
        heads: Attention heads.
        hidden: Units of each block's first dense layer.
        blocks: Pairs of attention and dense layers.
    """
    codes = layers.Input((context,), dtype="int32", name="codes")
    # Positions come out of the graph, not from a constant: an Embedding called on an array is evaluated
    # once, here, and never trained.
    positions = ops.zeros_like(codes) + ops.arange(context, dtype="int32")
    x = _embedding(VOCABULARY_SIZE, width)(codes) + _embedding(context, width)(positions)
    for _ in range(blocks):
        attended = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(attended, attended, use_causal_mask=True)
        transformed = layers.LayerNormalization()(x)
        transformed = layers.Dense(hidden, activation="relu")(transformed)
        x = x + layers.Dense(width)(transformed)
    x = layers.LayerNormalization()(x)
    return keras.Model(codes, layers.Dense(VOCABULARY_SIZE, name="logits")(x), name="text")


def _embedding(rows: int, width: int) -> layers.Embedding:
    # As large as what a block adds to it (about 1). Keras' default, 0.03, drowns the byte in the first
    # block's output, and a short training spends its steps on digging it out.
    initializer = keras.initializers.RandomNormal(stddev=0.5)
    return layers.Embedding(rows, width, embeddings_initializer=initializer)
