"""P37: the policy `mixed_float8`, which layers multiply in float8, and what they return against NumPy in float64."""

import functools
import re
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras import Policy, get_policy
from mpkeras._replaced import replaced_attributes
from mpkeras.conversion.converter import leave_float8
from mpkeras.conversion.float8 import labels_of, multiplies_in_float8
from mpkeras.conversion.float8_rounding import rounded
from mpkeras.conversion.last import float8_products
from mpkeras.conversion.layer import move_to_float32
from tests.conversion.derivatives import derivatives
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Half a unit in the last place of e4m3 (3 bits) and of bfloat16 (7 bits), relative to the value.
HALF_UNIT, HALF_UNIT_BFLOAT16 = 2.0**-4, 2.0**-8
FIRST, LAST = "the rule 'first' keeps it in 16 bits", "the rule 'last' keeps it in 16 bits"
rng = np.random.default_rng(0)
ONES = np.ones((8, 16), "float32")


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(ops.cast(tensor, "float32")), "float64")


def in_bfloat16(values):
    return np.asarray(values, "float32").astype(ml_dtypes.bfloat16).astype("float64")


def in_float8(values, dtype, axes=None):
    """The values that float8 has in the place of bfloat16 ones: multiplied by a power of two, then rounded.

    The power goes by the largest over `axes`; `None`: over all.
    """
    values = in_bfloat16(values)
    scale = 2.0 ** np.floor(np.log2(LARGEST[dtype] / np.abs(values).max(axes, keepdims=True)))
    return (values * scale).astype("float32").astype(dtype).astype("float64") / scale


def mlp(**options):
    hidden = [layers.Dense(width, "relu") for width in (32, 48, 64)]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(16)], name="net", **options)


def compiled(model, **options):
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


def prepared(model, policy="mixed_float8"):
    return mpkeras.prepare(compiled(model), policy)


def reasons(model):
    found = float8_products(model)
    return {layer.name: found[id(layer)] for layer in model._flatten_layers() if id(layer) in found}


def every_layer():
    return without_outputs("mixed_float8", keep_16_bits=())


# What is computed.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [447.0, 448.0, 449.0, 3e-20, 3e30, 0.0])
def test_values_are_rounded_after_a_power_of_two(dtype, largest):
    values = np.r_[rng.normal(size=200) * largest / 5, largest]
    values = np.clip(values, -largest, largest)
    found, inverse = rounded(ops.convert_to_tensor(values, "bfloat16"), np.dtype(dtype).name)
    found = numpy(ops.cast(found, "bfloat16"))
    if largest == 0:
        assert np.all(found == 0) and np.isfinite(float(inverse))
        return
    assert np.frexp(float(inverse))[0] == 0.5
    assert np.array_equal(found * float(inverse), in_float8(values, dtype))
    assert LARGEST[dtype] / 2 < np.abs(found).max() <= LARGEST[dtype]


