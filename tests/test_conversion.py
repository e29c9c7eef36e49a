"""P20: an existing model gets the dtypes of a policy, keeps its weights, and finds its way back."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.conversion import apply_policy
from tests.step_modes import snapshot

POLICIES = ["mixed_float16", "mixed_bfloat16"]
rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(2, 8, 8, 3)).astype("float32")
SEQUENCES = rng.normal(size=(2, 5, 4)).astype("float32")


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), "float64")


def functional():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.Conv2D(4, 1)(x)])
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))


def sequential():
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


def nested():
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, {"a": functional()(inputs), "b": sequential()(inputs)})


def softmax_head():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Dense(5, activation="softmax")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, x)


def shared():
    layer = keras.layers.Dense(3, activation="tanh")
    a, b = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    return keras.Model([a, b], [keras.layers.Subtract()([layer(a), layer(b)]), layer(a)])


def wrappers():
    inputs = keras.Input((5, 4))
    x = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(inputs)
    x = keras.layers.TimeDistributed(keras.layers.Dense(4))(x)
    return keras.Model(inputs, keras.layers.MultiHeadAttention(2, 2)(x, x))


class Backbone(keras.Model):
    """As KerasHub's: a class of its own around a functional graph."""

    def __init__(self, width=4):
        inputs = keras.Input((8, 8, 3), name="images")
        x = keras.layers.Dense(width, activation="gelu")(inputs)
        super().__init__(inputs, keras.layers.LayerNormalization()(x))
        self.width = width

    def train_step(self, *args):
        self.steps = getattr(self, "steps", 0) + 1
        return super().train_step(*args)

    def get_config(self):
        return {"width": self.width}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.head = keras.layers.Dense(2)

    def call(self, x):
        return self.head(self.hidden(x))


KINDS = {
    "functional": (functional, IMAGES),
    "sequential": (sequential, IMAGES),
    "nested": (nested, IMAGES),
    "softmax head": (softmax_head, IMAGES),
    "shared layers": (shared, [IMAGES, IMAGES[::-1].copy()]),
    "wrappers": (wrappers, SEQUENCES),
    "backbone": (Backbone, IMAGES),
}


def real_dtypes(outputs):
    return [keras.backend.standardize_dtype(output.dtype) for output in keras.tree.flatten(outputs)]


def layer_outputs(model, x):
    """Returns `(symbolic dtype, real dtype)` of every tensor between the layers of a Functional model."""
    inner = model if not isinstance(model, keras.Sequential) else keras.Model(model.inputs, model.outputs)
    tensors = [tensor for layer in inner.layers for tensor in keras.tree.flatten(layer.output) if layer.output is not x]
    inputs = x if isinstance(x, list) else [x]
    return [tensor.dtype for tensor in tensors], real_dtypes(keras.Model(inner.inputs, tensors)(inputs))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind, policy, backend):
    if (kind, policy, backend) == ("wrappers", "mixed_float16", "jax"):
        pytest.skip("JAX has no float16 attention on a CPU: the layer stays in float32 by a rule, tested there")
    make, x = KINDS[kind]
    model = make()
    weights, config, names = snapshot(model.variables), model.get_config(), [layer.name for layer in model.layers]
    variables, expected = list(model.variables), keras.tree.flatten(model(x))

    assert apply_policy(model, policy) is model
    assert all(a is b for a, b in zip(model.variables, variables, strict=True))
    assert snapshot(model.variables) == weights
    assert any(layer.compute_dtype == policy.removeprefix("mixed_") for layer in model.layers)
    outputs = model(x)
    assert real_dtypes(outputs) == ["float32"] * len(expected) == [output.dtype for output in model.outputs]
    for output, reference in zip(keras.tree.flatten(outputs), expected, strict=True):
        # bfloat16 has 8 significant bits; a few layers
        np.testing.assert_allclose(numpy(output), numpy(reference), rtol=5e-2, atol=5e-2)

    # Back: the same numbers, layers and configuration.
    apply_policy(model, "float32")
    for output, reference in zip(keras.tree.flatten(model(x)), expected, strict=True):
        np.testing.assert_array_equal(numpy(output), numpy(reference))
    assert ([layer.name for layer in model.layers], model.get_config()) == (names, config)
    assert snapshot(model.variables) == weights


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["functional", "sequential", "softmax head", "shared layers"])
def test_symbolic_dtypes_are_the_real_ones(kind, policy):
    make, x = KINDS[kind]
    symbolic, real = layer_outputs(apply_policy(make(), policy), x)
    assert symbolic == real
    assert policy.removeprefix("mixed_") in real


def test_symbolic_dtypes_within_nested_models():
    model = apply_policy(nested(), "mixed_bfloat16")
    for inner in model.layers[1:3]:
        symbolic, real = layer_outputs(inner, IMAGES)
        assert symbolic == real and real[-1] == "bfloat16"


def test_the_last_product_stays_in_16_bits():
    model = apply_policy(functional(), "mixed_bfloat16")
    cast, dense = model.layers[-1], model.layers[-2]
    assert (dense.compute_dtype, cast.compute_dtype) == ("bfloat16", "float32")
    # A head whose softmax is in float32 needs no cast.
    assert apply_policy(softmax_head(), "mixed_bfloat16").layers[-1].name.startswith("dense")


