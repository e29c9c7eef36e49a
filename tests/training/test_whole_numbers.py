"""Ids, codes and positions in float data arrive whole, or the layer that rounds them is named at the first batch."""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.callbacks import MixedPrecision, NumericsMonitor
from mpkeras.training.first_batch import is_looked_at
from mpkeras.training.whole_numbers import Rounded, rounded_whole_numbers
from tests.cases import first_quick
from tests.sixteen_bits import Weighted
from tests.training.models import DOORS, made_by, warned_of

POLICIES = ["mixed_float16", "mixed_bfloat16"]
# 4097 lies between two numbers of both 16-bit dtypes.
CODES = np.array([[4097.0, 7.0, 258.0], [4093.0, 3001.0, 4999.0]], "float32")


class Rows(layers.Layer):
    """A user's layer that looks rows up, and computes with what it is given, too."""

    def __init__(self, size=6000, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def build(self, shape):
        self.table = self.add_weight(shape=(self.size, 2), initializer="uniform", name="table")

    def call(self, codes):
        return ops.add(ops.take(self.table, ops.cast(codes, "int32"), axis=0), ops.multiply(codes, 0.0)[..., None])


class Wave(Weighted):
    """A user's layer to which numbers are positions."""

    def call(self, steps):
        return ops.sin(steps * 0.1)


@keras.saving.register_keras_serializable("tests")
class Adding(layers.SimpleRNNCell):
    """A user's cell, which adds up what it is given."""

    def call(self, x, states, training=False):
        return x + states[0], [x + states[0]]


class Calling(keras.Model):
    """Hands what it is called with to `reading`, which `take` takes it from."""

    def __init__(self, reading, take=lambda x: x, before=None):
        super().__init__()
        self.before, self.reading, self.head = before, reading, layers.Dense(1)
        self.take = take

    def call(self, x):
        x = self.take(x)
        x = x if self.before is None else self.before(x)
        x = self.head(self.reading(x))
        return ops.sum(ops.cast(x, "float32"), axis=tuple(range(1, len(x.shape))))


def around(layer):
    inputs = keras.Input((3,))
    return keras.Model(inputs, layer(inputs))


def functional(reading, shape=(3,), before=None):
    inputs = keras.Input(shape)
    x = reading(inputs if before is None else before(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


said_by = functools.partial(warned_of, "whole numbers")


def prepared(model, policy):
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return mpkeras.prepare(model, policy, loss_scale=1.0)


def fit(model, policy, x=CODES):
    return said_by(lambda: prepared(model, policy).fit(x, np.ones(2, "float32"), shuffle=False, verbose=0))


def train_twice(door, make, policy):
    """Takes two steps on the same batch through a door, and returns the model."""
    y = np.ones((2, 1), "float32")
    if door == "make_train_step":
        model = mpkeras.apply_policy(make(), policy)
        step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    else:
        model, callbacks = made_by("prepare" if door == "train_on_batch" else door, make, policy)
        step = model.train_on_batch
    if door in DOORS:
        callbacks += [NumericsMonitor()] * len(callbacks)
        model.fit(CODES, y, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model
    step(CODES, y)
    step(CODES, y)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("door", [*DOORS, "train_on_batch", "make_train_step"])
def test_a_layer_of_the_users_own_is_named_once_through_every_door(door, policy):
    models = []
    (message,) = said_by(lambda: models.append(train_twice(door, lambda: functional(Rows(name="rows")), policy)))
    assert message.startswith("Layer 'rows' is given whole numbers that ") and "4097 becomes 4096" in message
    assert "'path:^rows$'" in message and policy.removeprefix("mixed_") in message
    # A rotary table that makes floats of its positions rounds integers, too.
    assert message.endswith("where no `call` casts them itself.")
    if models[0].compiled:
        assert said_by(lambda: models[0].evaluate(CODES, np.ones((2, 1)), verbose=0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_remedy_that_is_named_trains_the_rows_of_float32(policy):
    def moved(keep=None):
        keras.utils.set_random_seed(1)
        model = functional(Rows(name="rows"), before=layers.Reshape((3,), name="shape"))
        if keep is None:
            model.compile(keras.optimizers.SGD(0.01), "mse")
        else:
            base = mpkeras.Policy(policy)
            prepared(model, mpkeras.Policy(policy, keep_float32=(*base.keep_float32, keep)))
        rows = model.get_layer("rows")
        before = rows.get_weights()[0]
        said = said_by(lambda: model.fit(CODES, np.ones(2), verbose=0))
        return np.nonzero((rows.get_weights()[0] != before).any(axis=1))[0].tolist(), said

    # What only moves the codes stays in float32 with the layer that reads them.
    assert moved("path:^rows$") == moved() == ([7, 258, 3001, 4093, 4097, 4999], [])


def embedding(before):
    return Calling(layers.Embedding(6000, 2, name="table"), before=before)


# What makes a model, its data, the layer that rounds, and the one that reads.
READINGS = {
    "subclassed": (lambda: Calling(Rows(name="rows")), CODES, "rows", "rows"),
    "nested": (
        lambda: Calling(Wave(name="wave"), take=lambda x: x["a"][1][:, :1]),
        {"a": [CODES * 0.1, CODES]},
        "wave",
        "wave",
    ),
    "whole to float": (lambda: functional(Wave(name="wave")), CODES.astype("int64"), "wave", "wave"),
    "Lambda": (lambda: Calling(layers.Lambda(lambda x: x / 10, name="tenth")), CODES, "tenth", "tenth"),
    "Activation": (lambda: Calling(layers.Activation(lambda x: x / 30, name="part")), CODES, "part", "part"),
    "behind one that moves it": (
        lambda: Calling(Wave(name="wave"), before=layers.Reshape((3,), name="shape")),
        CODES,
        "shape",
        "wave",
    ),
    "on the way to an Embedding": (lambda: embedding(layers.Reshape((3,), name="shape")), CODES, "shape", "table"),
    "behind a ReLU": (lambda: embedding(layers.ReLU(name="positive")), CODES, "positive", "table"),
    "behind an activation": (
        lambda: Calling(Wave(name="wave"), before=layers.Activation("relu", name="positive")),
        CODES,
        "positive",
        "wave",
    ),
    "behind a Dropout": (lambda: embedding(layers.Dropout(0.2, name="thin")), CODES, "thin", "table"),
    "a row of it": (
        lambda: functional(Wave(name="wave"), (2, 3)), np.stack([CODES, CODES * 0.3], axis=1), "wave", "wave"
    ),
    "in a model in TimeDistributed": (
        lambda: Calling(layers.TimeDistributed(around(Wave()), name="spread")), CODES[:, None], "spread", "spread"
    ),
    "a cell in Bidirectional": (
        lambda: functional(layers.Bidirectional(layers.RNN(Adding(3)), name="both"), (1, 3)),
        CODES[:, None],
        "both",
        "both",
    ),
    "a table": (
        lambda: functional(Wave(name="wave"), (4,)), np.concatenate([CODES, [[0.5], [0.7]]], axis=1), "wave", "wave"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", first_quick(READINGS))
def test_who_rounds_and_who_reads(case):
    make, x, layer, reader = READINGS[case]
    model = make()
    model(keras.tree.map_structure(ops.convert_to_tensor, x) if isinstance(x, dict) else x)
    mpkeras.apply_policy(model, "mixed_bfloat16")
    weights = model.get_weights()
    (found,) = rounded_whole_numbers(model, x)
    assert (found.layer.split("/")[-1], found.reader.split("/")[-1]) == (layer, reader)
    assert (found.dtype, found.before, found.after) == ("bfloat16", 4097.0, 4096.0)
    assert all(np.array_equal(*pair) for pair in zip(weights, model.get_weights(), strict=True))
    assert {type(part.dtype_policy) for part in model.layers} == {keras.DTypePolicy}
    assert not any(entry.kind == "observed" for part in model.layers for entry in replaced_attributes(part))


@pytest.mark.slow
def test_what_float16_makes_infinite_and_what_a_model_reads_that_its_first_step_builds_is_named():
    (message,) = fit(functional(Wave(name="wave")), "mixed_float16", CODES * 100)
    assert "409700 becomes inf" in message
    (message,) = fit(Calling(Rows(name="rows")), "mixed_bfloat16")
    assert "/rows' is given whole numbers" in message and "4097 becomes 4096" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "code", "text"),
    [("mixed_bfloat16", 257.0, "257 becomes 256"), ("mixed_float16", 2049.0, "2049 becomes 2048")],
)
def test_the_first_number_that_a_dtype_has_not_is_named(policy, code, text):
    """8 and 11 significant bits, the leading one included: 256 and 2048 are the last below which none is missing."""
    codes = np.array([[code, 7.0, 3.0], [2.0, 5.0, 1.0]], "float32")
    (message,) = fit(functional(Rows(name="rows")), policy, codes)
    assert text in message
    codes[0, 0] = code - 1
    assert fit(functional(Rows(name="rows")), policy, codes) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_built"),
    [("dict", True), ("array", True), ("float64", True), ("table", True), ("array", False)],
)
def test_in_data_in_memory_a_number_of_a_later_batch_is_named(kind, is_built):
    """The data is sorted, and not shuffled: the first batches hold small numbers."""
    x = np.arange(18.0, dtype="float64" if kind == "float64" else "float32").reshape(6, 3)
    x[4, 1] = 2051
    take = (lambda x: x["codes"]) if kind == "dict" else (lambda x: x)
    model = Calling(Rows(name="rows"), take)
    x = {"codes": x, "others": x[:, :1]} if kind == "dict" else x
    if kind == "table":
        x = pytest.importorskip("pandas").DataFrame(x)
    first = keras.tree.map_structure(lambda rows: np.asarray(rows)[:2].astype("float32"), x)
    if is_built:
        model(keras.tree.map_structure(ops.convert_to_tensor, first))
    prepared(model, "mixed_float16")

    def run():
        model.fit(x, np.ones(6, "float32"), batch_size=2, shuffle=False, verbose=0)

    (message,) = said_by(run)
    assert "/rows' is given whole numbers" in message and "2051 becomes 2052" in message
    assert said_by(run) == []


def test_an_evaluation_of_larger_numbers_is_named():
    model = prepared(functional(Rows(name="rows")), "mixed_bfloat16")
    x, y = np.arange(27.0, dtype="float32").reshape(9, 3), np.ones(9, "float32")
    model.compile(model.optimizer, "mse", run_eagerly=True)
    assert said_by(lambda: model.evaluate(x, y, batch_size=3, verbose=0)) == []
    x[7, 0] = 301
    (message,) = said_by(lambda: model.evaluate(x, y, batch_size=3, verbose=0))
    assert "Layer 'rows' is given whole numbers" in message and "301 becomes 300" in message


def test_what_is_predicted_is_looked_at_in_the_first_call_and_in_the_second_fourth_and_so_on():
    model = prepared(functional(Rows(name="rows")), "mixed_bfloat16")
    model.compile(model.optimizer, "mse", run_eagerly=True)
    small = np.arange(27.0, dtype="float32").reshape(9, 3)
    large = np.where(small == 23, 517, small).astype("float32")

    def predict(x):
        return said_by(lambda: model.predict(x, batch_size=3, verbose=0))

    assert [predict(x) for x in (small, small, large)] == [[], [], []]
    (message,) = predict(large)
    assert "Layer 'rows' is given whole numbers" in message and "517 becomes 516" in message
    assert predict(large) == []


def test_audit_and_trace_numerics_name_it():
    model = functional(Wave(name="wave"))
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    (finding,) = (f for f in mpkeras.audit(model, CODES).findings if "whole numbers" in f.what)
    assert (finding.severity, finding.layer) == ("warning", "wave") and "4097 becomes 4096" in finding.what
    assert not any("whole numbers" in f.what for f in mpkeras.audit(model).findings)
    report = mpkeras.trace_numerics(model, CODES, np.ones(2))
    assert "4097 becomes 4096" in str(report) and report.rules == ("path:^wave$",)
    assert report.to_dict()["rounded"][0]["before"] == 4097.0
    mpkeras.prepare(model, report.policy())
    assert mpkeras.trace_numerics(model, CODES, np.ones(2)).rounded == []


PIXELS = np.arange(768, dtype="float32").reshape(2, 16, 8, 3) % 256
PRICES = np.array([[81234.0, 2051.0, 1999.0], [9.0, 4097.0, 12345.0]], "float32")


HEALTHY = {
    "pixels": (lambda: functional(Wave(), (16, 8, 3)), PIXELS),
    "one-hot": (lambda: functional(Wave()), np.eye(3, dtype="float32")[:2]),
    "what a Dense weighs": (lambda: functional(layers.Dense(2)), PRICES),
    "through one that moves it": (lambda: functional(layers.Dense(2), before=layers.Reshape((3,))), PRICES),
    "what a Conv1D weighs": (lambda: functional(layers.Conv1D(2, 2), (3, 1)), PRICES[..., None]),
    "not whole": (lambda: functional(Wave()), PRICES + 0.25),
    "weighed in TimeDistributed": (
        lambda: functional(layers.TimeDistributed(keras.Sequential([layers.Dense(3), Wave()])), (1, 3)),
        PRICES[:, None],
    ),
    "weighed by a GRU": (lambda: functional(layers.Bidirectional(layers.GRU(2)), (1, 3)), PRICES[:, None]),
    "so large that all are whole": (lambda: functional(Wave()), PRICES * 2.0**24),
    "a float32 layer": (lambda: functional(layers.Rescaling(1e-4)), PRICES),
    "made small before": (lambda: functional(Wave(), before=layers.Rescaling(1e-4)), PRICES),
    "an Embedding": (lambda: functional(layers.Embedding(90000, 2)), PRICES),
    "integers": (lambda: Calling(Rows(90000)), PRICES.astype("int32")),
    "a layer that casts nothing": (lambda: functional(Wave(autocast=False)), PRICES),
    "not a number": (lambda: functional(Wave()), np.full((2, 3), np.nan, "float32")),
}


@pytest.mark.parametrize("policy", first_quick(POLICIES))
@pytest.mark.parametrize("case", first_quick(HEALTHY))
def test_healthy_data_is_not_named(case, policy):
    make, x = HEALTHY[case]
    model = make()
    model(x)
    mpkeras.apply_policy(model, policy)
    assert rounded_whole_numbers(model, x) == []


@contextlib.contextmanager
def without_a_look():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("guard", "watch"):
            patch.setattr(f"mpkeras.training.{module}.looking_at_batch", lambda _, function, *args: function)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "dataset"])
def test_batches_of_any_kind_are_looked_at_and_all_of_them_trained_on(kind):
    """The first batch is read before the step, and handed on."""
    x = np.concatenate([CODES, CODES + 1, CODES[:1]])
    y = np.arange(5, dtype="float32")

    def batches():
        for start in range(0, 5, 2):
            yield x[start : start + 2], y[start : start + 2]

    def data():
        if kind == "generator":
            return batches()
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)

    def trained(model):
        said = said_by(lambda: model.fit(data(), shuffle=False, verbose=0))
        return model.get_weights(), int(model.optimizer.iterations), said

    keras.utils.set_random_seed(3)
    with_a_look = trained(prepared(functional(Rows(name="rows")), "mixed_bfloat16"))
    keras.utils.set_random_seed(3)
    model = prepared(functional(Rows(name="rows")), "mixed_bfloat16")
    with without_a_look():
        without = trained(model)
    assert with_a_look[1] == without[1] == 3
    assert all(np.array_equal(*pair) for pair in zip(with_a_look[0], without[0], strict=True))
    assert len(with_a_look[2]) == 1 and without[2] == []


@pytest.mark.parametrize("door", first_quick(["train_on_batch", "fit", "callback", "make_train_step"]))
def test_numbers_that_grow_from_batch_to_batch_are_named(door):
    # bfloat16 holds all days to 256, and so the first two batches.
    days = np.arange(41.0, 841.0, 20.0, dtype="float32").reshape(10, 4, 1)
    y = np.ones((4, 1), "float32")
    model = functional(Wave(name="wave"), shape=(1,))
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=door == "train_on_batch")
    if door == "callback":
        said = said_by(
            lambda: model.fit(((x, y) for x in days), verbose=0, callbacks=[MixedPrecision("mixed_bfloat16")])
        )
    elif door == "make_train_step":
        step = mpkeras.make_train_step(mpkeras.apply_policy(model, "mixed_bfloat16"), "sgd", "mse")
        said = said_by(lambda: [step(x, y) for x in days])
    else:
        mpkeras.prepare(model, "mixed_bfloat16")
        train = model.fit if door == "fit" else lambda data, verbose: [model.train_on_batch(*batch) for batch in data]
        said = said_by(lambda: train(((x, y) for x in days), verbose=0))
    (message,) = said
    assert "Layer 'wave' is given whole numbers that bfloat16 cannot hold" in message and "281 becomes 280" in message


class Scheduled(layers.Layer):
    """Holds the position of a schedule, which somebody else writes, and leaves it to others to read it."""

    def __init__(self, begin=258.0, **options):
        super().__init__(name="annealed")
        self.position = self.add_weight(initializer=keras.initializers.Constant(begin), trainable=False, **options)


class Annealed(Scheduled):
    def call(self, x):
        return x * ops.cast(self.position, x.dtype)


class Plain(Scheduled):
    def call(self, x):
        return x


class Counting(keras.callbacks.Callback):
    """Counts in a variable of a layer."""

    def on_train_batch_begin(self, batch, logs=None):
        position = self.model.get_layer("annealed").position
        position.assign(position + 1)


@pytest.mark.slow
def test_a_counter_that_a_callback_writes_is_named_with_its_layer():
    # 258 and 260 are numbers of bfloat16, and 259 is none.
    model = functional(Annealed(), shape=(1,))
    data = np.ones((4, 1), "float32")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, data, batch_size=1, epochs=2, verbose=0, callbacks=[Counting()])
    (message,) = [str(warning.message) for warning in caught if "reads its variable" in str(warning.message)]
    assert message.startswith("Layer 'annealed' reads its variable 'position' in bfloat16, which cannot hold the whole")
    assert "259 becomes 260" in message and "'path:^annealed$'" in message and "keras.Input" not in message


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: Annealed(256.0), id="a number that bfloat16 holds"),
        pytest.param(lambda: Annealed(259.37), id="no whole number"),
        pytest.param(lambda: Annealed(259.0, autocast=False), id="read as it is stored"),
        pytest.param(lambda: Annealed(259, dtype="int32"), id="an integer"),
        pytest.param(lambda: Plain(259.0), id="not read by the call"),
    ],
)
def test_other_variables_of_a_layer_are_not_named(layer):
    model = functional(layer(), shape=(1,))
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert rounded_whole_numbers(model, np.ones((2, 1), "float32")) == []


