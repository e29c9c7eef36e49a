"""Layers of the user's own whose outputs 16 bits lose are named at the first batch, and no others."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.training.lost_outputs import LostOutputs, lost_outputs
from tests.cases import first_quick
from tests.sixteen_bits import Weighted
from tests.training.models import BACKEND, DOORS, AddsNoise, made_by, warned_of

POLICIES = ["mixed_float16", "mixed_bfloat16"]
RANDOM = np.random.default_rng(5)
# Degrees of latitude and longitude of places a few hundred metres apart.
PLACES = (np.array([[48.2081, 48.2119, 16.3713, 16.3655]]) + RANDOM.uniform(0, 0.01, (6, 4))).astype("float32")


class Counts(Weighted):
    """Counts the positions of a sequence in what it computes in."""

    def call(self, x):
        positions = ops.cast(ops.arange(ops.shape(x)[1]), self.compute_dtype)
        return x + ops.sin(0.7 * positions)[None, :, None]


class Turns(Weighted):
    """How far two places are apart, times the number of calls."""

    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1)
        return (x[:, 0::2] - x[:, 1::2]) * ops.cast(self.calls, x.dtype)


class Keeps(Weighted):
    """Keeps what it counts at its first call."""

    table = None

    def call(self, x):
        if self.table is None:
            self.table = ops.cast(ops.arange(x.shape[1]), self.compute_dtype)
        return x + ops.sin(0.7 * self.table)[None, :, None]


class Apart(Weighted):
    """How far two places are apart."""

    def call(self, x):
        return x[:, 0::2] - x[:, 1::2]


class Divergence(Weighted):
    """Hands on what it is given, and adds how far a narrow normal distribution is from the standard one."""

    def call(self, x):
        mean, log_variance = x[:, 0::2], x[:, 1::2]
        self.add_loss(-0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return x


def waves(times):
    return ops.sin(1300.0 * times)


class Block(layers.Layer):
    """A block with dropout around another layer of the user's."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.norm, self.dense = inner, layers.LayerNormalization(), layers.Dense(8, "relu")
        self.dropout = layers.Dropout(0.4)

    def call(self, x):
        return self.dropout(self.dense(self.norm(self.inner(x))))


class Cell(layers.SimpleRNNCell):
    """A cell of the user's, which takes small differences of large numbers, and adds up large angles of them."""

    def call(self, x, states, training=False):
        output = ops.sin(1300.0 * (x - 100.0)) + states[0]
        return output, [output]


class InPart(keras.Model):
    """A model of the user's as part of another one."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return self.inner(x)


class OfSix(keras.Model):
    """Takes batches of six rows alone."""

    def __init__(self):
        super().__init__()
        self.apart, self.head = Apart(name="apart"), layers.Dense(1)

    def call(self, x):
        return self.head(self.apart(ops.reshape(x, (6, 4))))


class Noisy(layers.Layer):
    """Draws in inference, too."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + keras.random.uniform(ops.shape(x), dtype=x.dtype, seed=self.seed_generator)


class Fails(Weighted):
    """Fails in inference."""

    def call(self, x, training=None):
        if training is False:
            raise NotImplementedError("inference")
        return x * 2.0


