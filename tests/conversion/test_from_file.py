"""Layers that `load_model` makes anew in the `__init__` of others: in float32, whatever they were in."""

import keras
import numpy as np
import pytest

import mpkeras
from tests.cases import first_quick

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = X[:, :2] * 3.0


@keras.saving.register_keras_serializable("from_file")
class Block(keras.layers.Layer):
    """One layer with the default dtype, and one that its author has put in float32."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.dense = keras.layers.Dense(units, "tanh", name="dense")
        self.exact = keras.layers.Dense(units, dtype="float32", name="exact")

    def build(self, shape):
        self.dense.build(shape)
        self.exact.build((shape[0], self.units))
        self.built = True

    def call(self, x):
        return keras.ops.cast(self.exact(self.dense(x)), self.compute_dtype)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("from_file")
class Whole(keras.Model):
    """Its file holds no dtype."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.first = keras.layers.Dense(units, "relu", name="first")
        self.block = Block(units, name="block")
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.block(self.first(x)))

    def get_config(self):
        return {"units": self.units}


def graph():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "relu", name="first")(inputs)
    x = Block(8, name="block")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def whole():
    return Whole(8)


MODELS = [pytest.param(graph, id="graph"), pytest.param(whole, id="model of one's own")]


def compiled(make):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def trained(model):
    model.train_on_batch(X, Y)
    return model


def saved(model, folder):
    # A step would have made its state.
    model.optimizer.build(model.trainable_variables)
    model.save(folder / "model.keras")
    return folder / "model.keras"


def loaded(model, folder):
    return keras.models.load_model(saved(model, folder))


def outputs(model):
    return keras.ops.convert_to_numpy(model(X))


def dtypes(model):
    names = ("first", "dense", "exact", "head")
    # Keras names the layers of a loaded block as the program does.
    layers = {layer.name: layer.compute_dtype for layer in model._flatten_layers()}
    return [layers[name] for name in names]


@pytest.mark.parametrize("policy", first_quick([None, "mixed_bfloat16"]), ids=["as it was", "asked for"])
@pytest.mark.parametrize("make", first_quick(MODELS))
def test_prepare_gives_them_what_they_had(make, policy, tmp_path):
    model = mpkeras.prepare(compiled(make), "mixed_bfloat16")
    expected, before = outputs(model), dtypes(model)
    # In a float32 model "exact" was in float32 as all others.
    assert before == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    again = loaded(model, tmp_path)
    assert dtypes(again)[1] == "float32"
    mpkeras.prepare(again, policy)
    found = outputs(again)
    # Beside layers that come from the file in 16 bits, one with a dtype of its own is there on purpose, unless the file
    # says that none was.
    is_on_purpose = make is graph and policy is not None
    assert dtypes(again) == [*before[:2], "float32" if is_on_purpose else "bfloat16", "float32"]
    # Bit for bit, where the layers are the same; else one of them rounds sums of 8 numbers below 1, and its result.
    np.testing.assert_allclose(found, expected, atol=0.03 if is_on_purpose else 0.0, rtol=0)


@pytest.mark.slow
def test_a_file_of_a_file_is_gone_on_with_alike(tmp_path):
    model = trained(mpkeras.prepare(compiled(graph), "mixed_bfloat16"))
    for _ in range(2):
        again = mpkeras.prepare(loaded(model, tmp_path))
        # Bit for bit.
        for value, weight in zip(trained(again).get_weights(), trained(model).get_weights(), strict=True):
            np.testing.assert_array_equal(value, weight)
        model = again
        assert dtypes(model) == ["bfloat16", "bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize("make", first_quick(MODELS))
def test_what_was_made_under_a_global_policy_is_so_again_and_float32_on_purpose_stays(make, tmp_path):
    mpkeras.set_global_policy("mixed_bfloat16")
    model = compiled(make)
    expected, before = outputs(model), dtypes(model)
    assert before == ["bfloat16", "bfloat16", "float32", "float32"]
    path = saved(model, tmp_path)
    mpkeras.set_global_policy("float32")
    again = mpkeras.prepare(keras.models.load_model(path))
    # Bit for bit: the same layers in the same dtypes.
    np.testing.assert_array_equal(outputs(again), expected)
    assert dtypes(again) == before


def test_a_file_of_stock_keras_is_trained_in_what_it_was_made_in(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = graph()
    keras.config.set_dtype_policy("float32")
    model.compile("sgd", "mse")
    again = loaded(model, tmp_path)
    assert dtypes(again) == ["bfloat16", "float32", "float32", "bfloat16"]
    outputs(mpkeras.prepare(again))
    assert dtypes(again) == ["bfloat16", "bfloat16", "float32", "float32"]


def test_layers_of_a_program_stay_as_they_were_made():
    block = Block(8, name="block", dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name="first"), block])
    model.add(keras.layers.Dense(2, name="head"))
    model.compile("sgd", "mse")
    mpkeras.prepare(model)
    assert dtypes(model)[0] == "float32"


@pytest.mark.slow
def test_rules_of_ones_own_are_in_the_file(tmp_path):
    rules = (*mpkeras.Policy("mixed_bfloat16").keep_float32, "path:first$")
    policy = mpkeras.Policy("mine", compute_dtype="bfloat16", variable_dtype="float32", keep_float32=rules)
    model = trained(mpkeras.prepare(compiled(whole), policy))
    again = trained(mpkeras.prepare(loaded(model, tmp_path)))
    assert dtypes(again) == dtypes(model) == ["float32", "bfloat16", "bfloat16", "float32"]


@pytest.mark.slow
def test_a_model_that_went_back_to_float32_stays_there(tmp_path):
    model = trained(mpkeras.prepare(compiled(whole), "mixed_bfloat16"))
    mpkeras.apply_policy(model, "float32")
    assert set(dtypes(trained(mpkeras.prepare(loaded(trained(model), tmp_path))))) == {"float32"}


@pytest.mark.slow
def test_another_global_policy_decides(tmp_path):
    path = saved(trained(mpkeras.prepare(compiled(whole), "mixed_bfloat16")), tmp_path)
    with mpkeras.policy_scope("mixed_float16"):
        again = trained(mpkeras.prepare(keras.models.load_model(path)))
    assert dtypes(again) == ["float16", "float16", "float32", "float32"]
