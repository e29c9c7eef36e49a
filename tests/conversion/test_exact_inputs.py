"""Codes arrive whole where a graph looks rows up by them, however layers hand them on; everything else in 16 bits."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.plan import plan
from mpkeras.conversion.undo import recorded
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs

CODES = np.array([[4097.0, 2909.0, 259.0, 5555.0]], "float32")


def table(inputs):
    return layers.Embedding(6000, 1, embeddings_initializer="zeros", name="table")(inputs)


def moved(x):
    return layers.Reshape((4,), name="moving")(x)


class Half(layers.Layer):
    """Computes codes without weights."""

    def call(self, x):
        return ops.floor(x * 2) / 2


def joined():
    first, second = keras.Input((2,)), keras.Input((2,))
    return keras.Model([first, second], table(layers.Concatenate(name="moving")([first, second])))


def of_one_input(function, shape=(4,)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs))


def inner(function):
    return of_one_input(function)


GRAPHS = {
    "Reshape": lambda: of_one_input(lambda x: table(moved(x))),
    "Sequential": lambda: keras.Sequential(
        [keras.Input((4,)), layers.Activation("linear", name="moving"), layers.Embedding(6000, 1, "zeros")]
    ),
    "a slice behind it": lambda: of_one_input(lambda x: table(moved(x)[:, 1:])),
    "two inputs": joined,
    "Lambda": lambda: of_one_input(lambda x: table(layers.Lambda(lambda t: t[:, :3], name="moving")(x))),
    "a layer of the user's": lambda: of_one_input(lambda x: table(Half(name="moving")(x))),
    "an addition": lambda: of_one_input(lambda x: table(layers.Add(name="moving")([x, ops.ones_like(x)]))),
    "cast by an operation": lambda: of_one_input(lambda x: table(ops.cast(moved(x), "int32"))),
    "in an inner model": lambda: of_one_input(inner(lambda x: table(moved(x)))),
    "before an inner model": lambda: of_one_input(lambda x: inner(table)(moved(x))),
    "made by an inner model": lambda: of_one_input(lambda x: table(inner(moved)(x))),
    "a long way": lambda: of_one_input(
        lambda x: table(layers.Flatten()(layers.ZeroPadding1D(1)(layers.RepeatVector(1)(moved(x)))))
    ),
    "TimeDistributed": lambda: of_one_input(
        lambda x: layers.TimeDistributed(layers.Embedding(6000, 1, "zeros"), name="moving")(layers.Reshape((4, 1))(x))
    ),
    "a model in TimeDistributed": lambda: of_one_input(
        lambda x: layers.TimeDistributed(of_one_input(table, (2,)), name="moving")(layers.Reshape((2, 2))(x))
    ),
    "made by a model in TimeDistributed": lambda: of_one_input(
        lambda x: table(
            layers.TimeDistributed(of_one_input(lambda t: ops.flip(t, axis=1), (2,)), name="moving")(
                ops.reshape(x, (-1, 2, 2))
            )
        )
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_rows_of_float32_are_trained(graph):
    def trained(policy):
        model = GRAPHS[graph]()
        model.compile(keras.optimizers.SGD(1.0), "mse")
        if policy is not None:
            mpkeras.prepare(model, without_outputs(policy), loss_scale=1.0)
        x = [CODES[:, :2], CODES[:, 2:]] if graph == "two inputs" else CODES
        shape = (1, *model.output_shape[1:])
        model.train_on_batch(x, np.full(shape, 0.01, "float32"))
        (weights,) = model.get_weights()
        return np.nonzero(weights[:, 0])[0].tolist(), model

    rows, _ = trained(None)
    assert len(rows) >= 3
    found, model = trained("mixed_bfloat16")
    assert found == rows
    by_name = {layer.name: layer for layer in model._flatten_layers()}
    assert by_name["moving"].compute_dtype == "float32"
    if "table" in by_name:
        # The rows themselves are 16-bit.
        assert by_name["table"].compute_dtype == "bfloat16"


class AroundTable(keras.Model):
    """Its table, in a model inside, is built by the first call."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([layers.Embedding(6000, 1, "zeros"), layers.Flatten()])
        self.head = layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.head(self.inner(x))


def sequential():
    embedding = layers.Embedding(6000, 1, "zeros")
    return keras.Sequential([embedding, layers.Flatten(), layers.Dense(1, kernel_initializer="ones")])


def built_sequential():
    model = sequential()
    model.build((None, 3))
    return model


def compiled(model):
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    return model.train_on_batch


