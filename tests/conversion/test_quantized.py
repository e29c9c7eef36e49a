"""Quantized layers keep their policy, and predict what plain Keras makes of them, whatever is converted when."""

import gc

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.policies.rules import bound_layers, running_quantized

# What decides knows no backend; that quantized layers work and train on JAX is in the other tests.
NOT_ON_JAX = pytest.mark.backends("tensorflow", "torch")

POLICY = "mixed_bfloat16"
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 64)).astype("float32")
Y = rng.integers(0, 70, 8)
TOKENS = rng.integers(0, 32, (4, 6))

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method implemented:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    # Keras collects garbage for each variable that `quantize` removes: seconds each, late in a run of the whole suite.
    gc.collect()
    gc.freeze()


def classifier(policy="float32"):
    """A hidden layer in the policy, and a large softmax head, which a rule keeps in float32."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((64,))
    x = layers.Dense(64, activation="relu", name="hidden", dtype=policy)(inputs)
    return keras.Model(inputs, layers.Dense(70, activation="softmax", name="head")(x))


def convert(model):
    mpkeras.apply_policy(model, POLICY)


def back(model):
    mpkeras.apply_policy(model, "float32")


def prepare(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    mpkeras.prepare(model, POLICY)


def predictions(model, x=X):
    return np.asarray(ops.convert_to_numpy(ops.cast(model(x), "float32")))


def quantized(model, mode="int8"):
    with pytest.MonkeyPatch.context() as patch:
        # An embedding has no float8 form, of which Keras warns.
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        model.quantize(mode)
    return model


def lora(model):
    for name in ("hidden", "head"):
        layer = model.get_layer(name)
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.05, "float32"))


@NOT_ON_JAX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        pytest.param("int8", [convert, "quantize", convert], id="converted before and after"),
        pytest.param("int4", [convert, "quantize", prepare], id="prepared after"),
        pytest.param("float8", [prepare, "quantize", prepare], id="prepared before and after"),
        pytest.param("int8", [convert, "quantize", back, convert], id="back and forth"),
        pytest.param("int8", [lora, convert, "quantize", convert], id="LoRA first"),
        pytest.param("int8", [convert, lora, "quantize", prepare], id="LoRA second"),
        pytest.param("int8", [convert, "quantize", lora, convert], id="LoRA last"),
    ],
)
def test_a_model_that_was_converted_before_it_was_quantized(mode, steps):
    """As plain Keras, with the policies by which it knows the converted layers."""
    stock, model = classifier(POLICY), classifier()
    for step in steps:
        for each in (stock, model):
            if step == "quantize":
                each.quantize(mode)
            elif step is lora or each is model:
                keras.utils.set_random_seed(5)
                step(each)
    names = [layer.dtype_policy.name for layer in model.layers[1:]]
    assert names == [layer.dtype_policy.name for layer in stock.layers[1:]] and names[-1].endswith("_from_float32")
    np.testing.assert_array_equal(predictions(model), predictions(stock))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "steps"),
    [("int8", [convert]), ("int4", [prepare]), ("float8", [convert, back]), ("int8", [prepare, convert])],
)
def test_a_model_that_was_quantized_first(mode, steps):
    model = classifier()
    model.quantize(mode)
    policies, expected = [layer.dtype_policy for layer in model.layers[1:]], predictions(model)
    for step in steps:
        step(model)
    assert [layer.dtype_policy for layer in model.layers[1:]] == policies
    np.testing.assert_array_equal(predictions(model), expected)
    assert all(not replaced_attributes(layer) for layer in model.layers)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_quantized_model_that_was_converted_is_saved_as_plain_keras_saves_it(mode, tmp_path):
    model = classifier()
    convert(model)
    quantized(model, mode).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(predictions(loaded), predictions(model))


def test_a_head_that_cannot_be_quantized_stays_as_it_was():
    model = classifier()
    convert(model)
    head = model.get_layer("head")
    expected = predictions(model)
    with pytest.raises(ValueError, match="Invalid quantization mode"):
        head.quantize("int3")
    assert head.compute_dtype == "float32"
    np.testing.assert_array_equal(predictions(model), expected)


class Block(layers.Layer):
    """As those of Gemma: its arithmetic between the layers meets what they return."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(dtype=self.dtype_policy, name="norm")
        self.up = layers.EinsumDense("btd,df->btf", output_shape=(None, 8), dtype=self.dtype_policy, name="up")
        self.down = layers.EinsumDense("btf,fd->btd", output_shape=(None, 8), dtype=self.dtype_policy, name="down")
        self.dropout = layers.Dropout(0.0, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape):
        for layer in (self.norm, self.up, self.down):
            layer.build(input_shape)

    def call(self, x):
        return x + self.dropout(self.down(keras.activations.gelu(self.up(self.norm(x))))) + x