CASES = {
    "dense": (lambda: layers.Dense(32, "tanh"), (6, 48), "ab,bc->ac"),
    "dense of three axes": (lambda: layers.Dense(16, use_bias=False), (2, 5, 32), "abx,xy->aby"),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 4, 8), bias_axes="de"), (2, 3, 32), "abc,cde->abde"),
    "joined heads": (lambda: layers.EinsumDense("abcd,cde->abe", (None, 32)), (2, 3, 4, 8), "abcd,cde->abe"),
    "transposed": (lambda: layers.EinsumDense("acb,dec->abde", (3, 4, 8)), (2, 16, 3), "acb,dec->abde"),
    "several axes": (lambda: layers.EinsumDense("...x,xy->...y", (16,)), (2, 3, 2, 32), "abcx,xy->abcy"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_multiplies_rounded_operands_and_nothing_else(case):
    make, shape, equation = CASES[case]
    layer = make()
    model = mpkeras.apply_policy(keras.Sequential([keras.Input(shape[1:]), layer]), every_layer())
    assert multiplies_in_float8(layer)
    bias = 0.0
    if layer.bias is not None:
        layer.bias.assign(rng.normal(size=layer.bias.shape))
        bias = in_bfloat16(layer.bias.numpy())
    x = rng.normal(size=shape).astype("float32") * 3
    # In training the inputs have one scale; outside of it each row has its own, whatever the others are.
    labels = labels_of(layer)
    summed = tuple(i for i, label in enumerate(equation.split(",")[0]) if label in labels.summed)
    for training, rows in ((True, None), (False, summed)):
        exact = np.einsum(equation, in_float8(x, E4M3, rows), in_float8(layer.kernel.numpy(), E4M3))
        expected = in_bfloat16(in_bfloat16(exact) + bias)
        if layer.activation is keras.activations.tanh:
            expected = in_bfloat16(np.tanh(expected))
        # Sums of float32 in another order, rounded to bfloat16 up to three times.
        found = numpy(model(x, training=training))
        assert np.allclose(found, expected, rtol=3 * HALF_UNIT_BFLOAT16, atol=1e-2 * np.abs(exact).max())


def gradients(function, weights, x, upstream):
    """Returns `(by x, by each weight)` of the sum of outputs times `upstream`."""

    def total(x):
        return ops.sum(ops.cast(function(x), "float32") * ops.convert_to_tensor(upstream, "float32"))

    return [numpy(grad) for grad in derivatives(total, x, weights)]


def training_gradients(model, x, upstream):
    return gradients(functools.partial(model, training=True), model.trainable_variables, x, upstream)


@pytest.mark.parametrize("rows", [32, 13])
def test_gradients_are_products_of_rounded_operands_and_gradients(rows):
    """Thirteen rows: what is summed over in the gradient by the kernel is no multiple of 16."""
    layer = layers.Dense(32, use_bias=False)
    model = mpkeras.apply_policy(keras.Sequential([keras.Input((48,)), layer]), every_layer())
    x = rng.normal(size=(rows, 48)).astype("float32")
    upstream = (rng.normal(size=(rows, 32)) * 1e-4).astype("float32")
    by_x, by_kernel = training_gradients(model, x, upstream)
    x8, kernel8, upstream8 = in_float8(x, E4M3), in_float8(layer.kernel.numpy(), E4M3), in_float8(upstream, E5M2)
    for found, expected in ((by_x, upstream8 @ kernel8.T), (by_kernel, x8.T @ upstream8)):
        assert np.allclose(found, expected, rtol=2 * HALF_UNIT_BFLOAT16, atol=2e-3 * np.abs(expected).max())
    # e5m2 and not e4m3.
    other = in_float8(upstream, E4M3) @ kernel8.T
    assert np.abs(by_x - upstream8 @ kernel8.T).max() < 0.3 * np.abs(other - upstream8 @ kernel8.T).max()


def penalty(model, x):
    """Returns the gradients by the weights of the squared gradient by the inputs."""

    def squares(x):
        return ops.sum(derivatives(lambda x: ops.sum(ops.cast(model(x), "float32")), x)[0] ** 2)

    return derivatives(squares, x, model.trainable_variables)[1:]


def test_a_second_derivative_is_refused():
    x = rng.normal(size=(4, 16)).astype("float32")
    assert penalty(mpkeras.apply_policy(mlp(), "mixed_bfloat16"), x)[0] is not None
    with pytest.raises(ValueError, match="keep_16_bits"):
        penalty(mpkeras.apply_policy(mlp(), "mixed_float8"), x)
    # Its gradient by the outputs is constant: what is refused is the dependence on the kernel.
    alone = keras.Sequential([keras.Input((16,)), layers.Dense(16, use_bias=False)])
    with pytest.raises(ValueError, match="keep_16_bits"):
        penalty(mpkeras.apply_policy(alone, every_layer()), x)


@pytest.mark.backends("torch")
def test_torchs_own_product_of_float8_matrices_is_the_same(monkeypatch):
    """torch has `_scaled_mm` for CPUs, too: the one that a GPU takes is tried on it."""
    from mpkeras.conversion import _torch

    layer = layers.Dense(32)
    model = mpkeras.apply_policy(keras.Sequential([keras.Input((48,)), layer]), every_layer())
    x = rng.normal(size=(13, 48)).astype("float32")
    upstream = rng.normal(size=(13, 32)).astype("float32")
    expected = [numpy(model(x)), *training_gradients(model, x, upstream)]
    monkeypatch.setattr(_torch, "has_float8_units", lambda device: True)
    found = [numpy(model(x)), *training_gradients(model, x, upstream)]
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(a, b, rtol=2 * HALF_UNIT_BFLOAT16, atol=1e-2 * np.abs(b).max())


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_what_is_not_finite_stays_visible(bad):
    model = mpkeras.apply_policy(keras.Sequential([keras.Input((16,)), layers.Dense(32)]), every_layer())
    x = np.ones((4, 16), "float32")
    x[1, 2] = bad
    assert np.isnan(numpy(model(x, training=True))[1]).all()
    # As NaN, which all of float8 has, and no other value with it.
    values = ops.convert_to_tensor(np.r_[1.0, 2.0, bad], "bfloat16")
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        found, inverse = rounded(values, dtype)
        np.testing.assert_array_equal(numpy(ops.cast(found, "bfloat16")) * float(inverse), [1.0, 2.0, np.nan])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_gradients_that_are_not_finite_stay_visible(bad):
    model = mpkeras.apply_policy(keras.Sequential([keras.Input((16,)), layers.Dense(32)]), every_layer())
    upstream = np.ones((5, 32), "float32")
    upstream[3, 7] = bad
    by_x, by_kernel, _ = training_gradients(model, np.ones((5, 16), "float32"), upstream)
    np.testing.assert_array_equal(np.isnan(by_x), np.arange(5)[:, None] == np.full(16, 3))
    np.testing.assert_array_equal(np.isnan(by_kernel), np.full((16, 1), 7) == np.arange(32))


def heads():
    x = keras.Input((3, 16))
    joined = layers.MultiHeadAttention(2, 16)(x, x)
    return keras.Model(x, layers.EinsumDense("abc,cde->abde", (None, 2, 16), activation="tanh")(joined))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e30])
