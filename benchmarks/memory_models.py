"""The models of `memory.py`, in the sizes that memory is published for, and small ones of the same kind.

Imports Keras: `memory.py` imports this module in the process that measures only.
"""

import keras
import numpy as np
from keras import layers, ops

VOCABULARY = 30_522
CLASSES = 1000


def resnet50(size: int) -> keras.Model:
    return keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None, name="resnet50"
    )


def bert(length: int, blocks: int, width: int, heads: int) -> keras.Model:
    """The encoder of Devlin et al. (2018), arXiv:1810.04805, with its dropout of 0.1 and a classifier on top."""
    tokens = keras.Input((length,), dtype="int32")
    positions = ops.zeros_like(tokens) + ops.arange(length, dtype="int32")
    x = layers.Embedding(VOCABULARY, width)(tokens) + layers.Embedding(length, width)(positions)
    x = layers.Dropout(0.1)(layers.LayerNormalization()(x))
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(width)(hidden)))
    return keras.Model(tokens, layers.Dense(CLASSES)(x[:, 0]), name="bert")


def images(batch_size: int, size: int):
    return np.zeros((batch_size, size, size, 3), "float32"), np.zeros(batch_size, "int32")


def texts(batch_size: int, length: int):
    return np.zeros((batch_size, length), "int32"), np.zeros(batch_size, "int32")


# Name: build, batch, and what the table says of it.
MODELS = {
    "resnet50": (lambda: resnet50(224), lambda: images(32, 224), "224 x 224, batch 32"),
    "bert_base": (lambda: bert(512, 12, 768, 12), lambda: texts(32, 512), "sequence 512, batch 32, dropout 0.1"),
    "resnet50_small": (lambda: resnet50(64), lambda: images(8, 64), "64 x 64, batch 8"),
    "bert_small": (lambda: bert(128, 2, 128, 2), lambda: texts(8, 128), "2 blocks of 128, sequence 128, batch 8"),
}