def stepping(model):
    return mpkeras.make_train_step(model, keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(), jit_compile=False)


@pytest.mark.parametrize("train", first_quick([stepping, compiled]))
@pytest.mark.parametrize("make", first_quick([sequential, built_sequential, AroundTable]))
def test_a_sequential_model_that_is_given_no_shape_takes_codes_whole(make, train):
    codes = np.array([[257, 1027, 2049], [3, 4099, 5003]])
    with mpkeras.policy_scope("mixed_bfloat16"):
        model = make()
        train(model)(codes, np.full((2, 1), 3.0, "float32"))
    (table,) = [variable for variable in model.trainable_variables if tuple(variable.shape) == (6000, 1)]
    assert np.nonzero(ops.convert_to_numpy(table)[:, 0])[0].tolist() == sorted(codes.ravel())


def test_an_input_of_the_users_own_and_one_before_an_error_stay():
    with mpkeras.policy_scope("mixed_bfloat16"):
        own = keras.Sequential([keras.Input((3,), dtype="float16"), layers.Dense(2)])
        made = built_sequential()
    mpkeras.apply_policy(own, "mixed_bfloat16")
    assert own.inputs[0].dtype == "float16"
    put_back = recorded(made)
    mpkeras.apply_policy(made, "mixed_bfloat16")
    assert (made.inputs[0].dtype, made.input_dtype) == ("float32", "float32")
    put_back()
    assert (made.inputs[0].dtype, made.input_dtype) == ("bfloat16", "bfloat16")


def row_of(model, name):
    return next(row for row in plan(model, mpkeras.Policy("mixed_float16")) if row.layer.name == name)


def weighed(x):
    return layers.Dense(4)(x)


def in_pairs(layer, x):
    return layers.TimeDistributed(layer, name="moving")(layers.Reshape((2, 2))(x))


# By a name for the case: what is in front of a `Dense`, and the rule that keeps its layer "moving" in float32.
KEPT = {
    "by a rule": (lambda x: layers.Normalization(mean=7e4, variance=1e6)(moved(x)), "Normalization"),
    "by a rule, in TimeDistributed": (
        lambda x: layers.Discretization(bin_boundaries=[2048.5])(
            layers.TimeDistributed(layers.Flatten(), name="moving")(layers.Reshape((2, 1, 2))(x))
        ),
        "Discretization",
    ),
    "weighed by a model in TimeDistributed": (lambda x: in_pairs(of_one_input(layers.Dense(3), (2,)), x), None),
    "normalized": (lambda x: layers.LayerNormalization()(moved(x)), "LayerNormalization"),
    "weighed, then normalized": (lambda x: layers.LayerNormalization()(moved(weighed(x))), None),
    "a difference": (lambda x: layers.Subtract(name="moving")([x, x[:, ::-1]]), "Subtract"),
    "computed for a difference": (
        lambda x: layers.Subtract()([x, layers.Activation("relu", name="moving")(x)]), "Subtract"
    ),
    "an operation": (lambda x: x - layers.Activation("relu", name="moving")(x), "Subtract"),
    "a difference from what is weighed": (lambda x: layers.Subtract(name="moving")([x, weighed(x)]), None),
    "moved and weighed": (lambda x: layers.Subtract()([moved(x), weighed(x)]), None),
    "weighed": (moved, None),
    "a head": (lambda x: layers.Dense(2, "softmax")(moved(x)), None),
    "of a layer with weights": (lambda x: table(ops.argmax(moved(weighed(x)), axis=1)), None),
    "computed of data alone": (lambda x: layers.BatchNormalization()(Half(name="moving")(x)), "BatchNormalization"),
    "dropped, then normalized": (
        lambda x: layers.LayerNormalization()(layers.Dropout(0.5, name="moving")(x)), "LayerNormalization"
    ),
    "computed of data and what is weighed": (
        lambda x: layers.LayerNormalization()(layers.Dropout(0.5, name="moving")(x + weighed(x))), None
    ),
    "a layer of data and what is weighed": (
        lambda x: layers.BatchNormalization()(layers.Add(name="moving")([x, weighed(x)])), None
    ),
    "matrices": (
        lambda x: layers.LayerNormalization()(layers.Attention(name="moving")([layers.Reshape((2, 2))(x)] * 2)), None
    ),
    "weighed and computed, then averaged": (lambda x: layers.Average()([Half(name="moving")(weighed(x)), x]), None),
    "computed of the data": (Half(name="moving"), "Half"),
    "noise, then computed": (lambda x: layers.Lambda(ops.sin)(layers.GaussianNoise(1.0, name="moving")(x)), "Lambda"),
    "weighed, then computed": (lambda x: layers.Lambda(ops.sin, name="moving")(weighed(x)), None),
    "a function of the user's": (lambda x: layers.Activation(lambda t: t / 3, name="moving")(x), "Activation"),
    "one of Keras'": (lambda x: layers.Activation("relu", name="moving")(x), None),
    "computed by an operation": (lambda x: ops.sin(moved(x)), "Sin"),
    "moved by an operation, then weighed": (lambda x: moved(x)[:, 1:], None),
    "an operation with what is weighed": (lambda x: moved(x) * weighed(x), None),
}  # fmt: skip


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_and_what_is_not(case):
    function, expected = KEPT[case]
    assert row_of(of_one_input(lambda x: layers.Dense(2)(function(x))), "moving").rule == expected


