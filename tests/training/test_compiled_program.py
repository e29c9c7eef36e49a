"""G5, read in the compiled program: one trace, no conditional, no host transfer, each dtype where it belongs."""

import re

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.training.step import make_train_step
from tests.cases import first_quick

pytestmark = pytest.mark.backends("tensorflow", "jax")

X = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
Y = np.array([0, 1, 2, 3], "int32")
HLO_TYPES = {"mixed_float16": "f16", "mixed_bfloat16": "bf16"}
# Whatever waits for another program, or for the host. Jumps depend on data that the host need not see, but on
# accelerators they empty the queue.
FORBIDDEN = ("conditional", "infeed", "outfeed", "send", "send-done", "recv", "recv-done")


class Counting(keras.layers.Layer):
    """Counts how often it is traced."""

    traces = 0

    def call(self, x):
        type(self).traces += 1
        return x


def classifier(policy, last="dense"):
    """Convolution, statistics, random numbers, matrix product, softmax."""
    keras.utils.set_random_seed(0)
    # Of small weights a warning says what training needs; `prepare` makes them.
    with mpkeras.policy_scope("mixed_bfloat16" if policy == "bfloat16" else policy):
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Conv2D(4, 3)(inputs)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Dropout(0.2)(x)
        x = Counting()(keras.layers.Flatten()(x))
        x = keras.layers.Dense(6)(x)
        return keras.Model(inputs, keras.layers.Softmax()(x))


def compiled(policy, rule=None):
    """The model as `prepare` leaves it, its float32 rules applied."""
    model = classifier(policy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=True)
    return mpkeras.prepare(model, policy, loss_scale=rule)


def programs_of_our_step(policy, stages):
    """Returns the text of the program as XLA is given it (`"hlo"`) and as it makes it (`"optimized_hlo"`), as asked."""
    model = compiled(policy)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    step = make_train_step(
        model, model.optimizer, keras.losses.SparseCategoricalCrossentropy(), jit_compile=True, metrics=metrics
    )
    return [step.compiler_ir(X, Y, optimized=stage == "optimized_hlo") for stage in stages]


def programs_of_fit(policy, stages):
    model = compiled(policy)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        batch = tf.constant(X), tf.constant(Y)
        # Makes all variables, and compiles nothing.
        model.train_step(batch)
        text = tf.function(model.train_step, jit_compile=True).experimental_get_compiler_ir(batch)
        return [text(stage=stage) for stage in stages]
    import jax

    model.train_on_batch(X, Y)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([v.value for v in part] for part in variables)
    lowered = jax.jit(model.train_step, donate_argnums=0).lower(state, (X, Y))
    texts = {"hlo": lambda: lowered.as_text(dialect="hlo"), "optimized_hlo": lambda: lowered.compile().as_text()}
    return [texts[stage]() for stage in stages]


PROGRAMS = [pytest.param(programs_of_our_step, id="make_train_step"), pytest.param(programs_of_fit, id="fit")]


def operations(text):
    """Returns `(operation, element type)` for every instruction of an HLO text."""
    return [(op, dtype) for dtype, op in re.findall(r"= (\w+)\[[\d,<=]*\]\S* ([\w-]+)\(", text)]


@pytest.mark.slow
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("policy", HLO_TYPES)
def test_products_run_in_16_bits_and_softmax_statistics_and_losses_in_float32(programs, policy):
    # As XLA is given it: for this CPU, without 16-bit products, it then widens them again.
    (text,) = programs(policy, ["hlo"])
    found = operations(text)
    products = [dtype for op, dtype in found if op in ("dot", "convolution")]
    # The product of the head and the two of its derivative are in float32, all others in 16 bits.
    assert len(products) >= 5 and set(products) == {HLO_TYPES[policy], "f32"} and products.count("f32") == 3
    for op in ("exponential", "log", "rsqrt", "sqrt"):
        assert {dtype for found_op, dtype in found if found_op == op} <= {"f32"}, op
    assert "exponential" in {op for op, _ in found} and "log" in {op for op, _ in found}


@pytest.mark.slow
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("policy", ["float32", *HLO_TYPES, "bfloat16"])
def test_no_conditional_and_no_host_transfer(programs, policy):
    for text in programs(policy, ["hlo", "optimized_hlo"]):
        found = {op for op, _ in operations(text)}
        assert "add" in found or "fusion" in found
        assert not found & set(FORBIDDEN)
        # `conditional` returns tuples, which the pattern of one array does not match.
        for name in FORBIDDEN:
            assert f" {name}(" not in text
        assert "callback" not in text


