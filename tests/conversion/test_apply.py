"""P20: an existing model gets the dtypes of a policy, keeps its weights, and finds its way back."""

import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.conversion.apply import apply_policy
from mpkeras.conversion.undo import recorded
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
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
    ends = [keras.layers.Dense(2)(keras.layers.Subtract()([layer(a), layer(b)])), keras.layers.Dense(2)(layer(a))]
    return keras.Model([a, b], ends)


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


def assert_symbolic_dtypes_are_the_real_ones(model, x):
    """Of every tensor between the layers of a graph."""
    tensors = [tensor for layer in model.layers for tensor in keras.tree.flatten(layer.output)]
    inputs = x if isinstance(x, list) else [x]
    assert [tensor.dtype for tensor in tensors] == real_dtypes(keras.Model(model.inputs, tensors)(inputs))


@pytest.mark.parametrize("policy", first_quick(POLICIES))
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "wrappers" else k for k in KINDS])
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
    for graph in model.layers[1:3] if kind == "nested" else [model]:
        assert_symbolic_dtypes_are_the_real_ones(graph, x)

    # Back: the same numbers, layers and configuration.
    apply_policy(model, "float32")
    for output, reference in zip(keras.tree.flatten(model(x)), expected, strict=True):
        np.testing.assert_array_equal(numpy(output), numpy(reference))
    assert ([layer.name for layer in model.layers], model.get_config()) == (names, config)
    assert snapshot(model.variables) == weights


def test_outputs_end_in_one_cast_where_they_are_in_16_bits_from_policy_to_policy():
    model = functional()
    operations, in_16_bits = len(model.operations), without_outputs("mixed_bfloat16")
    steps = [(without_outputs("mixed_float16"), "float16"), (in_16_bits, "bfloat16"), (in_16_bits, "bfloat16")]
    for policy, of_the_head in [*steps, ("mixed_float16", "float32"), *steps, ("float32", "float32")]:
        apply_policy(model, policy)
        head = model.layers[-1]
        assert (head.compute_dtype, head.output.dtype, model.output.dtype) == (of_the_head, of_the_head, "float32")
        assert len(model.operations) == operations + (of_the_head != "float32")
        assert (head.output is model.output) == (of_the_head == "float32")
    # A softmax is in float32 by a rule of its own.
    model = apply_policy(softmax_head(), in_16_bits)
    assert model.layers[-1].output is model.output


def two_heads(names=("a", "b")):
    """Two named outputs of one product; the first is used by the second."""
    inputs = keras.Input((4,), name="x")
    shared = keras.layers.Dense(3, name="shared")(inputs)
    first = keras.layers.Dense(2, name=names[0])(shared)
    return keras.Model(inputs, [first, keras.layers.Dense(1, name=names[1])(first)])


VECTORS = SEQUENCES[0]
TARGETS = {"a": np.zeros((5, 2), "float32"), "b": np.ones((5, 1), "float32")}


def compile_by_name(model):
    model.compile("sgd", loss={"a": "mse", "b": "mae"}, loss_weights={"a": 2.0, "b": 0.5}, metrics={"b": ["mse"]})
    return model


# Keras 3.10 warns of the structure of inputs for any Functional model that it has loaded.
@pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")
@pytest.mark.slow
def test_outputs_keep_the_names_that_losses_and_targets_go_by_in_copies_and_files(tmp_path):
    stock, model = compile_by_name(two_heads()), two_heads()
    model.set_weights(stock.get_weights())
    config, names = model.get_config(), [layer.name for layer in model.layers]
    compile_by_name(apply_policy(model, "mixed_bfloat16"))
    assert model.output_names == ["a", "b"] and [layer.name for layer in model.layers] == names
    wanted = stock.evaluate(VECTORS, TARGETS, verbose=0, return_dict=True)
    found = model.evaluate(VECTORS, TARGETS, verbose=0, return_dict=True)
    assert found == pytest.approx(wanted, rel=0.1)  # bfloat16 has 8 significant bits
    compile_by_name(keras.models.clone_model(model)).fit(VECTORS, TARGETS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for output, saved in zip(loaded(VECTORS), model(VECTORS), strict=True):
        np.testing.assert_array_equal(numpy(output), numpy(saved))
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
    loaded.fit(VECTORS, TARGETS, verbose=0)
    assert len(apply_policy(loaded, "float32").layers) == len(names)
    # Saving has left the model as it was.
    assert real_dtypes(model(VECTORS)) == ["float32"] * 2 == [output.dtype for output in model.outputs]
    apply_policy(model, "float32")
    assert "get_config" not in vars(model) and model.get_config() == config


# Keras 3.10 says so of each Functional model from a file.
@pytest.mark.filterwarnings("ignore:The structure of .inputs. doesn:UserWarning")
def test_a_model_made_of_the_outputs_of_a_converted_one_is_stock(tmp_path):
    base = apply_policy(functional(), "mixed_bfloat16")
    model = keras.Model(base.inputs[0], keras.layers.Dense(2, name="new")(base.outputs[0]))
    expected = numpy(model(IMAGES))
    model.save(tmp_path / "model.keras")
    assert "mpkeras" not in model.to_json()
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), expected)