@pytest.mark.backends("tensorflow")
def test_a_row_says_why():
    row = row_of(GRAPHS["Reshape"](), "moving")
    why = "it hands numbers on and layer 'table' looks up rows by them: 2049 would be 2048"
    assert row.rule == "Embedding" and row.reason.startswith(why)


def values(model, x):
    return ops.convert_to_numpy(ops.cast(model(x), "float32"))


def normalized():
    # 3001.25 and 3002 are 3002 and 3002 in float16.
    x = np.array([[3001.25, 3002.0, 3003.5, 3000.0], [70001.0, 70009.0, 70003.0, 70006.5]], "float32")
    inputs = keras.Input((4,))
    h = layers.LayerNormalization(epsilon=1e-6)(layers.Reshape((1, 4))(inputs))
    centered = x.astype("float64") - x.astype("float64").mean(axis=1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-6)
    return inputs, layers.Flatten()(layers.Dense(4, kernel_initializer="identity")(h)), x, expected


def averaged():
    x = 4000 + np.array([[1.25, 2.0], [4.5, -1.0], [2.5, 7.0], [0.25, 3.0]], "float32").reshape(1, 2, 2, 2)
    inputs = keras.Input((2, 2, 2))
    means = layers.GlobalAveragePooling2D()(layers.GaussianNoise(1.0)(layers.UpSampling2D()(inputs)))
    h = layers.Normalization(mean=[4002.0, 4003.0], variance=[1.0, 1.0])(means)
    # The means of the channels are 4002.125 and 4002.75.
    return inputs, layers.Dense(2, kernel_initializer="identity")(h), x, [[0.125, -0.25]]


def without_trend():
    x = 5000 + np.array([[0.25, 0.5, -1.25, 3.75, 0.0, 2.5]], "float32").T[None]
    inputs = keras.Input((6, 1))
    trend = layers.AveragePooling1D(2, strides=1, padding="valid")(inputs)
    rest = layers.Subtract()([layers.Cropping1D((1, 0))(inputs), trend])
    # What is left is half of the last step.
    return inputs, layers.Dense(1, kernel_initializer="ones")(rest), x, np.diff(x, axis=1) / 2


@pytest.mark.parametrize(("policy", "epsilon"), [("mixed_float16", 2.0**-11), ("mixed_bfloat16", 2.0**-8)])
@pytest.mark.parametrize("make", [normalized, averaged, without_trend])
def test_what_is_taken_of_large_numbers_is_as_exact_as_in_float32(make, policy, epsilon):
    inputs, outputs, x, expected = make()
    model = mpkeras.apply_policy(keras.Model(inputs, outputs), without_outputs(policy))
    np.testing.assert_allclose(values(model, x), expected, rtol=2 * epsilon, atol=min(2 * epsilon, 1e-3))


class Sinusoids(layers.Layer):
    """Embeds time steps and noise levels, as diffusion models do."""

    def call(self, x):
        angles = x * ops.cast([1.0, 30.0, 900.0], x.dtype)
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


class Counted(layers.Layer):
    """Adds the position to each step."""

    def call(self, x):
        return x + ops.cast(ops.arange(ops.shape(x)[1]), self.compute_dtype)[None, :, None] % 7