@pytest.mark.parametrize(("make", "shape"), [(mlp, 16), (heads, (3, 16))])
def test_a_bad_row_spoils_only_itself_outside_training(make, shape, bad):
    model = prepared(make(), every_layer())
    x = rng.normal(size=(6, *np.atleast_1d(shape))).astype("float32")
    without, others = x.copy(), np.arange(6) != 2
    x[2].flat[5], without[2] = bad, 0.0
    for outputs_of in (model, functools.partial(model, training=False), functools.partial(model.predict, verbose=0)):
        found, expected = numpy(outputs_of(x)), numpy(outputs_of(without))
        np.testing.assert_array_equal(found[others], expected[others])
        # The values are there: they were not rounded to zero beside the large one.
        assert np.abs(found[others]).max() > 0.01 and (bad == 1e30 or not np.isfinite(found[2]).any())


def test_the_gradient_of_rows_that_were_scaled_one_by_one_is_that_of_all_rows():
    """As in a step of the user's own without `training=True`. The rows differ by powers of two: nothing is lost."""
    layer = layers.Dense(32, use_bias=False)
    mpkeras.apply_policy(keras.Sequential([keras.Input((16,)), layer]), every_layer())
    x = rng.choice([-1.0, 1.0, 0.5, 3.0], (6, 16)) * 2.0 ** np.array([[0], [9], [-12], [3], [20], [1]])
    upstream = rng.choice([1.0, -2.0, 0.5], (6, 32)) * 2.0 ** np.array([[0], [-9], [12], [-3], [-20], [-1]])

    layer.kernel.assign(np.sign(layer.kernel.numpy()))
    outside_training = functools.partial(layer, training=False)
    by_x, by_kernel = gradients(outside_training, [layer.kernel], x.astype("float32"), upstream.astype("float32"))
    np.testing.assert_array_equal(by_kernel, x.T @ upstream)
    np.testing.assert_array_equal(by_x, in_float8(upstream, E5M2) @ layer.kernel.numpy().T)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_no_trace(bad):
    model = prepared(mlp())
    model.train_on_batch(ONES, ONES)
    variables = [*model.variables, *model.optimizer.inner_optimizer.variables]
    before = snapshot(variables)
    model.train_on_batch(np.where(np.eye(8, 16) > 0, bad, ONES).astype("float32"), ONES)
    assert snapshot(variables) == before
    model.train_on_batch(ONES, ONES)
    assert snapshot(variables) != before