def test_a_mask_reaches_the_loss():
    """Words of 0 are left out of it."""
    keras.utils.set_random_seed(0)
    words = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    inputs = keras.Input((4,), dtype="int32")
    outputs = keras.layers.Dense(2)(keras.layers.Embedding(4, 3, mask_zero=True)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    outputs = numpy(model(words))
    expected = np.sum((outputs - 1.0) ** 2 * (words != 0)[..., None]) / (2 * 3)
    apply_policy(model, "mixed_bfloat16")
    loss = model.compute_loss(words, np.ones((2, 4, 2), "float32"), model(words))
    np.testing.assert_allclose(numpy(loss), expected, rtol=1e-2)
    assert real_dtypes(model(words)) == ["float32"]


def test_a_sequential_keeps_its_layers():
    layers = [keras.Input((4,)), keras.layers.Dense(4, name="body"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential(layers)
    head = model.layers[-1]
    apply_policy(model, without_outputs("mixed_bfloat16"))
    assert model.layers[-1] is head and len(model.layers) == 2
    assert [output.dtype for output in model.outputs] == ["float32"] == real_dtypes(model(VECTORS))
    assert model.get_layer(index=-1) is head and head.compute_dtype == "bfloat16"
    assert model.pop() is head
    model.add(keras.layers.Dense(7, name="new"))
    assert [layer.name for layer in model.layers] == ["body", "new"]
    assert model(VECTORS).shape == (5, 7)
    apply_policy(model, without_outputs("mixed_bfloat16"))
    assert real_dtypes(model(VECTORS)) == ["float32"]


def test_a_sequential_of_which_the_last_layer_is_used_twice():
    layer = keras.layers.Dense(4, name="layer")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layer(layer(inputs)))
    expected = numpy(model(VECTORS))
    apply_policy(model, without_outputs("mixed_bfloat16"))
    assert real_dtypes(model(VECTORS)) == ["float32"] and real_dtypes(layer(VECTORS)) == ["bfloat16"]
    np.testing.assert_allclose(numpy(model(VECTORS)), expected, atol=5e-2)
    apply_policy(model, "float32")
    np.testing.assert_array_equal(numpy(model(VECTORS)), expected)


@pytest.mark.parametrize("is_built", [True, False])
def test_subclassed_models(is_built):
    model = subclassed(is_built)
    weights = snapshot(model.variables)
    assert apply_policy(model, "mixed_bfloat16") is model
    assert snapshot(model.variables) == weights
    assert real_dtypes(model.hidden(IMAGES)) == ["bfloat16"]
    # Its first call tells that the head makes what it returns.
    assert real_dtypes(model(IMAGES)) == ["float32"]
    assert (model.hidden.compute_dtype, model.head.compute_dtype) == ("bfloat16", "float32")
    assert all(v.dtype == "float32" for v in model.variables)


def test_a_sequential_that_is_not_built():
    model = apply_policy(keras.Sequential([keras.layers.Dense(3)]), without_outputs("mixed_bfloat16"))
    outputs = model(IMAGES)
    assert model.layers[-1].compute_dtype == "bfloat16"
    # It ends in float32 once there is an end.
    assert real_dtypes(outputs) == ["float32"] == [output.dtype for output in model.outputs]


class Late(keras.Model):
    """Its layers are made when it is built: the norm behind a head that makes no outputs."""

    def build(self, input_shape):
        self.head = keras.layers.Dense(3, name="head")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.head.build(input_shape)
        self.norm.build((*input_shape[:-1], 3))

    def call(self, x):
        return self.norm(self.head(x))


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        pytest.param(["mixed_bfloat16"], ("bfloat16", "float32"), id="one"),
        pytest.param(["mixed_float16", "float32"], ("float32", "float32"), id="the last counts"),
        # Else the build would tell of a rule that matches nothing, and warnings are errors here.
        pytest.param(
            [
                mpkeras.Policy("mixed_float16", keep_float32=("path:no_such_layer",)),
                mpkeras.Policy("mixed_bfloat16", keep_float32=()),
            ],
            ("bfloat16", "bfloat16"),
            id="rules of an earlier one are forgotten",
        ),
    ],
)
def test_layers_that_are_made_when_the_model_is_built_follow_the_last_conversion(policies, expected):
    model = Late()
    for policy in policies:
        apply_policy(model, policy)
    model(IMAGES)
    assert (model.head.compute_dtype, model.norm.compute_dtype) == expected


