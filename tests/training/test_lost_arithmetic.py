"""What 16 bits lose between the layers of a model, in its own `call` or in its graph, is named at the first batch."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.training.lost_outputs import lost_outputs
from tests.cases import first_quick
from tests.step_modes import snapshot
from tests.training.models import made_by, warned_of

RANDOM = np.random.default_rng(8)
X = RANDOM.normal(size=(20, 5)).astype("float32")
Y = np.ones((20, 1), "float32")


class Around(keras.Model):
    """A layer, arithmetic of its author's, another layer."""

    def __init__(self, before=None, **options):
        super().__init__(**options)
        self.before = layers.Dense(6, name="before") if before is None else before
        self.after = layers.Dense(1, name="after")

    def call(self, x):
        return self.after(self.between(self.before(x)))


class FarFromZero(Around):
    """Differences of what is near 700: whole numbers apart in bfloat16, and halves in float16."""

    def between(self, h):
        return (h + 700.0) - ops.mean(h + 700.0, axis=-1, keepdims=True)


class WithCast(FarFromZero):
    def between(self, h):
        return super().between(ops.cast(h, "float32"))


class InAnIsland(FarFromZero):
    @mpkeras.float32_island
    def between(self, h):
        return super().between(h)


class Squares(Around):
    """Sums of squares near 200: beyond float16, and well within bfloat16."""

    def between(self, h):
        return ops.sqrt(ops.sum(ops.square(h + 200.0), axis=-1, keepdims=True)) / 500.0


class Ordinary(Around):
    """Gates, a softmax and means, of which 16 bits lose no more than by rounding."""

    def between(self, h):
        h = h * ops.sigmoid(h) + ops.softmax(h)
        return h - ops.mean(h, axis=-1, keepdims=True)


class InPlace(Around):
    """On torch it writes into what it is given, and into what a layer has returned."""

    def call(self, x):
        x /= 4.0
        return super().call(x)

    def between(self, h):
        h *= 0.5
        return h


class Draws(Around):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def between(self, h):
        return h + 3.0 * keras.random.normal(ops.shape(h), seed=self.seed, dtype=h.dtype)