def language_model(policy="float32"):
    keras.utils.set_random_seed(3)
    with mpkeras.policy_scope(policy):
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(32, 8, name="embedding")(tokens)
        x = Block(name="block")(x)
        x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
        x = layers.LayerNormalization(name="norm")(x)
        return keras.Model(tokens, layers.Dense(32, name="logits")(x))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "built_under"), [("int8", "float32"), ("int8", POLICY), ("float8", "float32")])
def test_a_quantized_language_model_trains(mode, built_under):
    """Stock Keras trains it; LoRA, where the kernels are integers."""
    model = language_model(built_under)
    quantized(model, mode)
    policies = {layer.path: layer.dtype_policy.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert len(policies) >= 7
    if mode == "int8":
        for layer in (model.get_layer("block").up, model.get_layer("logits")):
            layer.enable_lora(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss)
    callback = mpkeras.callbacks.MixedPrecision(POLICY)
    history = model.fit(TOKENS, TOKENS, epochs=4, verbose=0, callbacks=[callback]).history
    assert history["loss"][-1] < history["loss"][0] and history["skipped_steps"][-1] == 0
    found = {layer.path: layer.dtype_policy.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert found == policies
    # The graph casts between its layers, so that those that are not quantized follow the policy.
    assert model.get_layer("norm").compute_dtype == "bfloat16"


@NOT_ON_JAX
@pytest.mark.slow
def test_a_layer_that_runs_quantized_ones_stays_with_them_even_against_a_rule():
    model = quantized(language_model())
    block, attention = model.get_layer("block"), model.get_layer("attention")
    assert running_quantized(model, "bfloat16") == [block, attention]
    assert running_quantized(model, "float32") == []
    bound = bound_layers(model, "bfloat16")
    assert {id(block), id(block.norm), id(block.dropout), id(model.get_layer("logits"))} <= bound
    assert id(model.get_layer("norm")) not in bound and id(model) not in bound
    convert(model)
    assert {layer.compute_dtype for layer in block._flatten_layers()} == {"float32"}

    model = quantized(language_model(POLICY))
    expected = predictions(model, TOKENS)
    mpkeras.apply_policy(model, mpkeras.Policy(POLICY, keep_float32=("Block", "Embedding", "path:logits")))
    np.testing.assert_array_equal(predictions(model, TOKENS), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "built_under"),
    # Keras' own gradient of an int8 `EinsumDense` mixes dtypes in bfloat16 on eager TensorFlow.
    [(classifier, "float32"), (classifier, POLICY), (language_model, "float32")],
)
def test_trace_numerics_of_quantized_layers(make, built_under):
    model = make(built_under)
    quantized(model)
    x, y = (X, Y) if make is classifier else (TOKENS, TOKENS)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=make is language_model))
    expected = predictions(model, x)
    report = mpkeras.trace_numerics(model, x, y)
    assert report.culprit is None and np.isfinite(report.loss)
    (last,) = [layer for layer in report.layers if layer.path.endswith(("head", "logits"))]
    assert np.isclose(last.outputs.max_abs, np.abs(expected).max(), rtol=1e-2)
    np.testing.assert_array_equal(predictions(model, x), expected)