# Which layers.


def test_the_first_and_the_last_layer_stay_in_16_bits_and_the_audit_says_why():
    model = compiled(mlp())
    # The last one by a rule, and in float32 all the same: the one before it multiplies in float8.
    for policy, of_the_last in ((without_outputs("mixed_float8"), LAST), ("mixed_float8", "it computes in float32")):
        mpkeras.prepare(model, policy)
        assert list(reasons(model).values()) == [FIRST, None, None, of_the_last]
        assert [multiplies_in_float8(layer) for layer in model.layers] == [False, True, True, False]
        report = mpkeras.audit(model)
        assert [row.float8 for row in report.layers if row.class_name == "Dense"] == [FIRST, "yes", "yes", of_the_last]
        assert "Products in float8: those of 2 of 4 layers." in str(report)
        assert str(report).count("keeps it in 16 bits") == 1 + (of_the_last == LAST)
    assert "float8" not in str(mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16")))


def test_first_and_last_go_by_the_order_of_computation():
    """A convolution or an embedding may be the first; layers within layers count where these are."""
    codes = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 32)(codes)
    x = layers.MultiHeadAttention(2, 16, name="attention")(x, x)
    inner = keras.Sequential([keras.Input((32,)), layers.Dense(64, name="up"), layers.Dense(32, name="down")])
    x = layers.TimeDistributed(inner)(x)
    model = keras.Model(codes, layers.Dense(16, name="head")(x))
    mpkeras.apply_policy(model, without_outputs("mixed_float8"))
    found = reasons(model)
    assert found.pop("head") == LAST
    assert set(found) == {"query", "key", "value", "attention_output", "up", "down"} and not any(found.values())

    image = keras.Input((8, 8, 16))
    x = layers.Dense(16, name="hidden")(layers.Conv2D(16, 3, name="stem")(image))
    model = mpkeras.apply_policy(keras.Model(image, layers.Conv2D(1, 1)(x)), without_outputs("mixed_float8"))
    assert reasons(model) == {"hidden": None}


class Scaled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


class Renamed(layers.Dense):
    """A subclass that computes as its base does."""


def test_each_layer_that_does_not_multiply_in_float8_has_a_reason():
    inputs = keras.Input((16, 32))
    x = layers.Dense(16, name="first")(inputs)
    x = layers.Dense(24, name="narrow")(x)
    x = layers.Dense(32, name="from narrow")(x)
    x = layers.EinsumDense("abc,bcd->abd", (16, 32), name="by place")(x)
    x = Scaled(32, name="own call")(x)
    x = Renamed(32, name="renamed")(x)
    x = layers.Dense(32, name="single", dtype="float32")(x)
    x = layers.Dense(32, activation="softmax", name="probabilities")(x)
    x = layers.Dense(48, name="excluded")(x)
    model = keras.Model(inputs, layers.Dense(16, name="last")(x))
    policy = Policy(
        "mine",
        compute_dtype="bfloat16",
        variable_dtype="float32",
        float8="current",
        keep_float32=("Softmax", "activation:softmax", "path:single"),
        keep_16_bits=("first", "last", "path:excluded"),
    )
    mpkeras.apply_policy(model, policy)
    assert reasons(model) == {
        "first": FIRST,
        "narrow": "its kernel is a matrix of 16 x 24, not both multiples of 16",
        "from narrow": "its kernel is a matrix of 24 x 32, not both multiples of 16",
        "by place": "its equation 'abc,bcd->abd' is not one product of two matrices",
        "own call": "Scaled has a `call` of its own",
        "renamed": None,
        "single": "it computes in float32",
        "probabilities": "it computes in float32",
        "excluded": "the rule 'path:excluded' keeps it in 16 bits",
        "last": LAST,
    }


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("equation", "is_product"),
    [
        ("ab,bc->ac", True),
        ("abc,cde->abde", True),
        ("...x,xy->...y", True),
        ("abc,bcd->abd", False),  # a batch of products
        ("ab,cd->ad", False),  # summed over what the other has not
        ("aab,bc->ac", False),  # a diagonal
        ("ab,cb->abc", False),  # nothing is summed over
    ],
)
def test_products_of_two_matrices(equation, is_product):
    layer = layers.EinsumDense(equation, (16,))
    assert (labels_of(layer) is not None) == is_product


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_quantized_layers_stay(mode):
    model = mlp()
    model.layers[1].quantize(mode)
    mpkeras.apply_policy(model, "mixed_float8")
    assert reasons(model)[model.layers[1].name] == f"it is quantized ({mode})"
    assert not multiplies_in_float8(model.layers[1]) and not replaced_attributes(model.layers[1])
    assert model.layers[1].quantization_mode == mode