def test_from_one_policy_to_another_and_twice():
    model = functional()
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_bfloat16"):
        apply_policy(model, policy)
        assert len([layer for layer in model.layers if layer.name.startswith("mpkeras_float32_output")]) == 1
    assert model.layers[2].compute_dtype == "bfloat16"


def test_a_class_around_a_graph_keeps_its_class_and_its_train_step():
    model = apply_policy(Backbone(), "mixed_bfloat16")
    assert type(model) is Backbone
    model.compile("sgd", "mse")
    model.train_on_batch(IMAGES, np.zeros((2, 8, 8, 4), "float32"))
    assert model.steps >= 1


@pytest.mark.parametrize("built", [True, False])
def test_subclassed_models(built):
    model = Subclassed()
    if built:
        model(IMAGES)
    weights = snapshot(model.variables)
    assert apply_policy(model, "mixed_bfloat16") is model
    assert snapshot(model.variables) == weights
    assert real_dtypes(model.hidden(IMAGES)) == ["bfloat16"]
    # Nothing stands behind its `call`.
    assert real_dtypes(model(IMAGES)) == ["bfloat16"]
    assert all(v.dtype == "float32" for v in model.variables)


def test_a_sequential_that_is_not_built():
    model = apply_policy(keras.Sequential([keras.layers.Dense(3)]), "mixed_bfloat16")
    model(IMAGES)
    assert model.layers[-1].compute_dtype == "bfloat16"


def test_the_global_policy_is_the_default():
    with mpkeras.policy_scope("mixed_bfloat16"):
        pass
    model = functional()
    mpkeras.set_global_policy("mixed_bfloat16")
    assert apply_policy(model).layers[2].compute_dtype == "bfloat16"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_converted_model_trains(policy):
    model = apply_policy(functional(), policy)
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
    results = [step(IMAGES, np.ones((2, 5), "float32")) for _ in range(8)]
    losses = [float(numpy(result["loss"])) for result in results]
    assert losses[-1] < losses[0]
    assert step.optimizer.dynamic == (policy == "mixed_float16")


# Keras 3.10 warns of the structure of inputs for any Functional model that it has loaded.
@pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")
def test_a_converted_model_saves_and_loads_in_plain_keras(tmp_path):
    model = apply_policy(functional(), "mixed_bfloat16")
    expected = numpy(model(IMAGES))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), expected)
    # The way back works on the loaded model, too.
    assert len(apply_policy(loaded, "float32").layers) == len(functional().layers)


@pytest.mark.backends("tensorflow")
def test_signatures_are_float32_in_and_out(tmp_path):
    import tensorflow as tf

    model = apply_policy(functional(), "mixed_bfloat16")
    model.export(tmp_path / "saved", verbose=False)
    signature = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    specs = [*signature.structured_input_signature[1].values(), *signature.structured_outputs.values()]
    assert {spec.dtype for spec in specs} == {tf.float32}


def test_float16_on_a_compiled_model_without_loss_scaling_is_said():
    """P18: its `fit` would lose small gradients."""
    model = functional()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="scales no loss.*mpkeras.prepare"):
        apply_policy(model, "mixed_float16")
    mpkeras.prepare(model)
    apply_policy(model, "mixed_float16")


@pytest.mark.parametrize(
    ("make", "policy", "error", "message"),
    [
        pytest.param(lambda: keras.layers.Dense(2), "mixed_float16", TypeError, "keras.Model", id="layer"),
        pytest.param(functional, "mixed_float8", ValueError, "mixed_float8", id="unknown policy"),
        pytest.param(functional, "float16", ValueError, "policy 'float16'.*mixed_float16", id="float16 variables"),
        pytest.param(
            lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float16")]),
            "mixed_float16",
            ValueError,
            "16-bit variables.*float32_variables=True",
            id="a model with float16 variables",
        ),
    ],
)
def test_bad_input_changes_nothing(make, policy, error, message):
    model = make()
    before = [layer.dtype_policy for layer in getattr(model, "layers", [])]
    with pytest.raises(error, match=message):
        apply_policy(model, policy)
    assert [layer.dtype_policy for layer in getattr(model, "layers", [])] == before


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("ConvNeXtTiny", 32),
        ("DenseNet121", 32),
        ("EfficientNetB0", 32),
        ("EfficientNetV2B0", 32),
        ("InceptionResNetV2", 75),
        ("InceptionV3", 75),
        ("MobileNet", 32),
        ("MobileNetV2", 32),
        ("MobileNetV3Small", 32),
        ("NASNetMobile", 32),
        ("ResNet50", 32),
        ("ResNet50V2", 32),
        ("VGG16", 32),
        ("Xception", 75),
    ],
)
def test_applications(name, size):
    """One model of each family."""
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    weights, config = snapshot(model.variables), model.get_config()
    x = rng.uniform(0, 255, size=(2, size, size, 3)).astype("float32")
    expected = numpy(model(x))
    apply_policy(model, "mixed_bfloat16")
    symbolic, real = layer_outputs(model, x)
    assert symbolic == real
    assert snapshot(model.variables) == weights
    # probabilities of ten classes
    np.testing.assert_allclose(numpy(model(x)), expected, atol=5e-2)
    apply_policy(model, "float32")
    assert model.get_config() == config


