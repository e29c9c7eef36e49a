"""A model of the user's own that computes with its inputs is given them as Keras gives them; others as they are."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from tests.sixteen_bits import without_outputs
from tests.training.models import DOORS, made_by

X = np.random.default_rng(8).normal(size=(24, 3)).astype("float32")
Y = X[:, :1] * X[:, 1:2]


class Gate(keras.Model):
    """Its inputs meet what a layer in 16 bits returns: an error on TensorFlow, unless both are of one dtype."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(21)
        self.gate, self.head = layers.Dense(3, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.head(x * self.gate(x) - x)


class TwoUses(keras.Model):
    """What its last layer makes is an output, and meets the inputs as well."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(22)
        self.hidden, self.both = layers.Dense(8, "relu"), layers.Dense(4)

    def call(self, inputs):
        x, context = inputs
        both = self.both(self.hidden(context))
        return keras.ops.sum(x * both[:, :3] + both[:, :3], axis=-1, keepdims=True) + both[:, 3:]


class Flow(keras.Model):
    """Inputs meet a layer in 16 bits, what comes of it meets the head: neither of the two in float32 will do."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(23)
        self.first, self.second = layers.Dense(3, "tanh"), layers.Dense(3, "tanh")

    def call(self, x):
        x = x * keras.ops.exp(self.first(x))
        return keras.ops.sum(x * keras.ops.exp(self.second(x)), axis=-1, keepdims=True)


class Corrected(keras.Model):
    """A forecast is the last value and a small change, which an output in float32 keeps."""

    def __init__(self):
        super().__init__()
        self.change = layers.Dense(1, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(0.25))

    def call(self, x):
        return x[:, :1] + self.change(x[:, 1:])


def fitted(make, door, policy, x):
    model, callbacks = made_by(door, make, policy)
    history = model.fit(x, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks).history
    return model, history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("make", "x"), [(Gate, X), (TwoUses, (X, 2 * X))])
@pytest.mark.filterwarnings("error:.*unbuilt state")
def test_a_model_that_computes_with_its_inputs_trains(make, x, door):
    expected = fitted(make, "prepare", "float32", x)[1]
    model, loss = fitted(make, door, "mixed_bfloat16", x)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    # What makes the output computes in float32, as ever.
    hidden, head = model.layers
    assert (hidden.compute_dtype, head.compute_dtype) == ("bfloat16", "float32")
    assert keras.backend.standardize_dtype(model(x).dtype) == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(("make", "x"), [(Gate, X), (TwoUses, (X, 2 * X))])
def test_so_it_does_where_outputs_are_in_16_bits(make, x):
    expected = fitted(make, "prepare", "float32", x)[1]
    model, loss = fitted(make, "prepare", without_outputs("mixed_float16"), x)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_model_whose_inputs_and_head_both_meet_16_bits_trains(door):
    expected = fitted(Flow, "prepare", "float32", X)[1]
    model, loss = fitted(Flow, door, "mixed_bfloat16", X)
    np.testing.assert_allclose(loss, expected, rtol=0.03)
    assert keras.backend.standardize_dtype(model(X).dtype) == "float32"


@pytest.mark.slow
def test_a_second_conversion_and_the_way_back():
    model, _ = fitted(Gate, "prepare", "mixed_float16", X)
    expected = keras.ops.convert_to_numpy(model(X))
    for policy in ("float32", "mixed_float16"):
        mpkeras.prepare(model, policy)
        np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=0.01, atol=0.01)
    mpkeras.apply_policy(model, "float32")
    assert model.autocast


def test_inputs_that_meet_a_float32_output_stay_as_they_are():
    """bfloat16 has 7 bits behind the first: 1000.5 is 1000 there, and 1000.75 is no number of it."""
    model = Corrected()
    mpkeras.apply_policy(model, "mixed_bfloat16")
    x = np.array([[1000.5, 1.0, 2.0]], "float32")
    assert keras.ops.convert_to_numpy(model(x)).tolist() == [[1000.75]]