def test_a_layer_that_was_quantized_to_float8_stays_so_in_float32():
    model = prepared(mlp())
    layer = model.layers[1]
    layer.quantize("float8")
    variables = [id(variable) for variable in layer.variables]
    move_to_float32(layer)
    assert (layer.compute_dtype, layer.quantization_mode) == ("float32", "float8")
    assert [id(variable) for variable in layer.variables] == variables


@pytest.mark.slow
def test_lora_trains_its_matrices_in_float8():
    model = mlp()
    model.layers[1].enable_lora(4)
    prepared(model)
    assert multiplies_in_float8(model.layers[1])
    x = rng.normal(size=(16, 16)).astype("float32")
    before = [model.layers[1].lora_kernel_b.numpy(), model.layers[1]._kernel.numpy()]
    model.fit(x, np.ones((16, 16), "float32"), epochs=2, verbose=0, shuffle=False)
    assert not np.array_equal(before[0], model.layers[1].lora_kernel_b.numpy())
    assert np.array_equal(before[1], model.layers[1]._kernel.numpy())


class Later(keras.Model):
    """Its layers are built in its first call; the kernel of the third does not fit."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(32, "relu"), layers.Dense(48, "relu"), layers.Dense(20), layers.Dense(16)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.slow
def test_layers_that_are_built_later_follow():
    model = prepared(Later())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, np.ones((8, 16), "float32"), epochs=2, verbose=0, shuffle=False)
    assert [multiplies_in_float8(part) for part in model.parts] == [False, True, False, False]
    assert reasons(model)[model.parts[2].name] == "its kernel is a matrix of 48 x 20, not both multiples of 16"


# All doors, and the way back.


def through(door):
    """Returns a model that computes in float8 by way of a door."""
    if door == "global policy":
        with mpkeras.policy_scope("mixed_float8"):
            model = mlp()
        return compiled(model)
    if door == "autoprepare":
        with mpkeras.autoprepare("mixed_float8"):
            return compiled(mlp())
    if door == "apply_policy and a step":
        model = mpkeras.apply_policy(mlp(), "mixed_float8")
        mpkeras.make_train_step(model, keras.optimizers.Adam(), "mse")(ONES, ONES)
        return model
    if door == "callback":
        model = compiled(mlp())
        model.fit(ONES, ONES, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_float8")])
        return model
    model = prepared(mlp())
    if door == "prepare and a step":
        mpkeras.make_train_step(model, model.optimizer, "mse")(ONES, ONES)
    return compiled(model) if door == "compiled again" else model


DOORS = ["prepare", "callback", "apply_policy and a step", "prepare and a step"]
DOORS += ["global policy", "autoprepare", "compiled again"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_every_door_leads_to_the_same_layers(door):
    model = through(door)
    assert [multiplies_in_float8(layer) for layer in model.layers] == [False, True, True, False]
    assert [layer.compute_dtype for layer in model.layers] == [*["bfloat16"] * 3, "float32"]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_rules_may_change_and_another_policy_takes_all_back(policy):
    model = mpkeras.apply_policy(mlp(), "mixed_float8")
    mpkeras.apply_policy(model, every_layer())
    assert all(multiplies_in_float8(layer) for layer in model.layers)
    mpkeras.apply_policy(model, "mixed_float8")
    assert [multiplies_in_float8(layer) for layer in model.layers] == [False, True, True, False]
    mpkeras.apply_policy(model, policy)
    # TensorFlow sums the gradient of a bias in bfloat16.
    by_policy = {"bias"} if (keras.backend.backend(), policy) == ("tensorflow", "mixed_bfloat16") else set()
    assert {entry.kind for layer in model.layers for entry in replaced_attributes(layer)} == by_policy
    assert float8_products(model) == {}


@pytest.mark.slow
def test_the_file_is_stock_keras(tmp_path):
    model = prepared(mlp())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, epochs=1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    config = model.get_config()
    assert "float8" not in str(config) and "mpkeras" not in str(config["layers"][1:4])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.compute_dtype for layer in loaded.layers[:3]] == ["bfloat16"] * 3
    assert not any(multiplies_in_float8(layer) for layer in loaded.layers)
    assert any(multiplies_in_float8(layer) for layer in mpkeras.prepare(loaded).layers)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert np.array_equal(a, b)


# It learns.


@pytest.mark.slow
@pytest.mark.parametrize("variable_dtype", ["float32", "bfloat16"])
def test_it_learns_as_bfloat16_does(variable_dtype):
    x = rng.normal(size=(256, 16)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(16, 16)).astype("float32") / 4)

    def losses(policy):
        keras.utils.set_random_seed(3)
        model = prepared(mlp(), policy)
        return model.fit(x, y, batch_size=32, epochs=12, verbose=0, shuffle=False).history["loss"]

    expected = losses("float32")
    assert expected[-1] < 0.3 * expected[0]
    assert losses(Policy("mixed_float8", variable_dtype=variable_dtype))[-1] < 1.35 * expected[-1]


# What is said of it.


def test_trace_numerics_says_what_rounds_to_zero():
    """Of 32 inputs 16 are a millionth of the largest: half of the values, and next to nothing of the output."""
    model = prepared(keras.Sequential([keras.Input((32,)), layers.Dense(32, name="only")], name="net"), every_layer())
    x = np.tile(np.r_[np.full(16, 1.0), np.full(16, 1e-6)], (4, 1)).astype("float32")
    report = mpkeras.trace_numerics(model, x, np.ones((4, 32), "float32"))
    (found,) = [layer for layer in report.layers if layer.path == "net/only"]
    assert found.float8["inputs"] == 0.5 and found.float8["kernel"] < 0.05
    assert 0.001 < found.float8["output_error"] < HALF_UNIT
    assert report.rules_16_bits == () and report.to_dict()["layers"][0]["float8"] == found.float8


def test_a_layer_that_float8_is_too_coarse_for_gets_a_rule():
    """What makes the inputs' largest value is multiplied by zero; all else has a bit or two left."""
    parts = [layers.Dense(32, name="one"), layers.Dense(32, name="two")]
    model = prepared(keras.Sequential([keras.Input((32,)), *parts], name="net"), every_layer())
    kernel = rng.normal(size=(32, 32))
    kernel[0] = 0.0
    model.layers[0].kernel.assign(kernel)
    x = rng.normal(size=(16, 32)).astype("float32")
    x[:, 0] = 2e5
    report = mpkeras.trace_numerics(model, x, np.ones((16, 32), "float32"))
    rounded_kernel, rounded_x = in_float8(kernel, E4M3), in_float8(x, E4M3)
    exact = in_bfloat16(x) @ in_bfloat16(kernel)
    off = np.linalg.norm(rounded_x @ rounded_kernel - exact) / np.linalg.norm(exact)
    found = {layer.path: layer for layer in report.layers}
    assert off > 0.2 and found["net/one"].float8["output_error"] == pytest.approx(off, rel=0.1)
    assert found["net/two"].float8["output_error"] < 0.1
    assert report.rules_16_bits == ("path:^net/one$",)
    assert "Layer 'net/one': its outputs are off by" in str(report)
    model = mpkeras.prepare(model, report.policy())
    assert reasons(model)["one"] == "the rule 'path:^net/one$' keeps it in 16 bits"
    assert report.policy().keep_16_bits == ("path:^net/one$",)