def test_the_reader_of_programs_sees_a_conditional():
    """Stock Keras' own LossScaleOptimizer branches: the check above can fail."""
    model = classifier("mixed_float16")
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    stock.build(model.trainable_variables)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        grads = [tf.zeros(v.shape) for v in model.trainable_variables]
        step = tf.function(lambda grads: stock.apply(grads, model.trainable_variables), jit_compile=True)
        text = step.experimental_get_compiler_ir(grads)(stage="hlo")
    else:
        import jax

        values = [v.value for v in model.trainable_variables]
        text = jax.jit(stock.stateless_apply).lower([v.value for v in stock.variables], values, values)
        text = text.as_text(dialect="hlo")
    assert " conditional(" in text


@pytest.mark.slow
def test_one_trace_over_a_hundred_steps_with_overflows():
    model = compiled("mixed_float16", 2.0**10)
    step = make_train_step(model, model.optimizer, keras.losses.SparseCategoricalCrossentropy(), jit_compile=True)
    step(X, Y)
    traced = Counting.traces
    skipped = 0
    for i in range(100):
        result = step(X * (np.inf if i % 7 == 3 else 1.0), Y)
        skipped += bool(keras.ops.convert_to_numpy(result["skipped"]))
    assert Counting.traces == traced
    assert skipped == 14


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 of 10 steps skipped in epoch 1:UserWarning")
def test_one_trace_in_fit():
    model = classifier("mixed_float16")
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
    x, y = np.concatenate([X] * 10), np.concatenate([Y] * 10)
    x[5, 0, 0, 0] = np.inf
    precision, counts = MixedPrecision("mixed_float16", loss_scale=2.0**10), []
    counting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append(Counting.traces))
    for epochs in (1, 3):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=epochs, callbacks=[precision, counting])
    # The second `fit` may trace once more, in its first epoch.
    assert len(set(counts[1:])) == 1
    assert int(model.optimizer.skipped_steps) == 4


@pytest.mark.slow
@pytest.mark.parametrize("with_statistics", [False, True])
@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_the_program_grows_with_the_number_of_layers_not_with_its_square(accumulate_steps, with_statistics):
    """XLA repeats cheap operations where they are used: the sums of all gradients in the update of each, in the choice
    of each statistic whether another one became non-finite."""

    def length(layers):
        keras.utils.set_random_seed(0)
        kinds = [keras.layers.Dense, keras.layers.BatchNormalization] if with_statistics else [keras.layers.Dense]
        hidden = [kind(4) if kind is keras.layers.Dense else kind() for _ in range(layers) for kind in kinds]
        model = keras.Sequential([keras.Input((4,)), *hidden])
        step = make_train_step(model, "adam", "mse", accumulate_steps=accumulate_steps)
        return len(step.compiler_ir(X[:, 0, 0, :1] * np.ones((1, 4)), X[:, 0, 0, :1], optimized=True).splitlines())

    # 4 times as many operations; 9 times and more with the sums in every update, 6 times with all statistics in each.
    assert length(40) < 5 * length(10)


@pytest.mark.backends("jax")
def test_the_check_of_a_bias_reads_its_gradient_and_not_what_that_is_the_sum_of():
    """Of a sum of a sum XLA makes one, here of all rows of the activations' gradient, which are read once more."""
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(96, "relu"), keras.layers.Dense(1)])
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    program = step.compiler_ir(np.ones((64, 32), "float32"), np.ones((64, 1), "float32"))
    shapes = dict(re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", program))
    added_up = [shapes[operand] for operand in re.findall(r"= f32\[\]\S* reduce\(%?([\w.-]+)", program)]
    assert added_up and "64,96" not in added_up


class InTraining(keras.layers.Layer):
    """A user's layer that notes each run of it in training, and may refuse to run in inference."""

    def __init__(self, refuses, **kwargs):
        super().__init__(**kwargs)
        self.refuses, self.runs = refuses, []

    def call(self, x, training=None):
        if training:
            self.runs.append(len(self.runs))
        elif training is False and self.refuses:
            raise RuntimeError("in training alone")
        return x * 1.0


# Stock Keras stops there on JAX.
REFUSES = pytest.param(True, marks=pytest.mark.backends("tensorflow"))


@pytest.mark.parametrize("refuses", first_quick([False, REFUSES]))
def test_the_first_step_of_fit_is_traced_once(refuses):
    """Stock Keras makes variables in it, and TensorFlow traces such a function once more.

    What no run in inference can make, the step makes as ever.
    """
    layer = InTraining(refuses)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), layer, keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=keras.backend.backend() == "jax")
    mpkeras.prepare(model, "mixed_bfloat16")
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")
    losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
    assert len(layer.runs) == (2 if refuses else 1)
    assert losses[1] < losses[0] and keras.ops.convert_to_numpy(model.optimizer.accepted_steps) == 4
