"""Layers that prepare the data outside of every model, where no rule of the policy reaches them: they are named."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from tests.training.models import warned_of

YEARS = np.arange(2031, 2095, dtype="float32")[:, None]


said_by = functools.partial(warned_of, "in no model that is trained")


def compiled(*hidden):
    model = keras.Sequential([keras.Input((1,)), *hidden, layers.Dense(2, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def batches(prepare):
    # Not as arrays: the layer runs when a batch is asked for.
    while True:
        x = keras.ops.convert_to_numpy(keras.ops.cast(prepare(YEARS[:8]), "float32"))
        yield x, np.zeros((8, 1), "float32")


def fit(model, prepare):
    model.fit(batches(prepare), steps_per_epoch=3, verbose=0)


def step(model, prepare):
    run = mpkeras.make_train_step(model, keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError())
    for x, y in [next(batches(prepare)) for _ in range(2)]:
        run(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("train", [fit, step])
def test_layers_of_a_pipeline_are_named_once(train):
    with mpkeras.policy_scope("mixed_bfloat16"):
        century = layers.Rescaling(0.01, offset=-20.0, name="century")
        pipeline = keras.Sequential(
            [layers.CenterCrop(2, 2, name="crop"), layers.RandomColorJitter((0, 1), 0.1, 0.1, name="colours")]
        )
        model = compiled(layers.Rescaling(0.5, name="of_the_model"))
        another_model = compiled()
        not_compiled = keras.Sequential([keras.Input((1,)), layers.Rescaling(0.5, name="of_another"), layers.Dense(1)])
        not_used = layers.Rescaling(0.5, name="not_used")
        wide = layers.Rescaling(0.5, dtype="float32", name="wide")
    pipeline(np.zeros((1, 4, 4, 3), "float32"))
    wide(YEARS)
    (message,) = said_by(lambda: train(model, century))
    for text in ("'mixed_bfloat16'", "'century' (pixels in", "'crop' (", "'colours' (", "policy_scope('float32')"):
        assert text in message
    # Those of the model, of one that will be converted when it is compiled, those that have not run or compute in
    # float32, and those inside of a layer that is named.
    assert message.count("(pixels in") == 3
    assert not said_by(lambda: train(model, century))
    assert not said_by(lambda: train(another_model, century))
    assert not_compiled.built and not_used.name


@pytest.mark.slow
def test_what_the_message_says_keeps_the_years():
    def since_2031():
        return layers.Rescaling(1.0, offset=-2031.0)

    with mpkeras.policy_scope("mixed_bfloat16"):
        in_16_bits = since_2031()
        with mpkeras.policy_scope("float32"):
            kept = since_2031()
        model = compiled()
    rounded, right = (
        keras.ops.convert_to_numpy(keras.ops.cast(layer(YEARS), "float32")) for layer in (in_16_bits, kept)
    )
    np.testing.assert_array_equal(right, YEARS - 2031)
    # Between 2048 and 4096 bfloat16 holds each 16th number, and 2032 in place of the offset.
    assert np.abs(rounded - right).max() == 8 + 1
    (message,) = said_by(lambda: fit(model, kept))
    assert f"'{in_16_bits.name}'" in message and f"'{kept.name}'" not in message


def own_policy():
    rules = [rule for rule in mpkeras.get_policy("mixed_float16").keep_float32 if rule != "Rescaling"]
    return mpkeras.policy_scope(mpkeras.Policy("mixed_float16", keep_float32=rules))


class OfKeras:
    def __enter__(self):
        self._before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")

    def __exit__(self, *_):
        keras.config.set_dtype_policy(self._before)


@pytest.mark.slow
@pytest.mark.parametrize("scope", [own_policy, OfKeras], ids=["without the rule", "stock Keras"])
def test_nothing_is_said_where_no_rule_keeps_such_layers(scope):
    with scope():
        rescaling, model = layers.Rescaling(0.25), compiled()
        assert rescaling(YEARS) is not None and rescaling.compute_dtype == "float16"
        assert not said_by(lambda: fit(model, rescaling))


@pytest.mark.slow
def test_layers_that_were_made_under_a_policy_of_keras_are_named_when_a_model_is_prepared():
    with OfKeras():
        rescaling, chosen = layers.Rescaling(0.25), layers.Rescaling(0.25, dtype="mixed_float16")
        model = compiled()
        chosen(YEARS)
        mpkeras.prepare(model, "mixed_bfloat16")
        (message,) = said_by(lambda: fit(model, rescaling))
    assert f"'{rescaling.name}'" in message and "'mixed_bfloat16'" in message and f"'{chosen.name}'" not in message