@pytest.mark.backends("tensorflow")
def test_the_share_that_rounds_to_zero_by_hand():
    from mpkeras.tools.numerics.losses import zeroed_share

    # Scaled by 2**8, as 448 / 1.5 lies between 256 and 512; half of e4m3's smallest number is 2**-10.
    values = np.r_[1.5, np.full(3, 2.0**-18), np.full(2, 2.0**-17), 0.0, np.inf]
    assert zeroed_share([values, None, np.zeros(3)], "float8_e4m3fn") == pytest.approx(3 / 6)
    # A scale of 2**15, and 2**-17.
    values = np.r_[1.5, np.full(3, 2.0**-32), np.full(5, 2.0**-31)]
    assert zeroed_share([values], "float8_e5m2") == pytest.approx(3 / 9)
    # Times 256 the last one is a quarter of the smallest number.
    values = np.array([1.0, 1.75, 2.0, 2.0**-19])
    assert zeroed_share([values], "float8_e4m3fn", 256.0) == pytest.approx(1 / 4)


@pytest.mark.slow
def test_a_layer_that_overflows_leaves_float8_first_and_then_16_bits():
    model = prepared(mlp())
    name = model.layers[1].path
    fallback = mpkeras.callbacks.Float32Fallback(patience=1)
    x = rng.normal(size=(8, 16)).astype("float32")
    # More than bfloat16 holds, and not more than float32 does.
    bad = model.layers[1].bias
    good = bad.numpy()
    bad.assign(np.full(bad.shape, 3.4e38))
    fit = functools.partial(model.fit, x, x, batch_size=8, verbose=0, shuffle=False, callbacks=[fallback])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(epochs=1)
        assert (fallback.moved_from_float8, fallback.moved) == ([name], [])
        assert reasons(model)[model.layers[1].name] == "it overflowed"
        assert model.layers[1].compute_dtype == "bfloat16" and not multiplies_in_float8(model.layers[1])
        fit(epochs=1)
        assert (fallback.moved_from_float8, fallback.moved) == ([name], [name])
    moves = [re.search("from .* to [a-z0-9]*", str(warning.message)) for warning in told]
    assert [move[0] for move in moves if move] == ["from float8 to bfloat16", "from bfloat16 to float32"]
    bad.assign(good)
    fit(epochs=2)
    assert name in Policy("mixed_float8", keep_16_bits=fallback.rules_16_bits).keep_16_bits[0]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["callback", "prepare"])
