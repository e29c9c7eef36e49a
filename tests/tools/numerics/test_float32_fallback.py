"""A layer that keeps overflowing moves to float32, alone, and training goes on with all its state."""

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_digits

import mpkeras
from mpkeras.callbacks import Float32Fallback, MixedPrecision
from tests.sixteen_bits import without_outputs
from tests.tools.numerics.test_numerics import Behind, Times, name
from tests.tools.numerics.test_numerics_monitor import X, Y, six_layers

quiet = pytest.mark.filterwarnings(
    "ignore:The outputs of layer .* are inf or NaN",
    "ignore:.*is given numbers beyond float16",
    "ignore:.*was skipped",
    "ignore:.*has moved from float16",
    "ignore:All .* steps of epoch",
    "ignore:.* steps skipped in epoch",
    "ignore:.* in a row",
)


def fit(model, *callbacks, loss_scale=2.0**-8, **options):
    callbacks = [MixedPrecision(without_outputs("mixed_float16"), loss_scale=loss_scale), *callbacks]
    return model.fit(X, Y, **{"batch_size": 4, "verbose": 0, "shuffle": False, "callbacks": callbacks, **options})


@pytest.mark.slow
@quiet
def test_the_culprits_alone_move_and_what_they_learned_stays():
    k = 4
    model = six_layers(k, learning_rate=0.0, up=1e3)
    weights = [np.array(w) for w in model.get_weights()]
    fallback = Float32Fallback()
    # So small a scale that no gradient overflows, which would move the layers before it.
    fit(model, fallback, loss_scale=2.0**-28, epochs=10)
    # The layer that multiplies, and all after it, which are given what it made; none before it.
    assert [name(path) for path in fallback.moved] == [f"layer_{i}" for i in range(k, 7)]
    dtypes = [layer.compute_dtype for layer in model.layers]
    assert dtypes == ["float16"] * (k - 1) + ["float32"] * (7 - k)
    assert len(fallback.findings) == 2 * len(fallback.moved)
    steps = keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(model.optimizer.accepted_steps))
    assert int(steps) == 30 - len(fallback.findings)
    for new, old in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(new, old)
    again = mpkeras.trace_numerics(model, X[:4], Y[:4])
    assert again.culprit is None


def classifier():
    """Its third layer reaches 1e5 and more; after it LayerNormalization brings all back in range."""
    keras.utils.set_random_seed(0)
    stack = [keras.Input((64,)), layers.Rescaling(1 / 16), layers.Dense(32, "relu"), Times(up=300.0, name="boom")]
    stack += [layers.LayerNormalization(), layers.Dense(32, "relu"), layers.Dense(10, activation="softmax")]
    model = keras.Sequential(stack)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# JAX compiles all three models anew; that a moved layer trains on there is in the test above.
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.slow
@quiet
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_dies_in_stock_keras_reaches_float32_quality():
    x, y = load_digits(return_X_y=True)
    options = {"batch_size": 64, "epochs": 8, "verbose": 0, "shuffle": False}

    def accuracy(model, *callbacks):
        model.fit(x[:1408], y[:1408], callbacks=list(callbacks), **options)
        return model.evaluate(x[1408:], y[1408:], verbose=0)[1]

    keras.config.set_dtype_policy("mixed_float16")
    stock = accuracy(classifier())
    keras.config.set_dtype_policy("float32")
    reference = accuracy(classifier())
    fallback = Float32Fallback()
    healed = accuracy(classifier(), MixedPrecision("mixed_float16"), fallback)
    assert stock < 0.2 < 0.85 < reference
    assert [name(path) for path in fallback.moved] == ["boom"]  # what LayerNormalization reads is not cast
    assert healed > reference - 0.03


@pytest.mark.slow
@quiet
def test_what_a_layer_runs_itself_moves_with_it():
    def norm(h):
        # 300 squared is more than float16 holds.
        return keras.ops.sqrt(keras.ops.sum(h * h, -1, keepdims=True)) / 256

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), Behind(norm, name="norm"), layers.Dense(1, name="head")], name="net")
    model.compile(keras.optimizers.SGD(0.0), "mse")
    fallback = Float32Fallback(patience=1)
    x, y = np.full((8, 4), 300.0, "float32"), np.zeros((8, 1), "float32")
    callbacks = [MixedPrecision("mixed_float16", loss_scale=1.0), fallback]
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks).history
    assert fallback.moved == ["net/norm"]
    assert model.layers[0].inner.compute_dtype == "float32"
    # On JAX a second step has begun by then.
    assert history["skipped_steps"][-1] <= 2
    # The norm of (300, 300, 300, 300) is 600.
    kernel = float(keras.ops.convert_to_numpy(model.layers[1].kernel)[0, 0])
    assert history["loss"][-1] == pytest.approx((600 / 256 * kernel) ** 2, rel=1e-5)


@pytest.mark.slow
@quiet
def test_the_policy_of_the_model_has_the_rules_of_what_has_moved():
    def made():
        keras.utils.set_random_seed(1)
        stack = [keras.Input((4,)), layers.Dense(3, name="large"), layers.Dense(5, name="small"), layers.Dense(1)]
        model = keras.Sequential(stack, name="net")
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    model, fallback = made(), Float32Fallback(patience=1)
    model.layers[1].set_weights([np.full((3, 5), 1e-6), np.zeros(5)])
    x, y = np.full((8, 4), 1e5, "float32"), np.zeros((8, 1), "float32")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[MixedPrecision("mixed_float16", loss_scale=1.0), fallback])
    assert fallback.moved == ["net/large"]
    policy = mpkeras.trace_numerics(model, x / 1e5, y).policy()
    assert policy.keep_float32 == (*mpkeras.Policy("mixed_float16").keep_float32, *fallback.rules)
    begins_anew = mpkeras.prepare(made(), policy)
    assert [layer.compute_dtype for layer in begins_anew.layers] == ["float32", "float16", "float32"]
    # Where it has moved it stays, under another policy, too.
    mpkeras.prepare(model)
    mpkeras.prepare(model, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in model.layers] == ["float32", "bfloat16", "float32"]


@pytest.mark.slow
@quiet
def test_gradients_that_overflow_move_their_layer_when_the_scale_is_at_its_lowest():
    rule = mpkeras.DynamicLossScale(initial_scale=256.0, min_scale=64.0)
    model = six_layers(4, learning_rate=0.0, down=200.0)
    fallback = Float32Fallback()
    fit(model, fallback, loss_scale=rule, epochs=10)
    assert name(fallback.moved[0]) == "layer_4"
    # Of the first two batches, each of which was tried at 256, 128 and 64.
    findings = [found for found in fallback.findings if name(found.culprit.path) == "layer_4"]
    assert [(found.batch, found.loss_scale) for found in findings[:2]] == [(0, 128.0), (1, 64.0)]
    assert model.layers[4].compute_dtype == "float16"  # the layer after it


@pytest.mark.slow
def test_says_what_it_moved_and_when_it_moves_no_more():
    fallback = Float32Fallback(max_layers=1, patience=1)
    with pytest.warns(UserWarning) as warned:
        fit(six_layers(2, up=1e3), fallback, epochs=2)
    said = [str(w.message) for w in warned]
    assert any("layer_2' has moved from float16 to float32, in step 0 of epoch 1" in text for text in said)
    assert any("no more are moved" in text for text in said)
    assert len(fallback.moved) == 1 and fallback.rules[0].endswith("/layer_2$")