OWN = {
    "sinusoids": (lambda x: Sinusoids()(x), np.linspace(0.3, 9.0, 5)[:, None]),
    "Lambda": (layers.Lambda(lambda x: ops.sin(700.0 * x)), np.linspace(0.01, 1.0, 7)[:, None]),
    "differences, noise in front": (
        lambda x: layers.Lambda(lambda t: t[:, 1:] - t[:, :-1])(layers.GaussianNoise(0.1)(x)),
        3000 + 0.25 * np.arange(12.0).reshape(3, 4) ** 2,
    ),
    "positions": (lambda x: layers.GlobalAveragePooling1D()(Counted()(x)), np.zeros((2, 3001, 1))),
    "in a model inside": (lambda x: of_one_input(lambda t: Sinusoids()(t), (1,))(x), np.linspace(0.5, 7.0, 5)[:, None]),
    "an activation": (layers.Activation(lambda x: ops.cos(x / 3)), np.arange(4001.0, 4011.0)[:, None]),
}


@pytest.mark.parametrize(("policy", "epsilon"), first_quick([("mixed_float16", 2.0**-11), ("mixed_bfloat16", 2.0**-8)]))
@pytest.mark.parametrize("kind", OWN)
def test_arithmetic_of_the_users_own_with_the_data_alone_is_that_of_float32(kind, policy, epsilon):
    make, x = OWN[kind]
    x = x.astype("float32")
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layers.Dense(3, "tanh")(layers.Dense(8, kernel_initializer="ones")(make(inputs))))
    expected = values(model, x)
    mpkeras.apply_policy(model, policy)
    assert model.layers[-2].compute_dtype == policy.removeprefix("mixed_")
    np.testing.assert_allclose(values(model, x), expected, atol=10 * epsilon)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_graph_that_was_made_in_16_bits_masks_the_steps_of_float32(policy, tmp_path):
    x = np.array([[[2051.0], [2052.0], [2044.0]]], "float32")
    with mpkeras.policy_scope(policy):
        inputs = keras.Input((3, 1))
        model = keras.Model(inputs, layers.GlobalAveragePooling1D()(layers.Masking(2051.0)(inputs)))
        model.compile("sgd", "mse")
    assert values(model, x).item() == 2048.0
    model.save(tmp_path / "masked.keras")
    loaded = keras.models.load_model(tmp_path / "masked.keras", compile=False)
    assert values(loaded, x).item() == 2048.0


class Numbered(layers.Layer):
    """Returns 1, 2, 6 and 4 for four steps, and masks those that are `value`."""

    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.value = value
        self.supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return ops.any(ops.not_equal(inputs, self.value), axis=-1)

    def call(self, inputs):
        return ops.zeros_like(inputs) + ops.cast([[1.0], [2.0], [6.0], [4.0]], inputs.dtype)

    def get_config(self):
        return {**super().get_config(), "value": self.value}


# In both dtypes 3000 is what 3001 is.
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("layer", "expected"), [(layers.Masking, 2996.0), (Numbered, 3.0)])
def test_a_file_of_a_graph_in_16_bits_masks_the_steps_of_float32(policy, layer, expected, tmp_path):
    x = np.array([[[3004.0], [3000.0], [2984.0], [3001.0]]], "float32")
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4, 1))
    made = keras.Model(inputs, layers.GlobalAveragePooling1D()(layer(3001.0)(inputs)))
    keras.config.set_dtype_policy("float32")
    made.save(tmp_path / "masked.keras")
    for model in (made, keras.models.load_model(tmp_path / "masked.keras", {"Numbered": Numbered}, compile=False)):
        as_made, put_back = model(x), recorded(model)
        mpkeras.apply_policy(model, policy)
        assert float(model(x)[0, 0]) == expected
        put_back()
        assert float(model(x)[0, 0]) == float(as_made[0, 0])


NAMED = {
    "CategoryEncoding": (lambda: layers.CategoryEncoding(6000), CODES),
    "of integers": (lambda: layers.CategoryEncoding(6000), CODES.astype("int32")),
    "Discretization into numbers": (lambda: layers.Discretization(bin_boundaries=[258.5, 4096.5]), CODES),
    "Discretization": (lambda: layers.Discretization(bin_boundaries=[258.5, 4096.5], output_mode="count"), CODES),
    "Masking": (lambda: layers.Masking(4096.0), CODES[..., None]),
    "IntegerLookup": (lambda: layers.IntegerLookup(vocabulary=[4097, 4096]), CODES),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", NAMED)
def test_layers_to_which_numbers_are_names_return_what_float32_returns(kind, policy):
    layer, x = NAMED[kind]

    def predicted(policy):
        inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
        model = keras.Model(inputs, layer()(inputs))
        if policy is not None:
            mpkeras.apply_policy(model, policy)
        return model.predict(x, verbose=0)

    np.testing.assert_array_equal(predicted(policy), predicted(None))