def test_a_layer_that_left_float8_stays_out_of_it_in_the_next_training(door):
    model = prepared(mlp())
    leave_float8(model, model.layers[1], "it overflowed")
    assert not multiplies_in_float8(model.layers[1])

    def again(policy):
        if door == "prepare":
            return mpkeras.prepare(model, policy)
        return model.fit(ONES, ONES, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])

    again("mixed_float8")
    assert not multiplies_in_float8(model.layers[1]) and multiplies_in_float8(model.layers[2])
    assert reasons(model)[model.layers[1].name] == "it overflowed"
    # Another policy in between begins anew.
    again("mixed_bfloat16")
    again("mixed_float8")
    assert multiplies_in_float8(model.layers[1])


@pytest.mark.slow
def test_advice_says_that_it_cannot_pay_here():
    report = mpkeras.advise(compiled(mlp()), ONES, ONES, budget_s=5)
    assert report.float8_can_pay is False and report.to_dict()["float8"]["can_pay"] is False
    assert "`mixed_float8` cannot pay here: " in str(report)


@pytest.mark.backends("tensorflow")
def test_devices_with_units_for_float8():
    from mpkeras.devices.native import Device, float8_units

    h100 = Device("gpu", "H100", compute_capability=(9, 0))
    a100 = Device("gpu", "A100", compute_capability=(8, 0))
    cpu = Device("cpu")
    assert float8_units([h100, cpu], "jax") == (True, "H100 multiplies float8")
    assert float8_units([Device("gpu", "L4", compute_capability=(8, 9))], "torch")[0]
    assert float8_units([h100, a100], "jax")[1].startswith("A100 has no units")
    assert float8_units([cpu], "torch")[1].startswith("a CPU has no units")
    assert "TensorFlow" in float8_units([h100], "tensorflow")[1]
    assert not float8_units([Device("tpu", "TPU v5e")], "jax")[0]


