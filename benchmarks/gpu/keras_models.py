"""The three models in Keras. Layers are named as torch's modules are, so that a test can copy the weights."""

import keras
from keras import layers, ops

from gpu.cases import Case


def build(case: Case, attention_dtype: str | None = None):
    """Returns the model of `case` under the global policy; it returns logits.

    Args:
        attention_dtype: Of the attention layers where it is another than the policy's: JAX has no float16
            attention on a CPU, where mpkeras keeps these layers in float32 by itself.
    """
    return resnet(case) if case.family == "resnet" else transformer(case, attention_dtype)


def resnet(case: Case):
    """ResNet v1.5 in the data format that Keras is set to."""
    sizes = case.sizes
    is_last = keras.config.image_data_format() == "channels_last"
    axis = -1 if is_last else 1

    def conv(x, filters, kernel_size, strides, name):
        if kernel_size > 1:
            # Not `padding="same"`, which pads one side only under a stride of two: torch pads both.
            x = layers.ZeroPadding2D(kernel_size // 2, name=f"{name}_pad")(x)
        options = {"strides": strides, "use_bias": False, "kernel_initializer": "he_normal"}
        x = layers.Conv2D(filters, kernel_size, name=name, **options)(x)
        return layers.BatchNormalization(axis, momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)

    def relu(x, name):
        return layers.Activation("relu", name=name)(x)

    shape = (sizes.image_size, sizes.image_size)
    images = keras.Input((*shape, 3) if is_last else (3, *shape), name="images")
    x = relu(conv(images, sizes.width, 7, 2, "stem"), "stem_relu")
    # Zeros are the same as nothing here: behind a relu no value is below them.
    x = layers.MaxPooling2D(3, 2, name="pool")(layers.ZeroPadding2D(1, name="pool_pad")(x))
    for stage, blocks in enumerate(sizes.stages):
        width = sizes.width * 2**stage
        for block in range(blocks):
            name = f"stage{stage}_{block}"
            strides = 2 if stage > 0 and block == 0 else 1
            y = relu(conv(x, width, 1, 1, f"{name}_conv1"), f"{name}_relu1")
            y = relu(conv(y, width, 3, strides, f"{name}_conv2"), f"{name}_relu2")
            y = conv(y, 4 * width, 1, 1, f"{name}_conv3")
            shortcut = conv(x, 4 * width, 1, strides, f"{name}_shortcut") if block == 0 else x
            x = relu(layers.Add(name=f"{name}_sum")([shortcut, y]), f"{name}_relu3")
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(images, layers.Dense(sizes.classes, kernel_initializer=_normal(), name="head")(x))


class Embeddings(layers.Layer):
    """Token and position embeddings, summed; with `reverse=True` the product with the token table: the tied head."""

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs):
        super().__init__(**kwargs)
        self.sizes = (vocabulary, length, width)

    def build(self, _):
        vocabulary, length, width = self.sizes
        # No autocast: rows are taken in float32 and cast after, so that in the backward pass the rows of a token
        # that occurs often are summed in float32, where GPUs also have the faster atomic additions.
        options = {"initializer": _normal(), "autocast": False}
        self.tokens = self.add_weight(shape=(vocabulary, width), name="tokens", **options)
        self.positions = self.add_weight(shape=(length, width), name="positions", **options)
        self.built = True

    def call(self, x, reverse=False):
        if reverse:
            return ops.matmul(x, ops.transpose(ops.cast(self.tokens, x.dtype)))
        return ops.cast(ops.take(self.tokens, x, axis=0) + self.positions, self.compute_dtype)


def transformer(case: Case, attention_dtype: str | None = None):
    """An encoder with a label for each sequence, or a decoder with the next token at every position."""
    sizes, is_decoder = case.sizes, case.family == "decoder"

    def dense(x, units, name, activation=None):
        return layers.Dense(units, activation=activation, kernel_initializer=_normal(), name=name)(x)

    def norm(x, name):
        return layers.LayerNormalization(epsilon=1e-5, name=name)(x)

    def attention(x, name):
        # Keras picks cuDNN's flash kernel by itself where the tensors are 16-bit; the results say whether it did.
        options = {"kernel_initializer": _normal(), "dtype": attention_dtype}
        layer = layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads, name=name, **options)
        return layer(x, x, use_causal_mask=is_decoder)

    def mlp(x, name):
        return dense(dense(x, 4 * sizes.width, f"{name}_up", "gelu"), sizes.width, f"{name}_down")

    tokens = keras.Input((sizes.length,), dtype="int32", name="tokens")
    embeddings = Embeddings(sizes.vocabulary, sizes.length, sizes.width, name="embeddings")
    x = embeddings(tokens)
    if not is_decoder:
        x = norm(x, "first_norm")
    for block in range(sizes.blocks):
        name = f"blocks_{block}"
        for part, sublayer in (("attention", attention), ("mlp", mlp)):
            y = norm(x, f"{name}_{part}_norm") if is_decoder else x
            x = layers.Add(name=f"{name}_{part}_sum")([x, sublayer(y, f"{name}_{part}")])
            x = x if is_decoder else norm(x, f"{name}_{part}_norm")
    if is_decoder:
        return keras.Model(tokens, embeddings(norm(x, "last_norm"), reverse=True))
    return keras.Model(tokens, dense(dense(x[:, 0], sizes.width, "pooler", "tanh"), sizes.classes, "head"))


def _normal():
    # torch's side has the same, so that both start from the same loss. A new one each time: seeds differ.
    return keras.initializers.RandomNormal(stddev=0.02)