class MakesALayerInBuild(keras.layers.Layer):
    def build(self, input_shape):
        self.inner = keras.layers.Dense(3, name="inner")
        self.inner.build(input_shape)
        super().build(input_shape)

    def call(self, x):
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize("made_under", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("again", ["mixed_bfloat16", "mixed_float16", "prepare"])
def test_converted_twice_a_model_converts_layers_that_are_made_later(made_under, again):
    with mpkeras.policy_scope(made_under):
        kept = keras.layers.Dense(3, dtype="float32", name="kept")
        model = keras.Sequential([MakesALayerInBuild(), kept, keras.layers.Dense(2, name="last")])
    apply_policy(model, "mixed_bfloat16")
    if again == "prepare":
        model.compile("sgd", "mse")
        mpkeras.prepare(model)
        model.fit(np.ones((2, 4), "float32"), np.ones((2, 2), "float32"), verbose=0)
    else:
        apply_policy(model, again)
        model.build((None, 4))
    dtype = "float16" if again == "mixed_float16" else "bfloat16"
    assert model.layers[-1].compute_dtype == "float32"
    # Among 16-bit layers one in float32 is so on purpose; alone it is so by default.
    expected = dtype if made_under == "float32" else "float32"
    assert (kept.compute_dtype, model.layers[0].inner.compute_dtype) == (expected, expected)


def converted_by(door, model, policy, targets):
    """Gives a compiled `model` a policy through a door."""
    if door == "callback":
        callback = mpkeras.callbacks.MixedPrecision(policy, loss_scale=1.0)
        model.fit(VECTORS, targets, verbose=0, callbacks=[callback])
    else:
        (apply_policy if door == "apply_policy" else mpkeras.prepare)(model, policy)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", ["apply_policy", "prepare", "compile", "callback"])
def test_layers_that_are_added_follow_and_so_does_the_head_before_them(door):
    by_hand, head = keras.layers.Dense(4), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), by_hand, keras.layers.Dense(5), head])
    model.compile("sgd", "mse")
    converted_by("apply_policy" if door == "apply_policy" else "prepare", model, "mixed_bfloat16", None)
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "bfloat16", "float32"]
    by_hand.dtype_policy = "float32"
    model.add(keras.layers.Dense(2))
    model.add(keras.layers.Softmax())
    model.compile("sgd", "mse")  # which prepares a prepared model again
    if door != "compile":
        converted_by(door, model, "mixed_bfloat16", np.ones((5, 2), "float32"))
    # What was there before, and the rules, stay.
    assert [layer.compute_dtype for layer in model.layers] == ["float32", *["bfloat16"] * 2, *["float32"] * 2]
    assert real_dtypes(model(VECTORS)) == ["float32"]


def test_a_float32_layer_that_is_added_to_a_model_made_in_16_bits_stays():
    with mpkeras.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
    apply_policy(model, "mixed_float16")
    model.add(keras.layers.Dense(2, dtype="float32"))
    apply_policy(model, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32"]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("door", ["apply_policy", "prepare", "callback"])
def test_rules_go_with_the_policy_that_has_them(door):
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(3, name=name) for name in "abcd")])
    # What trains small weights, too: of another `apply_policy` says that they are lost.
    model.compile(mpkeras.LossScaleOptimizer("sgd", 1.0), "mse")

    def give(name, *rules):
        converted_by(door, model, mpkeras.Policy(name, keep_float32=rules), np.zeros((5, 3), "float32"))
        return [layer.compute_dtype for layer in model.layers]

    rules = ("path:/a$", "path:/b$")
    assert give("mixed_bfloat16", *rules) == ["float32", "float32", "bfloat16", "bfloat16"]
    model.layers[0].dtype_policy = "float32"  # by the user's hand: it stays, also where the rule still holds
    mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse")  # gives no layer another dtype
    assert give("mixed_bfloat16", *rules) == ["float32", "float32", "bfloat16", "bfloat16"]
    assert give("mixed_bfloat16", "path:/c$") == ["float32", "bfloat16", "float32", "bfloat16"]
    assert give("bfloat16", "path:/d$") == ["float32", "bfloat16", "bfloat16", "float32"]
    assert [layer.variable_dtype for layer in model.layers] == ["float32", "bfloat16", "bfloat16", "float32"]
    assert give("float32") == ["float32"] * 4


