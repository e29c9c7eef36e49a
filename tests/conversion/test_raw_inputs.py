"""A model of the user's own that computes with its inputs is given them as Keras gives them; others as they are."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.training.whole_numbers import rounded_whole_numbers
from tests.cases import first_quick
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


class Correcting:
    """A forecast is the last value and a small change, which an output in float32 keeps."""

    def __init__(self):
        super().__init__()
        self.change = layers.Dense(1, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(0.25))

    def call(self, x):
        return x[:, :1] + self.change(x[:, 1:])


class Corrected(Correcting, keras.Model):
    pass


class Change(Correcting, layers.Layer):
    pass


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


def numbers(model, row=(1000.5, 1.0, 2.0)):
    """Returns what a model returns for one row, as lists."""
    outputs = model(np.array([row], "float32"))
    return keras.tree.map_structure(lambda output: ops.convert_to_numpy(output).tolist(), outputs)


def test_inputs_that_meet_a_float32_output_stay_as_they_are():
    """bfloat16 has 7 bits behind the first: 1000.5 is 1000 there, and 1000.75 is no number of it."""
    assert numbers(mpkeras.apply_policy(Corrected(), "mixed_bfloat16")) == [[1000.75]]


class ChangeWithMore(Change):
    """Holds a layer that it never runs."""

    def __init__(self):
        super().__init__()
        self.unused = layers.Dense(2)


class DeepChange(ChangeWithMore):
    """Runs two layers; together they have nine weights."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(2)

    def call(self, x):
        return x[:, :1] + self.change(self.hidden(x[:, 1:]))


class ChangeBeside(Change):
    """Returns what it computes of its inputs alone, too."""

    def call(self, x):
        return super().call(x), x[:, :1] - 1000.0


