"""The models and the real data of `fine_tune.py`, and the dtypes that their layers and tensors have.

Imports Keras: `fine_tune.py` imports this module in the process of one backend only.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import layers, ops

from mpkeras._keras import direct_sublayers
from mpkeras.demo.tasks import load_text
from mpkeras.policies.kernels import missing_kernel_rules

BYTES = 256


class TokenAndPositionEmbedding(layers.Layer):
    """Token and position embedding, summed: a layer around two layers, as in KerasHub."""

    def __init__(self, vocabulary_size: int, length: int, width: int, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(vocabulary_size, width, dtype=self.dtype_policy)
        self.positions = layers.Embedding(length, width, dtype=self.dtype_policy)
        self.length = length

    def build(self, input_shape):
        self.tokens.build(input_shape)
        self.positions.build((self.length,))
        self.built = True

    def call(self, tokens):
        return self.tokens(tokens) + self.positions(ops.arange(self.length))


class Backbone(keras.Model):
    """Pre-norm blocks over embedded tokens: a functional graph with a class of its own, as KerasHub's are."""

    def __init__(self, length: int, width: int, heads: int, blocks: int, **kwargs):
        tokens = keras.Input((length,), dtype="int32", name="token_ids")
        x = TokenAndPositionEmbedding(BYTES, length, width, name="embeddings")(tokens)
        for i in range(blocks):
            y = layers.LayerNormalization(name=f"attention_norm_{i}")(x)
            y = layers.MultiHeadAttention(heads, width // heads, name=f"attention_{i}")(y, y, use_causal_mask=True)
            x = layers.Add(name=f"attention_sum_{i}")([x, layers.Dropout(0.1, name=f"dropout_{i}")(y)])
            y = layers.LayerNormalization(name=f"mlp_norm_{i}")(x)
            y = layers.Dense(4 * width, activation="gelu", name=f"mlp_up_{i}")(y)
            x = layers.Add(name=f"mlp_sum_{i}")([x, layers.Dense(width, name=f"mlp_down_{i}")(y)])
        super().__init__(tokens, layers.LayerNormalization(name="final_norm")(x), **kwargs)


class CausalLM(keras.Model):
    """A backbone with the head of a task: the logits of the next byte at every position."""

    def __init__(self, backbone: Backbone, **kwargs):
        tokens = keras.Input(backbone.input_shape[1:], dtype="int32", name="token_ids")
        super().__init__(tokens, layers.Dense(BYTES, name="logits")(backbone(tokens)), **kwargs)
        self.backbone = backbone


def transformer(size: int) -> keras.Model:
    return CausalLM(Backbone(size, width=64, heads=4, blocks=2))


def resnet50(size: int) -> keras.Model:
    # Logits: what the loss makes of probabilities is another question than this one.
    return keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=2, classifier_activation=None, name="resnet50"
    )


def text_batches(size: int, batch_size: int, batches: int) -> list[tuple]:
    """Returns batches of `size` bytes of the standard library's source, and of the byte after each of them."""
    data = load_text(size, train_bytes=size * batch_size * batches + 1, held_out_bytes=size + 1)
    return _split(data.x_train, data.y_train, batch_size, batches)


def crop_batches(size: int, batch_size: int, batches: int) -> list[tuple]:
    """Returns batches of crops of scikit-learn's two photographs, preprocessed as ResNet50 asks, and which it is."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    generator = np.random.default_rng(0)
    y = generator.integers(0, len(photographs), size=batch_size * batches).astype("int32")
    crops = []
    for label in y:
        photograph = photographs[label]
        top, left = (generator.integers(0, extent - size) for extent in photograph.shape[:2])
        crops.append(photograph[top : top + size, left : left + size])
    x = keras.applications.resnet50.preprocess_input(np.stack(crops).astype("float32"))
    return _split(x, y, batch_size, batches)


def _split(x, y, batch_size: int, batches: int) -> list[tuple]:
    return [(x[i * batch_size :][:batch_size], y[i * batch_size :][:batch_size]) for i in range(batches)]


class Case(NamedTuple):
    """One model to train.

    `float32_layers` names the layers that compute in float32 under a 16-bit policy, by class or by name, written down
    by hand; those whose 16-bit kernel is missing on this backend are added where dtypes are checked.
    """

    build: Callable[[int], keras.Model]
    load: Callable[[int, int, int], list]
    size: int
    batch_size: int
    learning_rate: float
    float32_layers: tuple


MODELS = {
    "resnet50": Case(resnet50, crop_batches, 64, 16, 1e-4, ("BatchNormalization", "predictions")),
    "transformer": Case(transformer, text_batches, 64, 16, 3e-3, ("logits",)),
}


class Seen(NamedTuple):
    """The dtype of a layer's arithmetic, or of one tensor that it returned."""

    kind: str  # "layer" or "tensor"
    path: str
    class_names: tuple  # of the layer, and of those around it
    dtype: str


def dtypes(model, x) -> list[Seen]:
    """Returns what every layer of `model` computes in, and what every tensor between them is when `x` runs through.

    The tensors are those of a real forward pass, not the symbolic ones of the graph.
    """
    seen = []
    _visit(model, x, (), seen)
    return seen


def _visit(model, x, around, seen):
    inner = [layer for layer in model.layers if not isinstance(layer, layers.InputLayer)]
    for nested in inner:
        if isinstance(nested, keras.Model):
            _visit(nested, x, (*around, type(nested).__name__), seen)
    # `output` of a nested model is a tensor of its own graph: its layers were seen above.
    inner = [layer for layer in inner if not isinstance(layer, keras.Model)]
    (inputs,) = model.inputs
    # A model of one output returns it alone.
    tensors = keras.tree.flatten(keras.Model(inputs, [layer.output for layer in inner])(x))
    for layer, tensor in zip(inner, tensors, strict=True):
        names = (*around, type(layer).__name__)
        seen.append(Seen("tensor", layer.name, names, keras.backend.standardize_dtype(tensor.dtype)))
        _visit_sublayers(layer, layer.name, names, seen)


def _visit_sublayers(layer, path, names, seen):
    seen.append(Seen("layer", path, names, layer.compute_dtype))
    for sublayer in direct_sublayers(layer):
        _visit_sublayers(sublayer, f"{path}/{sublayer.name}", (*names, type(sublayer).__name__), seen)


def count(seen: list[Seen], kind: str) -> dict[str, int]:
    """Returns how many layers or tensors there are of each dtype."""
    return dict(Counter(entry.dtype for entry in seen if entry.kind == kind))


def unexpected(seen: list[Seen], float32_layers: tuple, compute_dtype: str) -> list[str]:
    """Returns a line for each layer and tensor that is not in the dtype it should be in; `[]` if all is well."""
    kept = {*float32_layers, *dict(missing_kernel_rules(compute_dtype))}
    lines = []
    for entry in seen:
        expected = "float32" if kept & {entry.path, *entry.class_names} else compute_dtype
        if entry.dtype != expected:
            lines.append(f"{entry.kind} {entry.path} ({entry.class_names[-1]}): {entry.dtype}, not {expected}")
    return lines