@pytest.mark.backends("torch")
@pytest.mark.parametrize("policy", POLICIES)
def test_torch_modules_follow(policy, tmp_path):
    """P25: stock Keras hands 16-bit inputs to float32 weights, and torch raises."""
    import torch

    torch.manual_seed(0)
    module = keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 3))
    model = keras.Sequential([keras.Input((4,)), module, keras.layers.Dense(2)])
    x = SEQUENCES[0]
    expected = numpy(model(x))
    apply_policy(model, policy)
    assert real_dtypes(module(x)) == [policy.removeprefix("mixed_")]
    np.testing.assert_allclose(numpy(model(x)), expected, atol=5e-2)
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
    losses = [float(step(x, np.ones((5, 2), "float32"))["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    apply_policy(model, "float32")
    assert real_dtypes(module(x)) == ["float32"]


@pytest.mark.backends("torch")
def test_a_torch_module_made_under_a_policy_follows_once_prepared():
    import torch

    with mpkeras.policy_scope("mixed_bfloat16"):
        layers = [keras.Input((4,)), keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 3), output_shape=(None, 3))]
        model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    mpkeras.prepare(model)
    assert np.isfinite(float(model.train_on_batch(SEQUENCES[0], np.ones((5, 3), "float32"))))


def pure(dtype):
    keras.utils.set_random_seed(0)
    with mpkeras.policy_scope(dtype):
        first = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()]
        return keras.Sequential([*first, keras.layers.Dense(2, activation="softmax")])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_p26_16_bit_variables_become_float32_on_request(dtype, tmp_path, backend):
    model = pure(dtype)
    before = [numpy(v.value) for v in model.variables]
    with pytest.raises(ValueError, match="float32_variables=True"):
        apply_policy(model, f"mixed_{dtype}")
    assert {v.dtype for v in model.variables} == {dtype}
    apply_policy(model, f"mixed_{dtype}", float32_variables=True)
    assert {v.dtype for v in model.variables} == {"float32"}
    for variable, value in zip(model.variables, before, strict=True):
        assert keras.backend.standardize_dtype(variable.value.dtype) == "float32"
        np.testing.assert_array_equal(numpy(variable.value), value)
    assert model.layers[0].dtype_policy == keras.DTypePolicy(f"mixed_{dtype}")
    x = np.ones((2, 4), "float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert {v.dtype for v in loaded.variables} == {"float32"}
    np.testing.assert_array_equal(numpy(apply_policy(loaded, f"mixed_{dtype}")(x)), numpy(model(x)))
    if backend == "tensorflow":
        model.export(tmp_path / "exported", verbose=False)
    # Updates of 1e-4 on weights near 1 are lost in 16 bits, which Adam takes a hundred times.
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    mpkeras.prepare(model, f"mixed_{dtype}")
    gamma = model.layers[1].gamma
    model.fit(np.eye(4, dtype="float32"), np.array([0, 1, 0, 1]), epochs=20, verbose=0)
    # Exactly representable numbers have few digits: a weight that moved by updates of its own has more.
    assert np.all(numpy(gamma) != 1) and np.max(np.abs(numpy(gamma) - 1)) < 2.5e-3
    zeros = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    model.optimizer.scale_loss(0.0)
    model.optimizer.apply(zeros, model.trainable_variables)
    assert all(np.isfinite(numpy(v)).all() for v in model.variables)


def test_p26_what_cannot_be_widened_is_refused_and_stays():
    model = pure("bfloat16")
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"Call `model.compile` with a new optimizer"):
        apply_policy(model, "mixed_bfloat16", float32_variables=True)
    with pytest.raises(TypeError, match="`float32_variables` to be True or False"):
        apply_policy(model, "mixed_bfloat16", float32_variables="yes")
    with pytest.raises(ValueError, match="policy 'float16'|16-bit variables"):
        apply_policy(model, "float16", float32_variables=True)
    assert {v.dtype for v in model.variables} == {"bfloat16"}


def test_p29_lora_weights_are_float32_and_move():
    model = sequential()
    apply_policy(model, "mixed_bfloat16")
    dense = model.layers[-2]
    dense.enable_lora(2)
    assert {v.dtype for v in dense.trainable_variables} == {"float32"}
    before = numpy(dense.lora_kernel_b)
    model.compile(keras.optimizers.Adam(1e-5), "mse")
    mpkeras.prepare(model)
    assert {v.dtype for v in model.optimizer.variables if "lora" in v.path} <= {"float32"}
    for _ in range(10):
        model.train_on_batch(IMAGES, np.zeros((2, 3), "float32"))
    moved = np.abs(numpy(dense.lora_kernel_b) - before)
    # Adam's first steps are of the size of the learning rate: 1e-5 each.
    assert np.all(moved > 5e-6) and np.all(moved < 2e-4)