def test_batches_are_looked_at_ever_more_seldom():
    assert [number for number in range(1, 70) if is_looked_at(number)] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.slow
def test_with_a_black_box_training_goes_on_in_a_second_fit(tmp_path):
    """On JAX it hands numbers of its own on with the state."""
    model = functional(Rows(name="rows"))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    said = []
    for _ in range(2):
        callbacks = [MixedPrecision("mixed_bfloat16"), mpkeras.callbacks.BlackBox(tmp_path)]
        options = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        said += said_by(lambda options=options: model.fit(CODES, np.ones(2), batch_size=1, **options))
    assert len(said) == 1 and int(model.optimizer.iterations) == 8


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("rows", [4, 5])
def test_a_look_costs_no_trace(rows):
    traced = []

    class Counting(keras.Model):
        def train_step(self, data):
            traced.append(1)
            return super().train_step(data)

    x = np.resize(CODES, (rows, 3)).astype("float32")

    def traces(data):
        traced.clear()
        inputs = keras.Input((3,))
        model = prepared(Counting(inputs, layers.Dense(1)(Wave(name="wave")(inputs))), "mixed_bfloat16")
        said = said_by(lambda: model.fit(data, np.ones((rows, 1)), batch_size=2, epochs=2, shuffle=False, verbose=0))
        return len(traced), len(said)

    with without_a_look():
        number, _ = traces(x)
    assert traces(x) == (number, 1)