class Turns(Around):
    """Computes with the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def between(self, h):
        self.calls.assign_add(1)
        return h * ops.cast(self.calls, h.dtype)


class Returns(FarFromZero):
    def call(self, x):
        return {"score": self.after(self.before(x)), "spread": self.between(self.before(x))}


class Adds(FarFromZero):
    def call(self, x):
        h = self.before(x)
        self.add_loss(ops.mean(ops.square(self.between(h))))
        return self.after(h)


def graph(cast, units=1):
    inputs = keras.Input((5,))
    h = layers.Dense(400, name="before")(inputs)
    ones = ops.ones_like(cast(h))
    return keras.Model(
        inputs, layers.Dense(units, name="after")(ops.sin(0.3 * ops.cumsum(ones, axis=-1))), name="graph"
    )


def residual():
    inputs = keras.Input((5,))
    h = layers.Dense(5)(inputs)
    for _ in range(3):
        h = h + layers.Dense(5)(h)
    return keras.Model(inputs, layers.Dense(1)(h))


said_by = functools.partial(warned_of, "from those in float32")


def built(make, policy):
    keras.utils.set_random_seed(3)
    model = make()
    model(ops.convert_to_tensor(X))
    random = np.random.default_rng(2)
    model.set_weights([random.normal(0, 0.3, weight.shape) for weight in model.get_weights()])
    return mpkeras.apply_policy(model, policy)


@pytest.mark.slow
def test_it_is_named_once():
    """Through every door, as a layer is: `test_lost_outputs.py` has them all."""
    model, _ = made_by("prepare", FarFromZero, "mixed_bfloat16")
    (message,) = said_by(lambda: [model.fit(X, Y, verbose=0) for _ in range(2)])
    assert message.startswith("Between its layers model 'far_from_zero") and "/after'; they are off by" in message
    assert "in its own `call`, in bfloat16, numbers that it gives to layer 'far_from_zero" in message
    assert message.endswith("'float32')`, or compute them in a method under `@mpkeras.float32_island`.")


@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
def test_how_far_it_is_off_is_that_of_a_computation_by_hand(policy):
    model = built(FarFromZero, policy)
    (lost,) = lost_outputs(model, X[:16])
    h = np.asarray(ops.convert_to_numpy(ops.cast(model.before(ops.convert_to_tensor(X[:16])), "float32")))
    spacing = 4.0 if policy == "mixed_bfloat16" else 0.5  # Of numbers from 512 to 1024.
    rounded = np.round((h + 700) / spacing) * spacing
    mean = np.round(rounded.mean(-1, keepdims=True) / spacing) * spacing
    expected = h - h.mean(-1, keepdims=True)
    error = np.linalg.norm(rounded - mean - expected) / np.linalg.norm(expected)
    assert error > 0.1 and lost.error == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize("make", first_quick([WithCast, InAnIsland]))
def test_the_remedies_that_are_named_compute_what_float32_computes(make):
    model = built(make, "mixed_bfloat16")
    assert lost_outputs(model, X) == []
    exact = built(make, "float32")
    np.testing.assert_allclose(
        *(ops.convert_to_numpy(ops.stop_gradient(of(X))) for of in (model, exact)),
        atol=0.02,  # Of sums of 6 products of about 0.2, a hundredth of each.
    )


def test_operations_of_a_graph_are_named_with_the_layer_that_is_given_them():
    model = built(lambda: graph(lambda h: h), "mixed_bfloat16")
    (lost,) = lost_outputs(model, X)
    # On JAX sums of ones stand still at 256, elsewhere each is rounded by itself.
    assert (lost.layer, lost.purpose) == ("graph", "gives to layer 'after'") and lost.error > 0.2
    what, remedy = lost.sentences()
    assert "computes by operations in its graph, in bfloat16," in what
    assert remedy == "Cast what they are computed from with `keras.ops.cast(..., 'float32')`."
    assert lost_outputs(built(lambda: graph(lambda h: ops.cast(h, "float32")), "mixed_bfloat16"), X) == []
    # A model inside of another one is named alone: the other hands on what it is given.
    outer = keras.Sequential([layers.Dense(5), graph(lambda h: h), layers.Dense(1)])
    (inside,) = lost_outputs(built(lambda: outer, "mixed_bfloat16"), X)
    assert (inside.layer, inside.purpose) == ("graph", "gives to layer 'after'")
    assert inside.error == pytest.approx(lost.error, rel=0.01)


def test_a_model_around_and_one_inside_are_both_named():
    found = lost_outputs(built(lambda: FarFromZero(graph(lambda h: h, units=4), name="around"), "mixed_bfloat16"), X)
    purposes = ["gives to layer 'around/after'", "gives to layer 'after'"]
    assert [(lost.layer, lost.purpose) for lost in found] == list(zip(["around", "graph"], purposes, strict=True))


def test_each_call_of_a_shared_model_is_compared():
    given = keras.Input((4,))
    h = layers.Dense(4, kernel_initializer="identity")(given)
    shared = keras.Model(given, (h + 1.0) - 1.0, name="shared")
    inputs = keras.Input((5,))
    large, small = (layers.Dense(4, kernel_initializer=keras.initializers.Constant(n))(inputs) for n in (9.0, 0.002))
    outputs = layers.Dense(1)(layers.concatenate([shared(large), shared(small)]))
    model = mpkeras.apply_policy(keras.Model(inputs, outputs), "mixed_bfloat16")
    (lost,) = lost_outputs(model, X)
    assert (lost.layer, lost.purpose) == ("shared", "returns") and lost.error < 2.0
    of_large = mpkeras.apply_policy(keras.Model(inputs, layers.Dense(1)(shared(large))), "mixed_bfloat16")
    assert lost_outputs(of_large, X) == []


@pytest.mark.parametrize(("policy", "is_lost"), first_quick([("mixed_float16", True), ("mixed_bfloat16", False)]))
def test_what_is_beyond_float16_is_named(policy, is_lost):
    found = lost_outputs(built(Squares, policy), X)
    assert [lost.error for lost in found] == [np.inf] * is_lost


@pytest.mark.parametrize(
    ("make", "purpose"), first_quick([(Returns, "returns"), (Adds, "adds to the losses")]), ids=["returned", "added"]
)
def test_so_is_what_is_returned_or_added_to_the_losses(make, purpose):
    found = lost_outputs(built(make, mpkeras.Policy("mixed_bfloat16", keep_float32=[])), X)
    assert [lost.purpose for lost in found] == [purpose]


@pytest.mark.parametrize("make", first_quick([Ordinary, InPlace, Draws, Turns, residual]))
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
def test_rounding_and_drawn_numbers_are_not_named(make, policy):
    assert lost_outputs(built(make, policy), X) == []


def test_nothing_shows_afterwards():
    """Neither in weights nor in random generators: `test_lost_outputs.py` trains with and without a look."""
    model = built(Draws, "mixed_bfloat16")
    state, attributes = snapshot(model.variables), set(vars(model))
    assert len(state) == 5
    assert lost_outputs(model, X) == []
    assert snapshot(model.variables) == state and set(vars(model)) == attributes


class Table(layers.Layer):
    """Rows of a table by number."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(1500, 2), name="rows")

    def call(self, x):
        return ops.sum(ops.take(self.rows, ops.cast(x, "int32"), axis=0), axis=1)


class WithUnusedLayer(FarFromZero):
    """Its table is given whole numbers; a layer of it is reached by no call."""

    def __init__(self):
        super().__init__(Table())
        self.unused = layers.Dense(2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called")
def test_a_layer_that_no_call_reaches_hides_nothing():
    model = WithUnusedLayer()
    model.compile("sgd", "mse", run_eagerly=True)
    mpkeras.prepare(model, "mixed_bfloat16")
    numbers = np.array([[3.0, 1031.0], [5.0, 519.0]], "float32")
    messages = warned_of("", lambda: model.fit(numbers, Y[:2], verbose=0))
    assert any("whole numbers" in message and "519 becomes 520" in message for message in messages)
    assert any(message.startswith("Between its layers model 'with_unused_layer") for message in messages)
    assert not model.unused.built