class HandedOn(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


class ModelAround(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def graph_of_one(layer):
    return keras.Sequential([keras.Input((3,)), layer])


@pytest.mark.parametrize(
    "make",
    first_quick(
        [
            pytest.param(lambda: graph_of_one(Change()), id="in a graph"),
            pytest.param(lambda: ModelAround(Change()), id="in a model of the user's"),
            pytest.param(lambda: graph_of_one(ChangeWithMore()), id="beside a layer that never runs"),
            pytest.param(lambda: graph_of_one(HandedOn(Change())), id="in another layer of a graph"),
            pytest.param(lambda: ModelAround(HandedOn(Change())), id="in another layer"),
        ]
    ),
)
@pytest.mark.filterwarnings("ignore:.*unbuilt state")
@pytest.mark.parametrize("is_built_in_16_bits", first_quick([False, True]))
def test_inputs_of_which_a_layer_makes_an_output_stay_as_they_are(is_built_in_16_bits, make):
    with mpkeras.policy_scope("mixed_bfloat16" if is_built_in_16_bits else "float32"):
        model = make()
        model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    assert numbers(model) == [[1000.75]]


@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
@pytest.mark.parametrize("depth", first_quick([1, 2]))
@pytest.mark.parametrize("around", first_quick([graph_of_one, ModelAround]))
def test_a_layer_around_nothing_but_the_head_is_given_the_data_as_it_is(around, depth, policy):
    """float16 holds every other number from 2048 on, and bfloat16 every sixteenth."""
    layer = layers.Dense(1, kernel_initializer="ones", use_bias=False)
    for _ in range(depth):
        layer = HandedOn(layer)
    model = around(layer)
    mpkeras.apply_policy(model, policy)
    assert numbers(model, (4099.0, -4097.0, 0.5)) == [[2.5]]


@pytest.mark.filterwarnings("ignore:.*unbuilt state")
def test_a_large_layer_that_makes_an_output_of_its_inputs_runs(monkeypatch):
    """In 16 bits, but for its last layer: TensorFlow refuses to add float32 to 16-bit inputs."""
    monkeypatch.setattr("mpkeras.policies.heads._LARGE", 9)
    model = graph_of_one(DeepChange())
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert numbers(model) == [[1000.75]]
    (layer,) = model.layers
    assert [part.compute_dtype for part in (layer, layer.hidden, layer.change)] == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize("around", [graph_of_one, ModelAround])
def test_outputs_of_the_inputs_alone_are_not_rounded_in_a_layer_that_makes_others(around):
    assert list(numbers(mpkeras.apply_policy(around(ChangeBeside()), "mixed_bfloat16"))) == [[[1000.75]], [[0.5]]]


class TokenAndPosition(layers.Layer):
    """As in the guides of Keras: codes go to a table inside, and `keras.Input((6,))` makes them float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(9000, 4), layers.Embedding(6, 4)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def build(self, shape):
        self.tokens.build(shape)
        self.positions.build(shape)

    def call(self, codes):
        return self.tokens(codes) * self.scale + self.positions(ops.arange(ops.shape(codes)[-1]))


class Twice(layers.Layer):
    """Hands codes to a layer of its user's, and a context in 16 bits beside them to another one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedded, self.dense = TokenAndPosition(), layers.Dense(4)

    def call(self, codes, context=None):
        return self.embedded(codes[:, :6]) + self.dense(codes[:, :4] if context is None else context)[:, None]


class Steps(layers.Layer):
    """Of steps that are 0.5 apart beside 1000, those of 1000.5 are masked."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.masking, self.sum = layers.Masking(1000.5), layers.LSTM(4)

    def call(self, x):
        return self.sum(self.masking(x))


class Centered(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.center, self.dense = layers.Normalization(mean=70001.0, variance=0.25), layers.Dense(4)
        # In a graph of a call for shapes Keras would keep a mean of that graph.
        self.center.build((None, 3))

    def call(self, x):
        return self.dense(self.center(x))


class Table(layers.Layer):
    """Looks rows up in a table of its own."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(9000, 3), initializer="uniform", name="rows")

    def call(self, codes):
        return ops.take(self.rows, ops.cast(codes, "int32"), axis=0)


class Embedded(layers.Layer):
    """Embeds noise levels, as diffusion models do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)

    def build(self, shape):
        self.dense.build((None, 2 * shape[-1]))

    def call(self, x):
        return self.dense(ops.concatenate([ops.sin(600.0 * x), ops.cos(600.0 * x)], axis=-1))


class Above(layers.Layer):
    """Makes a mask of numbers that 16 bits do not tell apart, and computes with them in 16 bits."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.scale = self.add_weight(shape=(1,), initializer=keras.initializers.Constant(1e-3), name="scale")

    def compute_mask(self, x, mask=None):
        return keras.ops.any(x > 1000.25, axis=-1)

    def call(self, x):
        return x * self.scale


class Around(keras.Model):
    def __init__(self, parts):
        super().__init__()
        self.parts, self.last = parts, layers.Dense(2)

    def build(self, shape):
        self.call(keras.KerasTensor(shape))

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return self.last(x)


def in_graph(parts, shape):
    x = inputs = keras.Input(shape[1:])
    for part in parts:
        x = part(x)
    return keras.Model(inputs, layers.Dense(2)(x))


STRUCTURES = {
    "graph": in_graph,
    "moved": lambda parts, shape: in_graph([layers.Reshape(shape[1:]), *parts], shape),
    "Sequential": lambda parts, shape: keras.Sequential([*parts, layers.Dense(2)]),
    "subclassed": lambda parts, shape: Around(parts),
    "a model inside": lambda parts, shape: in_graph([Around(parts)], shape),
}
CODES = np.random.default_rng(3).integers(4000, 9000, (8, 6)).astype("float32")
LEVELS = 1000 + 0.25 * np.random.default_rng(4).integers(0, 4, (16, 5, 1)).astype("float32")
LEVELS[:, -1] = 1000.5
NEAR = (70001 + 0.5 * np.random.default_rng(5).normal(size=(8, 3))).astype("float32")
READING = {
    "codes": (lambda: [TokenAndPosition(name="own"), layers.Flatten()], CODES),
    "codes, deeper": (lambda: [Twice(name="own"), layers.Flatten()], CODES),
    "mask": (lambda: [Steps(name="own")], LEVELS),
    "mask of its own": (lambda: [Above(name="own"), layers.LSTM(4)], LEVELS),
    "normalization": (lambda: [Centered(name="own")], NEAR),
}


IN_GRAPHS = {
    "rows of its own": (lambda: [Table(name="own"), layers.Flatten()], CODES),
    "noise levels": (lambda: [Embedded(name="own")], np.linspace(0.05, 0.95, 12, dtype="float32").reshape(6, 2)),
}
CASES = [
    *((kind, "graph", "the line", "mixed_bfloat16") for kind in IN_GRAPHS),
    *((kind, "moved", "prepare", "mixed_float16") for kind in IN_GRAPHS),
    *((kind, "graph", "the line", "mixed_bfloat16") for kind in READING),
    *((kind, "subclassed", "prepare", "mixed_bfloat16") for kind in READING),
    ("codes, deeper", "moved", "prepare", "mixed_float16"),
    ("mask of its own", "moved", "the line", "mixed_bfloat16"),
    ("codes, deeper", "Sequential", "the line", "mixed_float16"),
    ("codes", "a model inside", "prepare", "mixed_bfloat16"),
    ("mask of its own", "a model inside", "the line", "mixed_bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "structure", "door", "policy"), CASES)
def test_a_layer_of_the_users_own_hands_on_what_it_is_given(kind, structure, door, policy):
    make, x = (READING | IN_GRAPHS)[kind]

    def made():
        keras.utils.set_random_seed(5)
        model = STRUCTURES[structure](make(), x.shape)
        model.build(x.shape)
        model.compile("sgd", "mse")
        return model

    exact = made()
    expected = exact.predict(x, verbose=0)
    if door == "prepare":
        model = mpkeras.prepare(made(), policy)
    else:
        with mpkeras.policy_scope(policy):
            model = made()
    model.set_weights(exact.get_weights())
    own = next(layer for layer in model._flatten_layers() if layer.name == "own")
    assert own.compute_dtype == policy.removeprefix("mixed_")
    off = np.abs(model.predict(x, verbose=0) - expected).max()
    # A wrong row would be off by as much as the outputs are large. Two layers, one in the other, round twice: by 0.0203
    # on a CPU without units for bfloat16.
    assert off <= (0.03 if kind == "codes, deeper" else 0.02) * np.abs(expected).max()
    assert rounded_whole_numbers(model, x) == []


class Shifted(layers.Layer):
    """Its numbers go to the table, and into a sum."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(9000, 1)
        self.given = []

    def call(self, codes):
        self.given.append(keras.backend.standardize_dtype(codes.dtype))
        return self.table(codes)[..., 0] + codes * 1e-4


def test_one_that_computes_with_what_it_is_given_stays_in_16_bits_and_is_named():
    own = Shifted(name="own")
    inputs = keras.Input((6,))
    model = mpkeras.apply_policy(keras.Model(inputs, layers.Dense(2)(own(inputs))), "mixed_bfloat16")
    model(CODES)
    own.given.clear()
    model(CODES)
    assert own.given == ["bfloat16"]
    (found,) = rounded_whole_numbers(model, CODES)
    assert (found.layer, found.reader) == ("own", "own")
    # So it is for the next policy, and in float32 again nothing of all that is left.
    mpkeras.apply_policy(model, "mixed_float16")
    model(CODES)
    assert own.given[-1] == "float16"
    mpkeras.apply_policy(model, "float32")
    assert own.autocast and "call" not in vars(own)
