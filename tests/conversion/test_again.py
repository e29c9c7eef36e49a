"""What Keras computes again in the backward pass is what it computed the first time: 16 bits, masks and statistics."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from tests.step_modes import snapshot

X = np.random.default_rng(8).normal(size=(24, 6)).astype("float32")
# TensorFlow recomputes nothing in a graph.
MODE = {"run_eagerly": True} if keras.backend.backend() == "tensorflow" else {}
TWICE = pytest.mark.backends("tensorflow", "torch")


class Counted(layers.Layer):
    """Depends on a counter that it moves, and on a weight of its own."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x * self.scale * (1 + ops.cast(self.count, x.dtype) / 8)


class WithDropout(layers.Layer):
    """Tells the layer inside nothing of `training`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = layers.Dropout(0.4)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        return self.drop(ops.matmul(x, self.kernel))


class Branches(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(6,), initializer="ones", name="scale")
        self.wide, self.block, self.head = layers.Dense(6, dtype="float32"), WithDropout(name="named"), layers.Dense(1)

    def call(self, x, training=None):
        return self.head(self.block(self.wide(x)) * self.scale)


def chain(*inner):
    return keras.Sequential([keras.Input((6,)), layers.Dense(6, "relu", name="first"), *inner, layers.Dense(1)])


MODELS = {
    "dense": lambda: chain(layers.Dense(6, "gelu")),
    "float32 inside": lambda: chain(layers.Dense(6, dtype="float32"), layers.LayerNormalization()),
    "statistics": lambda: chain(layers.BatchNormalization(momentum=0.5, name="named")),
    "masks": lambda: chain(layers.Dropout(0.4, name="named")),
    "written weights": lambda: chain(layers.SpectralNormalization(layers.Dense(6), name="named")),
    "state of the user's": lambda: chain(Counted(name="named")),
    "nested": lambda: chain(chain(layers.Dense(6))),
    "subclassed": Branches,
    # Its cell keeps its masks from one time step to the next, and is computed again by itself, too, in mode "full".
    "recurrent": lambda: chain(
        layers.Reshape((3, 2)), layers.LSTM(6, dropout=0.4, recurrent_dropout=0.4, name="named")
    ),
}
CASES = [(name, "full", "mixed_float16") for name in MODELS]
CASES += [("recurrent", "full", "float32"), ("statistics", "activations", "mixed_bfloat16")]
CASES += [(name, "list_of_layers", "mixed_float16") for name in ("masks", "written weights", "subclassed", "recurrent")]


def trained(name, policy, scope):
    keras.utils.set_random_seed(4)
    with scope:
        model = MODELS[name]()
    model.compile(keras.optimizers.SGD(0.05), "mse", **MODE)
    mpkeras.prepare(model, policy, loss_scale=64.0)
    losses = model.fit(X, X[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, snapshot(model.variables)


@pytest.mark.slow
@TWICE
@pytest.mark.parametrize("name, mode, policy", CASES)
def test_numbers_are_those_without(name, mode, policy):
    scope = keras.RematScope(mode=mode, layer_names=["first", "named"])
    assert trained(name, policy, scope) == trained(name, policy, contextlib.nullcontext())


@pytest.mark.backends("torch")
def test_a_step_in_float32_draws_the_masks_of_an_rnn_once_a_batch():
    def losses(scope):
        keras.utils.set_random_seed(4)
        with scope:
            model = chain(layers.Reshape((3, 2)), layers.LSTM(6, dropout=0.4))
        step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.05), "mse")
        return [float(step(X, X[:, :1])["loss"]) for _ in range(4)]

    assert losses(keras.RematScope()) == losses(contextlib.nullcontext())


@pytest.mark.backends("jax")
def test_jax_traces_it_once():
    losses, _ = trained("float32 inside", "mixed_bfloat16", contextlib.nullcontext())
    assert trained("float32 inside", "mixed_bfloat16", keras.RematScope())[0] == pytest.approx(
        losses, rel=1e-2
    )  # 8 bits


@TWICE
def test_the_way_back():
    with keras.RematScope():
        model = chain()
    model.compile("sgd", "mse")
    # What mpkeras trains is mended in float32, too.
    for convert, policy in ((mpkeras.apply_policy, "mixed_bfloat16"), (mpkeras.prepare, "float32")):
        convert(model, policy)
        assert "rematerialized_call" in vars(model.layers[0])
        mpkeras.apply_policy(model, "float32")
        assert not any("rematerialized_call" in vars(layer) for layer in model._flatten_layers())