@pytest.mark.backends("tensorflow")
def test_what_a_rule_did_stays_where_the_next_door_gives_no_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [keras.layers.Dense(3), keras.layers.Dense(2, name="ruled"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    keras.config.set_dtype_policy("float32")
    model.compile("sgd", "mse")
    with mpkeras.policy_scope(mpkeras.Policy("mixed_bfloat16", keep_float32=("path:/ruled$",))):
        mpkeras.prepare(model)
    for _ in range(2):
        mpkeras.prepare(model)
        # The last layer by a rule of the policy that the model was made with.
        assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32", "float32"]
    mpkeras.prepare(model, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "bfloat16", "float32"]


def given_policy(model):
    return mpkeras.apply_policy(model, "mixed_bfloat16")


@pytest.mark.backends("torch")
@pytest.mark.parametrize("door", [mpkeras.prepare, given_policy])
@pytest.mark.parametrize("is_sequential", [False, True])
def test_the_gradient_of_a_row_is_summed_in_float32_in_a_loaded_model_too(door, is_sequential, tmp_path):
    """`load_model` makes a graph under the global policy: the table was cast, and a sum stood still at 256."""
    inputs, table = keras.Input((900,), dtype="int32"), keras.layers.Embedding(3, 2)
    head = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([inputs, table, head]) if is_sequential else keras.Model(inputs, head(table(inputs)))
    model.compile("sgd", "mse")
    prepared = mpkeras.prepare(model, "mixed_bfloat16")
    prepared.optimizer.build(prepared.trainable_variables)
    prepared.save(tmp_path / "model.keras")
    for each in (prepared, door(keras.saving.load_model(tmp_path / "model.keras"))):
        keras.ops.sum(each(np.full((2, 900), 1), training=True)).backward()
        rows = each.layers[0 if is_sequential else 1].embeddings
        assert numpy(rows.value.grad).tolist() == [[0.0, 0.0], [1800.0, 1800.0], [0.0, 0.0]]


def test_a_class_around_a_graph_keeps_its_class_and_its_train_step():
    model = apply_policy(Backbone(), "mixed_bfloat16")
    assert type(model) is Backbone
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(IMAGES, np.zeros((2, 8, 8, 4), "float32"))
    assert model.steps >= 1


class Tower(keras.Model):
    """The path of its head is "tower/inner/head", the name "head"."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        head = keras.layers.Dense(3, name="head")
        self.inner = keras.Sequential([keras.layers.Dense(4, name="body"), head], name="inner")

    def call(self, x):
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "of_the_head"), [("path:inner/head$", "float32"), ("path:^(head|inner/body)", "bfloat16")]
)
@pytest.mark.parametrize("door", ["apply_policy", "prepare", "callback"])
def test_path_rules_are_matched_when_there_is_a_path(door, rule, of_the_head):
    """The first rule matches the path of the head and not its name, the second one its name and not the path."""
    model = Tower(name="tower")
    model.compile("sgd", "mse")
    with pytest.MonkeyPatch.context() as patch:
        # That a rule matches nothing is told in another test.
        patch.setattr("mpkeras.conversion.converter.unmatched", lambda model, rules, argument: [])
        policy = mpkeras.Policy("mixed_bfloat16", keep_float32=(rule,))
        converted_by(door, model, policy, np.zeros((5, 3), "float32"))
        # The callback is there in `fit` alone, which builds the model.
        model(VECTORS)
        assert [layer.compute_dtype for layer in model.inner.layers] == ["bfloat16", of_the_head]
        model.train_on_batch(VECTORS, np.zeros((5, 3), "float32"))
    assert [layer.compute_dtype for layer in model.inner.layers] == ["bfloat16", of_the_head]


def test_a_rule_that_matches_nothing_is_told_once():
    policy = mpkeras.Policy("mixed_bfloat16", keep_float32=("Softmax", "path:haed", "MaxPool2D"))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")], name="net")
    with pytest.warns(UserWarning) as told:
        apply_policy(model, policy)
        model.compile("sgd", "mse")
        mpkeras.prepare(model, policy)
    messages = sorted(str(warning.message) for warning in told)
    assert len(messages) == 2
    assert "'MaxPool2D', which matches none of model 'net'" in messages[0]
    assert "'path:haed'" in messages[1] and "Did you mean 'path:head'?" in messages[1]
    # To another model it is told again; in float32 no rule has a meaning.
    with pytest.warns(UserWarning, match="haed"):
        apply_policy(keras.Sequential([keras.Input((8, 8, 3)), keras.layers.MaxPooling2D()]), policy)
    apply_policy(sequential(), mpkeras.Policy("float32", keep_float32=("path:haed",)))
    # By the argument that it was given as.
    policy = mpkeras.Policy("mixed_float8", keep_float32=("path:haed",), keep_16_bits=("first", "path:boddy"))
    with pytest.warns(UserWarning) as told:
        apply_policy(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")]), policy)
    of_float32, of_16_bits = [str(warning.message) for warning in told]
    assert "rule of `keep_float32` to match" in of_float32 and "'path:haed'" in of_float32
    assert "rule of `keep_16_bits` to match" in of_16_bits and "'path:boddy'" in of_16_bits


def test_nothing_is_told_of_a_model_before_it_is_built():
    policy = mpkeras.Policy("mixed_bfloat16", keep_float32=("path:tower/inner/haed",))
    model = apply_policy(Tower(name="tower"), policy)
    with pytest.warns(UserWarning, match="Did you mean 'path:.*head'"):
        model(VECTORS)


def test_float16_on_a_compiled_model_without_loss_scaling_is_said():
    """P18: its `fit` would lose small gradients."""
    model = functional()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="scales no loss.*mpkeras.prepare"):
        apply_policy(model, "mixed_float16")
    mpkeras.prepare(model)
    apply_policy(model, "mixed_float16")


def test_of_a_model_that_calculates_in_float32_nothing_of_the_loss_is_said():
    """Its graph is float16, which hands on what the head, the only layer, takes and makes in float32."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_policy(model, "mixed_float16")
    assert model.layers[0].compute_dtype == "float32"


SMALL_STATE = mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")


def subclassed(is_built):
    model = Subclassed()
    if is_built:
        model(IMAGES)
    return model


@pytest.mark.parametrize(
    "make",
    first_quick([sequential, lambda: subclassed(False), lambda: subclassed(True)]),
    ids=["graph", "late", "built"],
)
@pytest.mark.parametrize(
    ("optimizer", "policy", "message"),
    [
        ("adam", "bfloat16", "trainable bfloat16 variables.*Adam: there small updates are lost.*mpkeras.prepare"),
        (keras.optimizers.LossScaleOptimizer, "bfloat16", "bfloat16 variables.*`mpkeras.LossScaleOptimizer`"),
        ("sgd", SMALL_STATE, "optimizer state in bfloat16.*SGD, which keeps it in float32.*mpkeras.prepare"),
    ],
)
def test_p40_small_state_that_the_compiled_optimizer_cannot_train_is_said(make, optimizer, policy, message):
    """Its `fit` would lose small updates, with Adam all of them. What can train it says nothing."""
    model = make()
    model.compile(optimizer if isinstance(optimizer, str) else optimizer(keras.optimizers.SGD()), "mse")
    with pytest.warns(UserWarning, match=message) as told:
        apply_policy(model, policy)
    assert len(told) == 1
    mpkeras.prepare(model)
    apply_policy(model, policy)
    ours = make()
    ours.compile(mpkeras.LossScaleOptimizer("adam"), "mse")
    apply_policy(ours, policy)
    apply_policy(make(), policy)
    frozen = make()
    frozen.trainable = False
    frozen.compile("adam", "mse")
    apply_policy(frozen, "bfloat16")


@pytest.mark.parametrize(("policy", "message"), [("bfloat16", "Adam: there small"), (SMALL_STATE, "Adam, which keeps")])
def test_p40_it_is_said_of_an_optimizer_that_is_compiled_later_too(policy, message):
    model = apply_policy(sequential(), policy)
    for _ in range(2):
        with pytest.warns(UserWarning, match=message) as told:
            model.compile("adam", "mse")
        assert len(told) == 1
    model.compile(mpkeras.LossScaleOptimizer("adam"), "mse")
    # The doors wrap the optimizer that they are given.
    with mpkeras.autoprepare():
        model.compile("adam", "mse")
    model.compile("sgd", "mse")
    mpkeras.make_train_step(apply_policy(sequential(), policy), "adam", "mse")
    model = apply_policy(apply_policy(sequential(), policy), "mixed_bfloat16")
    model.compile("adam", "mse")
    assert "compile" not in vars(model)


@pytest.mark.parametrize(
    ("make", "policy", "error", "message"),
    [
        pytest.param(lambda: keras.layers.Dense(2), "mixed_float16", TypeError, "keras.Model", id="layer"),
        pytest.param(functional, "mixed_float7", ValueError, "mixed_float7", id="unknown policy"),
        pytest.param(functional, "float16", ValueError, "policy 'float16'.*mixed_float16", id="float16 variables"),
        pytest.param(
            lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float16")]),
            "mixed_float16",
            ValueError,
            "float16 variables.*float32_variables=True",
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


@keras.saving.register_keras_serializable(package="tests")
class Only(keras.layers.Layer):
    """Its arithmetic knows one dtype."""

    def __init__(self, known="float32", **kwargs):
        super().__init__(**kwargs)
        self.known = known

    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) != self.known:
            raise TypeError(f"only {self.known}")
        return x + x


def refusing(known="float32"):
    inputs = keras.Input((4,), name="x")
    x = keras.layers.Dense(8, activation="relu", name="body", activity_regularizer="l2")(inputs)
    x = keras.layers.Dense(700, activation="sigmoid" if known == "float32" else "relu", name="gate")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(Only(known, name="refusing")(x)), name="net")


def picture(model):
    """Everything that a conversion may change of a model: attributes, policies, symbolic dtypes."""
    layers = [(layer, [tensor.dtype for tensor in keras.tree.flatten(layer.output)]) for layer in model.layers]
    return [(layer.name, layer.dtype_policy, sorted(vars(layer)), dtypes) for layer, dtypes in layers] + [
        [tensor.dtype for tensor in model.outputs],
        model.output_names,
        sorted(vars(model)),
    ]


@pytest.mark.parametrize("door", ["apply_policy", "prepare", "callback"])
def test_after_an_error_the_model_is_as_it_was(door):
    model = refusing()
    model.compile("sgd", "mse")
    before, expected, optimizer = picture(model), numpy(model(VECTORS)), model.optimizer
    with pytest.raises(TypeError, match="only float32"):
        converted_by(door, model, "bfloat16", np.ones((5, 2), "float32"))
    # Of the model itself, `fit` keeps what it was called with.
    assert picture(model)[:-1] == before[:-1] and (door == "callback" or picture(model)[-1] == before[-1])
    assert {variable.dtype for variable in model.variables} == {"float32"} and model.optimizer is optimizer
    np.testing.assert_array_equal(numpy(model(VECTORS)), expected)


def test_after_an_error_a_converted_model_is_as_it_was():
    model = apply_policy(refusing(), mpkeras.Policy("mixed_bfloat16", keep_float32=("Only", "activation:sigmoid")))
    before, expected = picture(model), numpy(model(VECTORS))
    with pytest.raises(TypeError, match="only float32"):
        # In float16 now, and without the rule that the layer needs: the float32 layers of a 16-bit model stay.
        model.get_layer("refusing").dtype_policy = "mixed_float16"
        apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=("activation:sigmoid",)))
    model.get_layer("refusing").dtype_policy = "float32"
    assert picture(model) == before
    np.testing.assert_array_equal(numpy(model(VECTORS)), expected)


def test_after_an_error_layers_made_under_a_policy_have_no_covers():
    with mpkeras.policy_scope("mixed_float16"):
        model = refusing("float16")
    before = picture(model)
    with pytest.raises(TypeError, match="only float16"):
        apply_policy(model, mpkeras.Policy("mixed_bfloat16", keep_float32=()))
    assert picture(model) == before


def test_what_is_put_back_leaves_alone_what_was_quantized_since():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Activation("relu")])
    put_back = recorded(model)
    model.layers[0].quantize("int8")
    model.layers[1].dtype_policy = "mixed_bfloat16"
    policy, expected = model.layers[0].dtype_policy, numpy(model.layers[0](VECTORS))
    put_back()
    assert (model.layers[0].dtype_policy, model.layers[1].compute_dtype) == (policy, "float32")
    np.testing.assert_array_equal(numpy(model.layers[0](VECTORS)), expected)


