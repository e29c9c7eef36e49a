"""FLOPs and casts of traced forward passes against counts by hand, on every backend."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.conversion.plan import layers_of
from mpkeras.tools.shared.flops import Program, forward_pass, owner_name, owner_of, widest
from tests.sixteen_bits import without_outputs


def traced(model, inputs=None, batch_size=8):
    forward = forward_pass(model, inputs, batch_size)
    assert forward.why_not is None, forward.why_not
    return forward


def flops(model, **options):
    """Returns `{dtype: FLOPs}` of a forward pass."""
    sums = {}
    for product in traced(model, **options).program.products:
        sums[product.dtype] = sums.get(product.dtype, 0) + product.flops
    return sums


def flops_by_layer(model):
    names = [layer.name for layer in layers_of(model)]
    sums = {}
    for product in traced(model).program.products:
        sums[names[product.owner]] = sums.get(names[product.owner], 0) + product.flops
    return sums


# A multiplication and an addition are two; the batch is 8.
LAYERS = {
    "dense on sequences": ((5, 6), lambda: layers.Dense(7), 2 * 8 * 5 * 6 * 7),
    # 10 x 10 pixels and 3 x 3 kernels: 8 x 8 results.
    "conv": ((10, 10, 3), lambda: layers.Conv2D(16, 3), 2 * 8 * (8 * 8) * 16 * (3 * 3 * 3)),
    "strided": ((10, 10, 3), lambda: layers.Conv2D(16, 3, strides=2, padding="same"), 2 * 8 * 25 * 16 * 27),
    "grouped": ((10, 10, 4), lambda: layers.Conv2D(16, 3, groups=2), 2 * 8 * 64 * 16 * (3 * 3 * 2)),
    "depthwise": ((10, 10, 4), lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), 2 * 8 * 64 * 8 * 9),
    # Each of the 4 x 4 inputs meets each number of the kernel once.
    "transposed": (
        (4, 4, 3),
        lambda: layers.Conv2DTranspose(5, 2, strides=2, padding="same"),
        2 * 8 * 16 * 3 * (2 * 2 * 5),
    ),
    # The same where the kernels overlap, and reach beyond their inputs.
    "transposed, valid": ((3, 5, 4), lambda: layers.Conv2DTranspose(6, 3, strides=2), 2 * 8 * 15 * 4 * (3 * 3 * 6)),
    "transposed, from one pixel": ((1, 1, 7), lambda: layers.Conv2DTranspose(5, 4), 2 * 8 * 7 * (4 * 4 * 5)),
    "conv 3-D": ((4, 4, 4, 2), lambda: layers.Conv3D(3, 2), 2 * 8 * 27 * 3 * (8 * 2)),
    # Four gates of 4 units, in each of 20 steps.
    "lstm": ((20, 6), lambda: layers.LSTM(4), 20 * 2 * 8 * (6 + 4) * 16),
    "simple rnn": ((20, 6), lambda: layers.SimpleRNN(4), 20 * 2 * 8 * (6 + 4) * 4),
    "time distributed": ((5, 6), lambda: layers.TimeDistributed(layers.Dense(7)), 2 * 8 * 5 * 6 * 7),
    "embedding": ((5,), lambda: layers.Embedding(100, 6), 0),
    "pooling": ((10, 10, 4), lambda: layers.MaxPooling2D(), 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_flops_of_a_layer(name):
    shape, make, expected = LAYERS[name]
    if name == "simple rnn" and keras.backend.backend() == "torch":
        expected += 2 * 8 * (6 + 4) * 4  # Keras tries one step first, and nothing there leaves it out again.
    found = flops(keras.Sequential([keras.Input(shape), make()]))
    assert found == ({"float32": expected} if expected else {})


def test_flops_of_attention_by_part():
    inputs = keras.Input((5, 6))
    attention = layers.MultiHeadAttention(2, 4, name="attention", dropout=0.1)
    assert flops_by_layer(keras.Model(inputs, attention(inputs, inputs))) == {
        "query": 2 * 8 * 5 * 6 * (2 * 4),
        "key": 2 * 8 * 5 * 6 * (2 * 4),
        "value": 2 * 8 * 5 * 6 * (2 * 4),
        # Scores, and their product with the values.
        "attention": 2 * (2 * 8 * 2 * (5 * 5) * 4),
        "attention_output": 2 * 8 * 5 * (2 * 4) * 6,
    }


def test_the_fused_attention_of_the_backend_is_counted_too():
    class Fused(layers.Layer):
        def call(self, x):
            return keras.ops.dot_product_attention(x, x, x)

    inputs = keras.Input((5, 2, 4))  # 5 places, 2 heads
    assert flops(keras.Model(inputs, Fused()(inputs))) == {"float32": 2 * (2 * 8 * 2 * (5 * 5) * 4)}


class TimesVector(layers.Layer):
    """Multiplies rows by a vector, which torch has an operation of its own for."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return keras.ops.dot(x, self.scale)


def test_a_product_with_a_vector():
    assert flops(keras.Sequential([keras.Input((3, 12)), TimesVector()])) == {"float32": 2 * 8 * 3 * 12}