class Asks(layers.Layer):
    """Tries a layer inside on symbols before it runs it, as mpkeras tries a layer that may mix dtypes."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner
        self.built = True

    def call(self, x):
        self.inner.compute_output_spec(x)
        return self.inner(x)


class Energy(Weighted):
    """Weighs rows by their squares, which float16 cannot hold."""

    def call(self, x):
        energy = ops.sum(ops.square(150.0 * x), axis=-1, keepdims=True)
        return x * energy / (1.0 + energy)


class Odds(Weighted):
    """A softmax by hand: in float16 exponentials of 12 are inf, and inf over inf is NaN."""

    def call(self, x):
        exponentials = ops.exp(12.0 * ops.abs(x) + 1.0)
        return exponentials / ops.sum(exponentials, axis=-1, keepdims=True)


class Hides(Weighted):
    """What is added to logits that a softmax is not to see."""

    def call(self, x):
        return ops.cast(ops.where(x > 0, 0.0, -1e9), x.dtype)


def functional(layer, shape):
    inputs = keras.Input(shape)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layer(inputs))))


said_by = functools.partial(warned_of, "The outputs of layer")


def found_in(model, policy, x) -> list:
    return lost_outputs(mpkeras.apply_policy(model, policy), x)


@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS, "make_train_step"])
def test_a_layer_is_named_once_through_every_door(door):
    def make():
        return functional(Apart(name="apart"), (4,))

    y = np.ones((6, 1), "float32")

    def train():
        if door == "make_train_step":
            step = mpkeras.make_train_step(mpkeras.apply_policy(make(), "mixed_bfloat16"), "sgd", "mse")
            step(PLACES, y)
            step(PLACES, y)
            return
        model, callbacks = made_by(door, make, "mixed_bfloat16")
        for _ in range(2):
            model.fit(PLACES, y, epochs=2, verbose=0, callbacks=callbacks)

    (message,) = said_by(train)
    # Places that bfloat16 holds are a quarter of a degree apart: all differences are 0.
    assert message.startswith("The outputs of layer 'apart' in bfloat16 are off by 100% from those in float32")
    assert message.endswith("with `keep_float32=(..., 'path:^apart$')`.")


def test_an_evaluation_names_it_where_nothing_was_trained():
    model = functional(Apart(name="apart"), (4,))
    model.compile("sgd", "mse", run_eagerly=True)
    mpkeras.prepare(model, "mixed_bfloat16")
    y = np.ones((6, 1), "float32")
    (message,) = said_by(lambda: [model.evaluate(PLACES, y, verbose=0) for _ in range(2)])
    assert "layer 'apart' in bfloat16 are off by 100%" in message


@pytest.mark.parametrize("is_built", first_quick([True, False]))
def test_so_does_a_prediction(is_built):
    model = functional(Apart(name="apart"), (4,)) if is_built else keras.Sequential([Apart(name="apart")])
    model.compile("sgd", "mse", run_eagerly=is_built)
    mpkeras.prepare(model, mpkeras.Policy("mixed_bfloat16", keep_float32=[]))
    given = []
    (message,) = said_by(lambda: given.extend(model.predict(PLACES, verbose=0) for _ in range(2)))
    assert "apart' in bfloat16 are off by 100%" in message
    np.testing.assert_array_equal(given[0], given[1])


CASES = {
    "counted positions": (lambda: Counts(name="own"), (400, 2), RANDOM.normal(size=(3, 400, 2)), "bfloat16", "own"),
    "small differences": (lambda: Apart(name="own"), (4,), PLACES, "float16", "own"),
    "with a count of its calls": (lambda: Turns(name="own"), (4,), PLACES, "bfloat16", "own"),
    "in a block": (lambda: Block(Apart(name="in")), (4,), PLACES, "bfloat16", "in"),
    "tried on symbols": (lambda: Asks(Apart(name="in")), (4,), PLACES, "bfloat16", "in"),
    "in a loop": (
        lambda: layers.RNN(Cell(2), name="own"), (3, 2), RANDOM.uniform(100, 101, (4, 3, 2)), "bfloat16", "own"
    ),
    "an activation": (
        lambda: InPart(layers.Activation(waves, name="own")), (3,), RANDOM.uniform(size=(5, 3)), "float16", "own"
    ),
    "the activation of a product": (
        lambda: layers.Dense(6, activation=waves, name="own"), (3,), RANDOM.uniform(size=(5, 3)), "float16", "own"
    ),
    "the activation of a cell": (
        lambda: layers.SimpleRNN(4, waves, name="own"), (3, 2), RANDOM.uniform(size=(5, 3, 2)), "float16", "own"
    ),
    "a model in a model": (lambda: InPart(Apart(name="own")), (4,), PLACES, "bfloat16", "own"),
}  # fmt: skip


@pytest.mark.parametrize("case", first_quick(CASES))
def test_what_16_bits_lose(case):
    make, shape, x, dtype, path = CASES[case]
    (found,) = found_in(functional(make(), shape), f"mixed_{dtype}", x.astype("float32"))
    assert found.layer.split("/")[-1] == path
    assert found.dtype == dtype and found.error > 0.1


def test_a_model_that_takes_no_other_number_of_rows():
    model = OfSix()
    model(PLACES)
    (found,) = found_in(model, "mixed_bfloat16", PLACES)
    assert found.layer.endswith("/apart")
    inputs = keras.Input((4,), batch_size=6)
    (found,) = found_in(keras.Model(inputs, layers.Dense(1)(Apart(name="in")(inputs))), "mixed_float16", PLACES)
    assert found.layer == "in"


def test_in_a_block_that_runs_often_the_inner_layer_is_named_once_with_its_worst_share():
    """A near pair of places is lost, and an eighth of those that are 0.6 degrees apart."""
    block, inputs = Block(Apart(name="in")), keras.Input((4,))
    far = layers.Rescaling(1.0, [0.0, 0.6, 0.0, 0.6])(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.add([block(places) for places in (far, inputs, far)])))
    (found,) = found_in(model, "mixed_bfloat16", PLACES)
    assert found.layer.endswith("/in") and found.error > 0.9


@pytest.mark.parametrize("policy", first_quick(POLICIES))
def test_the_share_is_that_of_hand(policy):
    """Of the layer's output in float64, and what one rounding of each place makes of it, in 16 rows of the batch."""
    dtype = policy.removeprefix("mixed_")
    rows = PLACES[:16]
    (found,) = found_in(functional(Apart(name="own"), (4,)), policy, rows)
    rounded = rows.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else "float16").astype("float64")
    true, given = (a[:, 0::2] - a[:, 1::2] for a in (rows.astype("float64"), rounded))
    assert found.error == pytest.approx(np.linalg.norm(given - true) / np.linalg.norm(true), rel=0.01)