class SeesDtype(keras.layers.Layer):
    """Notes what it is run with, where a function is compiled only when that happens."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        self.seen.append(keras.backend.standardize_dtype(x.dtype))
        return x


@pytest.mark.parametrize("function", first_quick(["predict", "evaluate", "fit"]))
def test_what_keras_has_compiled_before_is_compiled_anew(function):
    layer = SeesDtype()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), layer, keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    arguments = (VECTORS,) if function == "predict" else (VECTORS, np.ones((len(VECTORS), 3), "float32"))
    getattr(model, function)(*arguments, verbose=0)
    model = apply_policy(model, "mixed_bfloat16")
    layer.seen.clear()
    getattr(model, function)(*arguments, verbose=0)
    assert set(layer.seen) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    "name",
    [
        "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "InceptionResNetV2", "MobileNetV2", "MobileNetV3Small",
        "NASNetMobile", "ResNet50V2", "VGG16", "Xception",
    ],
)  # fmt: skip
def test_applications(name):
    size = 75 if name in ("InceptionResNetV2", "Xception") else 32
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    weights, config = snapshot(model.variables), model.get_config()
    x = rng.uniform(0, 255, size=(2, size, size, 3)).astype("float32")
    expected = numpy(model(x))
    apply_policy(model, "mixed_bfloat16")
    assert_symbolic_dtypes_are_the_real_ones(model, x)
    assert snapshot(model.variables) == weights
    # probabilities of ten classes
    np.testing.assert_allclose(numpy(model(x)), expected, atol=5e-2)
    apply_policy(model, "float32")
    assert model.get_config() == config


@pytest.mark.backends("torch")
@pytest.mark.parametrize("policy", POLICIES)
def test_torch_modules_follow(policy):
    """P25: stock Keras hands 16-bit inputs to float32 weights, and torch raises."""
    import torch

    torch.manual_seed(0)
    module = keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 3))
    model = keras.Sequential([keras.Input((4,)), module, keras.layers.Dense(2)])
    expected = numpy(model(VECTORS))
    apply_policy(model, policy)
    assert real_dtypes(module(VECTORS)) == [policy.removeprefix("mixed_")]
    np.testing.assert_allclose(numpy(model(VECTORS)), expected, atol=5e-2)
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
    losses = [float(step(VECTORS, np.ones((5, 2), "float32"))["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    apply_policy(model, "float32")
    assert real_dtypes(module(VECTORS)) == ["float32"]
    # One that was made under a policy follows once it is prepared.
    with mpkeras.policy_scope(policy):
        made = keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 3), output_shape=(None, 3))
        model = keras.Sequential([keras.Input((4,)), made])
    model.compile("sgd", "mse")
    mpkeras.prepare(model)
    assert np.isfinite(float(model.train_on_batch(VECTORS, np.ones((5, 3), "float32"))))


def pure(dtype):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    first = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*first, keras.layers.Dense(2, activation="softmax")])
    keras.config.set_dtype_policy("float32")
    return model


@pytest.mark.slow
def test_p26_float16_variables_become_float32_on_request(tmp_path, backend):
    model = pure("float16")
    before = [numpy(v.value) for v in model.variables]
    with pytest.raises(ValueError, match="float32_variables=True"):
        apply_policy(model, "mixed_float16")
    assert {v.dtype for v in model.variables} == {"float16"}
    if backend == "torch":
        # Keras makes the list that torch is given when it is first asked for.
        assert {keras.backend.standardize_dtype(parameter.dtype) for parameter in model.parameters()} == {"float16"}
    apply_policy(model, "mixed_float16", float32_variables=True)
    assert {v.dtype for v in model.variables} == {"float32"}
    for variable, value in zip(model.variables, before, strict=True):
        assert keras.backend.standardize_dtype(variable.value.dtype) == "float32"
        np.testing.assert_array_equal(numpy(variable.value), value)
    assert model.layers[0].dtype_policy == keras.DTypePolicy("mixed_float16")
    if backend == "torch":
        # What a torch optimizer and `DistributedDataParallel` would be given.
        of_model = {id(variable.value) for variable in model.variables}
        assert {id(parameter) for parameter in model.parameters()} == of_model
    x = np.ones((2, 4), "float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert {v.dtype for v in loaded.variables} == {"float32"}
    np.testing.assert_array_equal(numpy(apply_policy(loaded, "mixed_float16")(x)), numpy(model(x)))
    if backend == "tensorflow":
        model.export(tmp_path / "exported", verbose=False)
    # Updates of 1e-4 on weights near 1 are lost in 16 bits, which Adam takes a hundred times.
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    mpkeras.prepare(model, "mixed_float16")
    gamma = model.layers[1].gamma
    model.fit(np.eye(4, dtype="float32"), np.array([0, 1, 0, 1]), epochs=20, verbose=0)
    # Exactly representable numbers have few digits: a weight that moved by updates of its own has more.
    assert np.all(numpy(gamma) != 1) and np.max(np.abs(numpy(gamma) - 1)) < 2.5e-3
    zeros = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    model.optimizer.scale_loss(0.0)
    model.optimizer.apply(zeros, model.trainable_variables)
    assert all(np.isfinite(numpy(v)).all() for v in model.variables)


def test_p26_what_cannot_be_widened_is_refused_and_stays():
    model = pure("float16")
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"Call `model.compile` with a new one"):
        apply_policy(model, "mixed_float16", float32_variables=True)
    with pytest.raises(TypeError, match="`float32_variables` to be True or False"):
        apply_policy(model, "mixed_float16", float32_variables="yes")
    with pytest.raises(ValueError, match="policy 'float16'|float16 variables"):
        apply_policy(model, "float16", float32_variables=True)
    assert {v.dtype for v in model.variables} == {"float16"}


def test_p26_an_optimizer_that_is_not_built_is_no_obstacle():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="bfloat16")])
    model.compile("sgd", "mse")
    apply_policy(model, "mixed_bfloat16", float32_variables=True)
    assert {variable.dtype for variable in model.variables} == {"float32"}


@pytest.mark.slow
def test_p29_lora_weights_are_float32_and_move():
    model = sequential()
    apply_policy(model, "mixed_bfloat16")
    dense = model.layers[-1]
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


def test_the_slots_of_a_compiled_model_follow_its_weights_at_once():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="body"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    mpkeras.prepare(model, "float32")
    model.optimizer.build(model.trainable_variables)
    apply_policy(model, "bfloat16")
    slots = {v.path.split("/")[-1]: v.dtype for v in model.optimizer.variables if v.path.endswith("_momentum")}
    assert {dtype for name, dtype in slots.items() if "body" in name} == {"bfloat16"}
    # The head stays in float32.
    assert sorted(slots.values()) == ["bfloat16"] * 2 + ["float32"] * 2


def test_a_file_of_an_output_with_a_mask_holds_no_cast_that_would_lose_it():
    tokens = keras.Input((5,), dtype="int32")
    outputs = keras.layers.Dense(3)(keras.layers.Embedding(7, 4, mask_zero=True)(tokens))
    model = apply_policy(keras.Model(tokens, outputs), without_outputs("mixed_bfloat16"))
    assert real_dtypes(model(np.ones((2, 5)))) == ["float32"]
    assert [layer["class_name"] for layer in model.get_config()["layers"]] == ["InputLayer", "Embedding", "Dense"]


class CountsAndScales(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        self.count.assign_add(1.0)
        return (1.0 + 2.0**-12) * self.factor * x


def test_a_head_that_writes_state_is_not_rounded_for_the_model_that_runs_it():
    """Elsewhere such a layer returns what the 16-bit `call` around it takes."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.head = keras.layers.Dense(4), CountsAndScales()

        def call(self, x):
            return self.head(self.body(x))

    model = Counting()
    model(VECTORS)
    apply_policy(model, "mixed_bfloat16")
    for _ in range(2):
        outputs = model(VECTORS)
        assert real_dtypes(outputs) == ["float32"]
        values = keras.ops.convert_to_numpy(outputs)
        # Of bfloat16 numbers, times one that has 13 bits.
        in_bfloat16 = keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.cast(values, "bfloat16"), "float32"))
        assert np.any(values) and not np.any((values == in_bfloat16) & (values != 0))