class OneOfThreeProducts(layers.Layer):
    """Multiplies by one of three kernels, of which the second is the largest."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose

    def build(self, shape):
        self.kernels = [self.add_weight(shape=(shape[-1], columns)) for columns in (2, 5, 3)]

    def call(self, x):
        def by(kernel):
            return lambda: keras.ops.sum(keras.ops.matmul(x, kernel), axis=-1, keepdims=True)

        return self.choose(keras.ops.sum(x), [by(kernel) for kernel in self.kernels])


@pytest.mark.backends("tensorflow", "jax")  # torch needs a number to know which.
@pytest.mark.parametrize(
    "choose",
    [
        lambda total, branches: keras.ops.cond(total < 0, *branches[:2]),
        lambda total, branches: keras.ops.switch(keras.ops.cast(total, "int32"), branches),
    ],
    ids=["cond", "switch"],
)
def test_of_several_branches_the_one_that_multiplies_most_counts(choose):
    assert flops(keras.Sequential([keras.Input((6,)), OneOfThreeProducts(choose)])) == {"float32": 2 * 8 * 6 * 5}


def test_a_shared_layer_counts_each_call_and_a_nested_model_its_layers():
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="inside")])
    model = keras.Model(inputs, inner(shared(shared(inputs))))
    assert flops_by_layer(model) == {"shared": 2 * (2 * 8 * 4 * 4), "inside": 2 * 8 * 4 * 3}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_products_count_in_the_dtype_they_are_computed_in(policy, backend):
    if backend == "torch" and policy == "mixed_float16":
        pytest.skip("Keras itself multiplies float16 in float32 on a CPU with torch")
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(8, dtype="float32"), layers.Dense(500)]
    )
    for layer in (model.layers[0], model.layers[2]):
        layer.dtype_policy = keras.DTypePolicy(policy)
    half = policy.removeprefix("mixed_")
    assert flops(model) == {half: 2 * 8 * (64 * 32 + 8 * 500), "float32": 2 * 8 * 32 * 8}


def test_casts_of_four_layers_are_those_of_a_hand_count():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dense(8),
            layers.Dense(500, activation="softmax"),
        ]
    )
    casts = traced(mpkeras.apply_policy(model, "mixed_bfloat16")).program.casts
    # The input, a kernel and a bias in each of two layers, and what BatchNormalization returns; what it is given, and
    # what the head is given.
    assert [cast.target for cast in casts].count("bfloat16") == 1 + 2 * 2 + 1
    assert [cast.target for cast in casts].count("float32") == 1 + 1
    numbers = 8 * 4 + (4 * 8 + 8) + 8 * 8 + 8 * 8 + (8 * 8 + 8) + 8 * 8
    assert sum(cast.elements for cast in casts) == numbers


def test_sizes_that_a_model_leaves_open():
    model = keras.Sequential([keras.Input((None, 6)), layers.Dense(7)])
    forward = traced(model, batch_size=2)
    assert forward.open_size == 64 and forward.input_shapes == [(2, 64, 6)]
    given = keras.KerasTensor((3, 5, 6))
    forward = traced(model, inputs=given)
    assert forward.open_size is None and forward.input_shapes == [(3, 5, 6)]
    assert flops(model, inputs=np.ones((3, 5, 6), "float32")) == {"float32": 2 * 3 * 5 * 6 * 7}


class TwoInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def build(self, x_shape, other_shape):
        self.dense.build(x_shape)

    def call(self, x, other):
        return self.dense(x) + other


def test_a_subclassed_model_knows_the_shapes_it_was_built_with():
    model = TwoInputs()
    assert "not built" in forward_pass(model, None, 8).why_not
    model(np.ones((2, 4), "float32"), other=np.ones((2, 3), "float32"))
    assert flops(model) == {"float32": 2 * 8 * 4 * 3}


def test_multiple_inputs_in_a_dictionary():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), dtype="int32", name="b")}
    joined = layers.Concatenate()([inputs["a"], layers.Rescaling(1.0)(inputs["b"])])
    assert flops(keras.Model(inputs, {"out": layers.Dense(2)(joined)})) == {"float32": 2 * 8 * 7 * 2}


def test_bytes_of_outputs_by_dtype():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])
    mpkeras.apply_policy(model, without_outputs("mixed_bfloat16"))
    sums = {}
    for sizes in traced(model).output_bytes.values():
        for dtype, n in sizes.items():
            sums[dtype] = sums.get(dtype, 0) + n
    # Two dense layers; BatchNormalization. The cast at the end is no layer.
    assert sums == {"bfloat16": 2 * 8 * (8 + 2), "float32": 4 * 8 * 8}


@pytest.mark.backends("torch")
def test_random_numbers_of_a_fixed_seed_are_left_out_on_torch():
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=1), layers.Dense(3)])
    forward = traced(model)
    assert not forward.training and forward.program.products[0].flops == 2 * 8 * 4 * 3


def test_scopes_and_dtypes():
    assert owner_of(f"model/{owner_name(3)}/while/{owner_name(12)}_1/MatMul") == 12
    assert owner_of("model/MatMul", outer=4) == 4
    assert widest(["bfloat16", "float32"]) == "float32" and widest(["int8", "int8"]) == "int8"
    program = Program()
    program.add_cast(0, "int32", "float32", 5)
    program.add_cast(0, "float32", "float32", 5)
    assert program.casts == []
