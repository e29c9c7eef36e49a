"""P33: what layers add to the loss is computed and summed in float32."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras._keras import WEIGHT_PENALTIES
from mpkeras.callbacks import MixedPrecision
from tests.sixteen_bits import without_outputs
from tests.training.one_step import loss_of_one_step

POLICIES = [pytest.param(without_outputs(name), id=name) for name in ("mixed_float16", "mixed_bfloat16")]
X = np.full((1, 512), 400.0, "float32")  # one example: Keras 3.10 does not divide by their number


class Penalized(layers.Layer):
    """Adds a loss of its own, not yet summed: Keras sums it in the dtype that it has."""

    def call(self, x):
        self.add_loss(ops.abs(x))
        return x


def identity(**options):
    return layers.Dense(512, kernel_initializer="identity", **options)


def penalized(regularizer):
    inputs = keras.Input((512,))
    return keras.Model(inputs, identity(activity_regularizer=regularizer)(inputs))


def with_a_loss_of_its_own():
    inputs = keras.Input((512,))
    return keras.Model(inputs, Penalized()(identity()(inputs)))


def a_function_of_the_users_own(x):
    return ops.sum(ops.square(x)) * 1e-4


# Beyond float16, they or what they are made of. The outputs are the labels: the penalty is all of the loss.
PENALTIES = {
    "regularizer": (lambda: penalized(keras.regularizers.L2(0.01)), 0.01 * 400**2 * 512),
    "function": (lambda: penalized(a_function_of_the_users_own), 1e-4 * 400**2 * 512),
    "the layer's own": (with_a_loss_of_its_own, 400 * 512),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["fit", "make_train_step"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_beyond_float16_is_finite_and_that_of_float32(penalty, way, policy):
    make, expected = PENALTIES[penalty]
    assert loss_of_one_step(make(), policy, way, X, X) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("regularizer", [keras.regularizers.L1L2(0.1, 0.2), keras.regularizers.OrthogonalRegularizer()])
def test_a_converted_layer_is_saved_with_the_regularizer_itself(regularizer):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(4, activity_regularizer=regularizer)(inputs))
    before = model.get_config()
    mpkeras.apply_policy(model, without_outputs("mixed_float16"))
    stood_in_for = model.layers[-1].activity_regularizer
    assert isinstance(stood_in_for, type(regularizer)) and stood_in_for is not regularizer
    assert model.layers[-1].get_config()["activity_regularizer"] == keras.regularizers.serialize(regularizer)
    copy = keras.Model.from_config(model.get_config())
    assert type(copy.layers[-1].activity_regularizer) is type(regularizer)
    # Once more changes nothing, and the way back takes it out.
    mpkeras.apply_policy(model, without_outputs("mixed_float16"))
    assert model.layers[-1].activity_regularizer is stood_in_for
    mpkeras.apply_policy(model, "float32")
    assert model.layers[-1].activity_regularizer is regularizer
    assert model.get_config() == before


def test_a_function_keeps_its_name():
    model = mpkeras.apply_policy(penalized(a_function_of_the_users_own), without_outputs("mixed_float16"))
    assert model.layers[1].activity_regularizer.__name__ == "a_function_of_the_users_own"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_penalty_trains_as_in_float32(policy):
    def weights(policy):
        precision = MixedPrecision(policy, loss_scale=128.0)
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4, activity_regularizer="l2"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, x[:, :1], epochs=3, verbose=0, shuffle=False, callbacks=[precision])
        return np.concatenate([w.ravel() for w in model.get_weights()])

    np.testing.assert_allclose(weights(policy), weights("float32"), atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "is_built"), [("fit", False), ("make_train_step", True), ("evaluate", True)])
def test_a_penalty_of_small_weights_is_that_of_float32(way, is_built):
    # 771 ones: 772 in bfloat16. The outputs are the labels, so the penalty is all of the loss.
    options = {"use_bias": False, "kernel_initializer": "ones"}
    body = layers.Dense(257, kernel_regularizer=keras.regularizers.L2(0.5), **options)
    model = keras.Sequential([*[keras.Input((3,))] * is_built, body, layers.Dense(1, **options)])
    x, y = np.ones((1, 3), "float32"), np.full((1, 1), 771.0, "float32")
    if way == "evaluate":
        model.compile("sgd", "mse")
        loss = mpkeras.prepare(model, "bfloat16").evaluate(x, y, verbose=0)
    else:
        loss = loss_of_one_step(model, "bfloat16", way, x, y)
    assert (body.kernel.dtype, loss) == ("bfloat16", 385.5)


def test_the_regularizers_of_small_weights_are_as_they_were():
    regularizer = keras.regularizers.L1(0.25)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, kernel_regularizer=regularizer), layers.Dense(1)])
    mpkeras.apply_policy(model, "bfloat16")
    assert keras.backend.standardize_dtype(model.losses[0].dtype) == "float32"
    assert model.layers[0].kernel.regularizer is regularizer
    mpkeras.apply_policy(model, "float32")
    assert WEIGHT_PENALTIES not in vars(model)