def test_sentences():
    what, remedy = Rounded("a", "a", "float16", 2049.0, 2048.0).sentences()
    assert what == "Layer 'a' is given whole numbers that float16 cannot hold, rounded: 2049 becomes 2048."
    assert remedy.endswith("keep them whole with `keep_float32=(..., 'path:^a$')`.")
    what, remedy = Rounded("a", "b", "float16", 70000.0, float("inf")).sentences()
    assert what.endswith("cannot hold, and hands them on to layer 'b': 70000 becomes inf.")
    assert remedy.endswith("`keep_float32=(..., 'path:^a$', 'path:^b$')`.")


@pytest.mark.parametrize("rounded_at", [0, 37, 63])
def test_the_row_of_a_large_batch_that_holds_the_number_is_looked_at(rounded_at):
    model = mpkeras.apply_policy(functional(Wave(name="wave"), shape=(2,)), "mixed_bfloat16")
    steps = np.arange(128.0, dtype="float32").reshape(64, 2)
    steps[rounded_at, 1] = 515.0
    (found,) = rounded_whole_numbers(model, steps)
    assert (found.before, found.after) == (515.0, 516.0)


class CountsCalls(layers.Layer):
    """A user's embedding, which counts how often Python runs it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.calls = layers.Embedding(600, 4), []

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        self.calls.append(len(self.calls))
        return self.table(ids) * 2.0


@pytest.mark.slow
def test_integers_that_were_followed_in_one_fit_are_not_followed_in_the_next():
    """The layer is given integers alone: no call for shapes tells whether it hands on what it is given."""
    own = CountsCalls(name="own")
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(own(inputs))))
    model = prepared(model, "mixed_bfloat16")
    ids, y = np.arange(101, 146).reshape(15, 3) * 4 + 1, np.ones((15, 1), "float32")
    model.fit(ids, y, batch_size=5, verbose=0)
    own.calls.clear()
    model.fit(ids, y, batch_size=5, verbose=0)
    # On torch the steps run in Python.
    assert len(own.calls) == (3 if keras.backend.backend() == "torch" else 0)


@pytest.mark.slow
def test_a_column_in_which_numbers_were_not_lost_before_is_followed_in_a_later_fit():
    model = prepared(functional(Wave(name="wave"), shape=(2,)), "mixed_bfloat16")
    steps, y = np.arange(16.0, dtype="float32").reshape(8, 2), np.ones((8, 1), "float32")
    assert said_by(lambda: model.fit(steps + [0.0, 240.0], y, batch_size=2, verbose=0)) == []
    (message,) = said_by(lambda: model.fit(steps + [521.0, 240.0], y, batch_size=2, verbose=0))
    assert "521 becomes 520" in message