def test_of_a_large_batch_rows_are_looked_at_from_all_over_it():
    """The first rows lie at 0, where bfloat16 tells them apart."""
    places = np.concatenate([PLACES - PLACES.mean(0), *[PLACES] * 7])
    (found,) = found_in(functional(Apart(name="own"), (4,)), "mixed_bfloat16", places)
    assert found.error > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_remedy_that_is_named_computes_what_float32_computes(policy):
    keras.utils.set_random_seed(2)
    model = functional(Apart(name="apart"), (4,))
    true = np.asarray(ops.convert_to_numpy(Apart()(PLACES)))
    (found,) = found_in(model, policy, PLACES)
    rule = found.sentences()[1].rsplit("'")[1]
    mpkeras.apply_policy(model, mpkeras.Policy(policy, keep_float32=(*mpkeras.policies.default_rules(), rule)))
    outputs = keras.Model(model.inputs, model.get_layer("apart").output)([PLACES])
    assert np.array_equal(ops.convert_to_numpy(outputs), true)
    assert lost_outputs(model, PLACES) == []


HEALTHY = {
    "short sequences": (lambda: Counts(), (200, 2), RANDOM.normal(size=(3, 200, 2))),
    "differences of what is apart": (lambda: Apart(), (4,), RANDOM.normal(size=(3, 4))),
    "a block": (lambda: Block(layers.Dense(6)), (7, 3), RANDOM.normal(size=(3, 7, 3))),
    "random numbers": (lambda: Noisy(), (4,), RANDOM.normal(size=(3, 4))),
    "zeros": (lambda: Apart(), (4,), np.zeros((3, 4))),
    "no inference": (lambda: Fails(), (4,), RANDOM.normal(size=(3, 4))),
    "an activation of a product": (
        lambda: layers.Dense(6, lambda x: ops.maximum(x, 0.1 * x)),
        (4,),
        RANDOM.normal(size=(3, 4)),
    ),
    "layers of Keras": (lambda: layers.Normalization(mean=48.2, variance=0.01), (4,), PLACES),
    "hidden by -inf": (lambda: Hides(), (4,), RANDOM.normal(size=(3, 4))),
}