def test_a_graph_whose_layers_stay_as_they_are_is_not_traced_again():
    traced = []

    class Counting(keras.layers.Dense):
        def compute_output_spec(self, inputs):
            traced.append(self.name)
            return super().compute_output_spec(inputs)

    model = keras.Sequential([keras.Input((3,)), Counting(4), keras.layers.Dense(2)])
    apply_policy(model, "mixed_bfloat16")
    traced.clear()
    for _ in range(3):
        apply_policy(model, "mixed_bfloat16")
    assert not traced


@pytest.mark.backends("tensorflow", "torch")  # JAX has no float64 unless `jax_enable_x64` is set
def test_double_precision_and_the_way_back():
    keras.utils.set_random_seed(5)
    parts = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *parts])
    before = model.get_weights()
    # An `Input` stays as it is, in float32.
    x = np.random.default_rng(6).normal(size=(5, 3)).astype("float32")
    (kernel, bias, gamma, beta, mean, variance, head, head_bias) = (np.asarray(w, "float64") for w in before)
    hidden = np.tanh(x @ kernel + bias)
    expected = ((hidden - mean) / np.sqrt(variance + 1e-3) * gamma + beta) @ head + head_bias
    for policy in ("float64", "mixed_bfloat16", "float64"):
        mpkeras.apply_policy(model, policy)
    assert {layer.compute_dtype for layer in model.layers} == {w.dtype for w in model.weights} == {"float64"}
    # On torch a `Dense` of plain Keras in float64 is off by 5e-8.
    accuracy = 1e-6 if keras.backend.backend() == "torch" else 1e-13
    np.testing.assert_allclose(numpy(model(x)), expected, rtol=accuracy)
    mpkeras.apply_policy(model, "float32")
    assert {layer.compute_dtype for layer in model.layers} == {w.dtype for w in model.weights} == {"float32"}
    for array, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(array, old)
    # Among others a layer in float64 is there on purpose.
    own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2, dtype="float64")])
    mpkeras.apply_policy(own, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in own.layers] == ["bfloat16", "float64"]


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("door", ["prepare", "apply_policy"])
def test_a_second_model_on_an_input_that_was_converted_with_another_is_converted_too(door):
    inputs = keras.Input((6,))

    def model(units):
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(units, "relu")(inputs)))
        model.compile("sgd", "mse")
        return model

    def converted(model):
        return getattr(mpkeras, door)(model, "mixed_bfloat16")

    dtypes = [[layer.compute_dtype for layer in converted(model(units)).layers[1:]] for units in (3, 5)]
    assert dtypes == [["bfloat16", "float32"]] * 2


def test_a_policy_map_of_the_users_and_other_models_with_it_stay_as_they_are():
    policy_map = keras.dtype_policies.DTypePolicyMap("mixed_float16", {"last": keras.DTypePolicy("float32")})

    def model():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(4, name="body", dtype=policy_map)(inputs)
        return keras.Model(inputs, keras.layers.Dense(2, name="last", dtype=policy_map)(x))

    converted, other = model(), model()
    for policy, expected in (("mixed_bfloat16", "bfloat16"), ("float32", "float32"), ("mixed_float16", "float16")):
        mpkeras.apply_policy(converted, policy)
        assert [converted.get_layer(name).compute_dtype for name in ("body", "last")] == [expected, "float32"]
        assert [other.get_layer(name).compute_dtype for name in ("body", "last")] == ["float16", "float32"]
        assert {path: entry.name for path, entry in policy_map.items()} == {"last": "float32"}
        loaded = keras.Model.from_config(converted.get_config())
        assert loaded.get_layer("body").compute_dtype == expected