# The policy.

ONCE = pytest.mark.backends("tensorflow")


def a_policy(**options):
    return Policy("mine", compute_dtype="bfloat16", **{"variable_dtype": "float32", "float8": "current", **options})


@ONCE
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (get_policy("mixed_float8"), ("bfloat16", "float32", "current", ("first", "last"))),
        (get_policy("mixed_bfloat16"), ("bfloat16", "float32", None, ())),
        (Policy("mixed_float8", variable_dtype="bfloat16"), ("bfloat16", "bfloat16", "current", ("first", "last"))),
        (a_policy(keep_16_bits=()), ("bfloat16", "float32", "current", ())),
        (a_policy(slot_dtype="float32").renamed("other"), ("bfloat16", "float32", "current", ("first", "last"))),
        (
            Policy("mixed_float8", keep_16_bits=[layers.EinsumDense, "path:router"]),
            ("bfloat16", "float32", "current", (layers.EinsumDense, "path:router")),
        ),
    ],
)
def test_policies_and_what_their_configs_bring_back(policy, expected):
    assert (policy.compute_dtype, policy.variable_dtype, policy.float8, policy.keep_16_bits) == expected
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(policy))
    assert again == policy and again.float8 == policy.float8
    assert ("float8" in policy.get_config()) == ("float8=current" in repr(policy)) == (policy.float8 is not None)


@ONCE
def test_policies_differ_by_what_is_said_of_float8():
    assert len({a_policy(), a_policy(float8=None), a_policy(keep_16_bits=()), a_policy(keep_16_bits=("first",))}) == 4
    built_in = get_policy("mixed_float8")
    assert (built_in.loss_scale, built_in.keep_float32) == (None, get_policy("mixed_bfloat16").keep_float32)


@ONCE
def test_keras_is_given_its_own_policy():
    """A layer that is made under it is a stock one; what it multiplies in is decided for the whole model."""
    with mpkeras.policy_scope("mixed_float8"):
        assert keras.config.dtype_policy().name == "mixed_bfloat16" == layers.Dense(16).dtype_policy.name
        assert mpkeras.global_policy() == get_policy("mixed_float8")
    assert mpkeras.global_policy().float8 is None


@ONCE
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "mixed_float8", "float8": "past"}, ValueError, "float8='past'"),
        ({"name": "mixed_float8", "float8": "delayed"}, ValueError, "float8='delayed'.*'delayed' was removed"),
        ({"name": "mixed_float8", "compute_dtype": "float16"}, ValueError, "compute_dtype='float16'"),
        ({"name": "mixed_float16", "float8": "current"}, ValueError, "Use 'mixed_float8'"),
        ({"name": "mixed_bfloat16", "keep_16_bits": ("first",)}, ValueError, "float8=None"),
        ({"name": "mixed_float8", "keep_16_bits": "first"}, TypeError, "`keep_16_bits` to be a tuple"),
        ({"name": "mixed_float8", "keep_16_bits": ("path:",)}, ValueError, "after 'path:'"),
        ({"name": "mixed_float8", "keep_16_bits": (3,)}, TypeError, "Received: 3"),
    ],
)
def test_bad_input_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Policy(**options)