@pytest.mark.parametrize("policy", first_quick(POLICIES))
@pytest.mark.parametrize("case", first_quick(HEALTHY))
def test_healthy_layers_are_not_named(case, policy):
    make, shape, x = HEALTHY[case]
    assert found_in(functional(make(), shape), policy, x.astype("float32")) == []


@pytest.mark.parametrize("kind", first_quick([Energy, Odds]))
def test_a_layer_whose_outputs_float16_cannot_hold_is_named(kind):
    x = np.array([[0.9, -1.1, 1.2], [1.3, 0.8, -1.0]], "float32")
    (found,) = found_in(functional(kind(name="own"), (3,)), "mixed_float16", x)
    assert (found.layer, found.error) == ("own", np.inf)
    assert "are inf or NaN, and finite in float32 on the same inputs: float16 ends at 65504" in found.sentences()[0]
    assert found_in(functional(kind(), (3,)), "mixed_bfloat16", x) == []


def test_all_layers_whose_outputs_float16_cannot_hold_are_named_at_once():
    inputs = keras.Input((3,))
    first, second = Odds(name="first")(Energy(name="energy")(inputs)), Energy(name="second")(inputs)
    outputs = layers.Dense(1)(Odds(name="third")(5.0 * first + second))
    x = np.array([[0.7, -1.2, 1.1], [1.4, 0.9, -0.8]], "float32")
    found = found_in(keras.Model(inputs, outputs), "mixed_float16", x)
    assert {(lost.layer, lost.error) for lost in found} == {
        (name, np.inf) for name in ("energy", "first", "second", "third")
    }


def test_a_rule_for_all_is_named_where_more_are_lost_than_are_named():
    def make(**options):
        body = [Energy(), Energy(), Energy(), Odds(), layers.Activation(waves, name="sines")]
        model = keras.Sequential([keras.Input((3,)), *body, layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return mpkeras.prepare(model, mpkeras.Policy("mixed_float16", **options))

    x = np.array([[0.8, -1.2, 1.3], [1.1, 0.9, -1.4]], "float32")
    (message,) = said_by(lambda: make().evaluate(x, np.ones((2, 1)), verbose=0))
    rules = (..., "Energy", "Odds", "path:^sines$")
    remedy = ", ".join(map(repr, rules[1:]))
    assert message.endswith(f" So it is with 2 more layers: `keep_float32=(..., {remedy})` keeps them all.")
    assert said_by(lambda: make(keep_float32=rules).evaluate(x, np.ones((2, 1)), verbose=0)) == []


@pytest.mark.parametrize(("size", "is_lost"), first_quick([(0.02, True), (1.5, False)]))
def test_what_a_layer_adds_to_the_loss_is_compared_too(size, is_lost):
    x = (size * np.random.default_rng(11).normal(size=(5, 8))).astype("float32")
    model = functional(Divergence(name="divergence"), (8,))
    rounded, right = (float(mean_divergence(x.astype(dtype), dtype)) for dtype in (ml_dtypes.bfloat16, np.float64))
    assert (abs(rounded / right - 1) > 0.1) == is_lost
    found = found_in(model, "mixed_bfloat16", x)
    assert [(lost.layer, lost.are_losses) for lost in found] == ([("divergence", True)] if is_lost else [])
    if is_lost:
        assert found[0].error == pytest.approx(abs(rounded / right - 1), rel=0.2)  # Sums of 20 are rounded otherwise.
        assert found[0].sentences()[0].startswith("The losses that are added by layer 'divergence' in bfloat16 are off")


def mean_divergence(x, dtype):
    mean, log_variance = x[:, 0::2], x[:, 1::2]
    return -0.5 * np.mean(
        dtype(1) + log_variance - np.square(mean) - np.exp(log_variance).astype(dtype), dtype="float32"
    )


def test_a_trace_of_numbers_leaves_a_trial_on_symbols_alone():
    model = mpkeras.apply_policy(functional(Asks(Apart()), (4,)), "mixed_bfloat16")
    assert mpkeras.trace_numerics(model, RANDOM.normal(size=(3, 4)).astype("float32")).culprit is None


def trained(make, x, shape, monkeypatch=None):
    keras.utils.set_random_seed(7)
    model = functional(make(), shape)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    if monkeypatch is not None:
        monkeypatch.setattr("mpkeras.training.first_batch.warn_of_lost_outputs", lambda model, x: None)
    model.fit(x, np.ones((len(x), 1), "float32"), epochs=2, batch_size=2, shuffle=False, verbose=0)
    return [*model.get_weights(), keras.random.uniform((3,))]


@pytest.mark.slow
def test_nothing_shows_of_the_look(monkeypatch):
    """Nor of the random numbers that layers draw, with generators of their own and with the global one."""
    x = RANDOM.normal(size=(4, 7, 3)).astype("float32")

    def make():
        # JAX takes no numbers without a seed.
        noise = Noisy() if BACKEND == "jax" else AddsNoise()
        return Block(keras.Sequential([layers.BatchNormalization(), noise, Noisy(), Block(layers.Dense(6))]))

    with_look = trained(make, x, (7, 3))
    without = trained(make, x, (7, 3), monkeypatch)
    assert all(
        np.array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))
        for a, b in zip(with_look, without, strict=True)
    )


