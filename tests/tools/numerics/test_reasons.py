"""The reasons that reports give are true: each number is what it is called, and the layer that is named is at fault."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.callbacks import Float32Fallback, MixedPrecision, NumericsMonitor
from mpkeras.tools.shared.ranges import beyond, largest
from tests.cases import first_quick

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")


class Fault(layers.Layer):
    """Computes `function` of its inputs."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Between(layers.Layer):
    """Computes `function` between two layers of its own."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(4, name="first"), layers.Dense(4, name="second")
        self.function = function

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.second(self.function(self.first(x)))


def like(x, value):
    return ops.cast(value, x.dtype)


# What each computes on the way leaves float16 (and bfloat16 where it says so), while all that comes out is small.
FAULTS = {
    # 1e-12 is 0 in float16: rows of zeros are 0 / 0.
    "zero by zero": lambda x: x * 0 / ops.sqrt(ops.maximum(ops.sum(x * x * 0, -1, keepdims=True), like(x, 1e-12))),
    "zero by zero in float32": lambda x: x * 0 / ops.sum(x * 0, -1, keepdims=True),
    "log of zero": lambda x: x + ops.log(x * 0),
    "root of a negative": lambda x: x + ops.sqrt(-1 - x * x),
    "large on the way": lambda x: ops.sqrt(x * like(x, 3e4) * x * like(x, 3e4)) / like(x, 3e4),
    "mask": lambda x: ops.softmax(x) + (1 - ops.ones_like(x)) * (like(x, -3e4) * like(x, 3e4)),
    "output": lambda x: x * like(x, 1e3) * like(x, 1e3),
}
IN_FLOAT32_TOO = {"zero by zero in float32", "log of zero", "root of a negative"}
IN_FLOAT16 = {"zero by zero", "large on the way", "mask", "output"}


def stack(*middle, dtype, weights=None):
    keras.utils.set_random_seed(2)
    body = [layers.Dense(4, name="body"), *middle, layers.Dense(4, name="head")]
    model = keras.Sequential([keras.Input((4,)), *body], name="net")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    return mpkeras.prepare(model, policy, **({} if dtype == "float32" else {"loss_scale": 1.0}))


def check_numbers(text):
    """Fails where a number that is called too large is not."""
    text = str(text)
    for number, limit in re.findall(r"reaches ([0-9.e+-]+), over \w+'s ([0-9.e+-]*[0-9])", text):
        assert float(number) > float(limit), text
    for number, dtype in re.findall(r"up to ([0-9.e+-]+), more than (\w+) holds", text):
        assert float(number) > largest(dtype), text
    for number in re.findall(r"in float32 it reaches ([0-9.e+-]*[0-9])", text):
        assert float(number) > largest("float16"), text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["alone", "between"])
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, "float16") for fault in FAULTS), *((fault, "bfloat16") for fault in FAULTS), ("log of zero", "float32")],
)
def test_what_a_layer_makes_not_finite_itself(fault, dtype, where):
    make = Fault if where == "alone" else Between
    model = stack(make(FAULTS[fault], name="fault"), dtype=dtype)
    report = mpkeras.trace_numerics(model, X, Y)
    check_numbers(report)
    text = str(report)
    is_bad = fault in IN_FLOAT32_TOO or (fault in IN_FLOAT16 and dtype == "float16")
    if not is_bad:
        assert report.culprit is None and report.rules == () and "Everything is finite" in text
        return
    assert report.culprit.path == "net/fault" if where == "alone" else report.culprit.path.startswith("net/fault")
    assert report.culprit.float32_cures == (fault not in IN_FLOAT32_TOO)
    # No scale makes a forward pass finite, and no rule what float32 does not either.
    assert "Loss scales from" not in text and "is too large" not in text
    if fault in IN_FLOAT32_TOO:
        assert report.rules == () and "reaches" not in text
        assert ("in float32 too" in text) == (dtype != "float32")
    else:
        assert any("fault" in rule for rule in report.rules)
        policy = report.policy()
        fixed = stack(make(FAULTS[fault], name="fault"), dtype="float32")
        mpkeras.prepare(fixed, policy, loss_scale=1.0)
        assert mpkeras.trace_numerics(fixed, X, Y).culprit is None


def test_a_layer_that_fails_inside_is_told_from_one_whose_output_is_large():
    inside = str(mpkeras.trace_numerics(stack(Fault(FAULTS["mask"], name="fault"), dtype="float16"), X, Y))
    assert "of its outputs are not finite in float16, and are in float32" in inside and "reaches" not in inside
    assert "what it computes on the way is more than float16 can tell" in inside
    large = str(mpkeras.trace_numerics(stack(Fault(FAULTS["output"], name="fault"), dtype="float16"), X, Y))
    assert re.search(r"Layer 'net/fault': its output reaches [0-9.e+]+, over float16's 65504", large)


@pytest.mark.parametrize("dtype", first_quick(["float16", "bfloat16", "float32"]))
def test_data_weights_and_loss(dtype):
    model = stack(dtype=dtype)
    bad = X.copy()
    bad[3, 1] = np.nan
    culprit = mpkeras.trace_numerics(model, bad, Y).culprit
    assert culprit.path == "net/body" and "look into the data" in culprit.message and not culprit.float32_cures
    culprit = mpkeras.trace_numerics(model, X, np.full_like(Y, np.inf)).culprit
    assert (culprit.side, culprit.path) == ("loss", None) and "look at the loss and the labels" in culprit.message
    head = model.layers[-1]
    head.bias.assign([0.0, np.inf, 0.0, 0.0])
    culprit = mpkeras.trace_numerics(model, X, Y).culprit
    assert (culprit.side, culprit.path, culprit.float32_cures) == ("weight", "net/head", False)


class Outside(keras.Model):
    """Computes `function` before or behind its layers, in its own `call`."""

    def __init__(self, function, is_behind):
        super().__init__(name="outside")
        self.first, self.last = layers.Dense(4, name="first"), layers.Dense(4, name="last")
        self.function, self.is_behind = function, is_behind

    def call(self, x):
        x = self.first(x)
        return self.function(self.last(x)) if self.is_behind else self.last(self.function(x))


@pytest.mark.parametrize("is_behind", first_quick([False, True]), ids=["before a layer", "behind the last"])
def test_operations_outside_of_all_layers(is_behind):
    # Behind the last layer, which makes the outputs, all is in float32.
    model = Outside(FAULTS["zero by zero in float32" if is_behind else "zero by zero"], is_behind)
    model(X)
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_float16", loss_scale=1.0)
    report = mpkeras.trace_numerics(model, X, Y)
    check_numbers(report)
    assert report.culprit.path is None and "look into the data" not in str(report)
    expected = "what the model returns is not" if is_behind else "an operation outside of all layers, before layer"
    assert expected in report.culprit.message


def steep(x):
    # Returns its input; what goes back is 1e6 times as large.
    return x + (x - ops.stop_gradient(x)) * like(x, 1e3) * like(x, 1e3)


def edge(x):
    # The slope of a root at 0 is infinite, times 0.
    return x + ops.sqrt(x * 0)


@pytest.mark.parametrize("dtype", first_quick(["float16", "bfloat16", "float32"]))
@pytest.mark.parametrize("fault", first_quick([steep, edge]))
def test_gradients(fault, dtype):
    report = mpkeras.trace_numerics(stack(Fault(fault, name="fault"), dtype=dtype), X, Y)
    check_numbers(report)
    if fault is steep and dtype != "float16":
        assert report.culprit is None
        return
    assert (report.culprit.side, report.culprit.path) == ("gradient", "net/fault")
    assert report.culprit.float32_cures == (fault is steep)
    # What is not finite in float32 either is suited by no scale, and by no rule.
    assert fault is steep or (report.window is None and report.rules == () and "Loss scales from" not in str(report))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["zero by zero", "zero by zero in float32"])
def test_what_the_callbacks_say_and_do(fault):
    def fit(*callbacks):
        model = stack(Fault(FAULTS[fault], name="fault"), dtype="float32")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"callbacks": [MixedPrecision("mixed_float16"), *callbacks]}
            model.fit(X, Y, batch_size=4, epochs=2, verbose=0, **options)
        for warning in caught:
            check_numbers(warning.message)
        return " ".join(str(warning.message) for warning in caught)

    said = fit(NumericsMonitor())
    assert "the output of layer 'net/fault' is not finite" in said
    assert ("keep it in float32" in said.lower()) == (fault == "zero by zero")
    fallback = Float32Fallback(patience=1)
    fit(fallback)
    # It moves what float32 cures, and nothing else.
    assert fallback.moved == (["net/fault"] if fault == "zero by zero" else [])


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        pytest.param(1e5, "float16", "1e+05", id="far beyond"),
        pytest.param(65520.0, "float16", "65520", id="three digits would be within"),
        pytest.param(3.3961776e38, "bfloat16", "3.4e+38", id="bfloat16"),
    ],
)
def test_a_number_beyond_a_dtype_is_beyond_it_as_text(value, dtype, expected):
    assert beyond(value, dtype) == expected and float(expected) > largest(dtype)