def test_what_a_call_keeps_is_not_kept_by_the_look():
    """Of float32, which the layer would go on with in 16 bits."""
    keeps = Keeps(name="keeps")
    model = keras.Sequential([keras.Input((400, 2)), keeps, layers.GlobalAveragePooling1D(), layers.Dense(1)])
    # What a symbolic call has kept is of no use.
    keeps.table = None
    mpkeras.apply_policy(model, "mixed_bfloat16")
    keeps.table = None
    (found,) = lost_outputs(model, RANDOM.normal(size=(3, 400, 2)).astype("float32"))
    assert found.layer.endswith("/keeps") and found.error > 0.1
    assert keeps.table is None


class Squashed(layers.Layer):
    """A dense layer inside a layer of the user's."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units)

    def call(self, x):
        return ops.tanh(self.dense(x))


class TwoParts(keras.Model):
    def __init__(self, head, **kwargs):
        super().__init__(**kwargs)
        self.body, self.head = Squashed(12), head

    def call(self, x):
        return self.head(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("make_head", first_quick([lambda: layers.Dense(3), lambda: Squashed(3)]), ids=["stock", "own"])
@pytest.mark.parametrize("door", first_quick(DOORS))
def test_what_makes_the_outputs_of_a_model_that_has_run_before_is_in_float32_after_the_look(door, make_head):
    """Which layers these are its next call finds out, and that is the look's."""
    x = RANDOM.normal(size=(5, 7)).astype("float32")

    def make():
        model = TwoParts(make_head())
        model(x)
        return model

    model, callbacks = made_by(door, make, "mixed_float16", run_eagerly=door == "prepare")
    model.fit(x, x[:, :3], verbose=0, callbacks=callbacks)
    made_last = getattr(model.head, "dense", model.head)
    assert (model.body.dense.compute_dtype, made_last.compute_dtype) == ("float16", "float32")
    outputs = np.asarray(ops.convert_to_numpy(model(x)))
    assert np.any(outputs != outputs.astype("float16"))


@pytest.mark.slow
def test_each_layer_is_compared_once_for_rows_of_one_shape(monkeypatch):
    looks = []
    monkeypatch.setattr("mpkeras.training.lost_outputs.lost_outputs", lambda model, x: looks.append(len(x)) or [])
    model = keras.Sequential([keras.Input((None, 2)), Counts(), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    for rows, length in ((2, 5), (4, 5), (3, 8), (2, 8)):
        model.fit(np.ones((rows, length, 2), "float32"), np.ones((rows, 1), "float32"), verbose=0)
    assert looks == [2, 3]


def test_sentences():
    what, remedy = LostOutputs("body/own", "float16", 0.256).sentences()
    assert what.startswith("The outputs of layer 'body/own' in float16 are off by 26% from those in float32 on the ")
    assert remedy == "Keep the layer in float32 with `keep_float32=(..., 'path:^body/own$')`."
