"""P1, P27: `trace_numerics` names the layer, the number and the remedy, and leaves the model as it was."""

import json

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.changes import changes_of
from mpkeras.tools.numerics.losses import Range, lost_share, rounded, underflow_limit, underflow_share
from mpkeras.tools.numerics.scale_window import smallest_safe_exponent, with_rounded_gradient
from mpkeras.tools.shared.ranges import overflow_limit
from tests.cases import first_quick
from tests.sixteen_bits import Weighted, without_outputs
from tests.step_modes import snapshot

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(4, 8)).astype("float32")


class Times(Weighted):
    """Multiplies its input by `up` twice, and the gradient on its way back by `1 + down` squared as well."""

    def __init__(self, up=1.0, down=0.0, **kwargs):
        super().__init__(**kwargs)
        self.up, self.down = up, down

    def call(self, x):
        # The second term is zero; its gradient is what is to be added.
        return x * self.up * self.up + (x - ops.stop_gradient(x)) * self.down * self.down


class Paces(Weighted):
    """A sum that is larger with each call."""

    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1)
        return ops.sum(x, axis=-1, keepdims=True) * ops.cast(self.calls, x.dtype)


def name(path):
    return path.rpartition("/")[2]


def stack_of_six(k=None, **fault):
    """Dense layers of which the k-th is followed by a fault."""
    keras.utils.set_random_seed(0)
    stack = [Times(name=f"layer_{i}", **fault) if i == k else layers.Dense(8, name=f"layer_{i}") for i in range(1, 7)]
    return keras.Sequential([keras.Input((8,)), *stack])


def six_layers(k=None, policy="mixed_float16", *, loss_scale=1.0, **fault):
    policy = without_outputs(policy)
    with mpkeras.policy_scope(policy):
        model = stack_of_six(k, **fault)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return mpkeras.prepare(model, policy, loss_scale=loss_scale)


@pytest.mark.parametrize("k", first_quick([4, 1, 6]))
def test_p1_an_overflow_forward_is_named_with_number_and_remedy(k):
    model = six_layers(k, up=1e3)
    report = mpkeras.trace_numerics(model, X, Y)
    assert report.culprit.side == "output" and name(report.culprit.path) == f"layer_{k}"
    named = next(layer for layer in report.layers if name(layer.path) == f"layer_{k}")
    assert 0 < named.overflow <= 1 and named.true_outputs.max_abs > 65504
    assert any(rule.endswith(f"/layer_{k}$") for rule in report.rules)
    said = f"Layer '{named.path}': its output reaches {named.true_outputs.max_abs:.3g}, over float16's 65504"
    assert said in str(report)
    # The policy that is proposed cures it.
    mpkeras.prepare(model, report.policy(), loss_scale=1.0)
    again = mpkeras.trace_numerics(model, X, Y)
    assert again.culprit is None or again.culprit.side == "gradient"
    assert all(layer.overflow == 0 for layer in again.layers)


@pytest.mark.parametrize("k", first_quick([4, 2, 6]))
def test_p1_an_overflow_backward_is_named(k):
    report = mpkeras.trace_numerics(six_layers(k, down=200.0, loss_scale=64.0), X, Y)
    assert report.culprit.side == "gradient" and name(report.culprit.path) == f"layer_{k}"
    assert all(layer.overflow == 0 for layer in report.layers)


class FarFromData(keras.Model):
    """A loss of its author's, of arithmetic with what `fit` hands on as tensors."""

    def __init__(self):
        super().__init__()
        self.scaled = layers.Dense(8, kernel_initializer="identity", use_bias=False)

    def call(self, x):
        return self.scaled(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((x + y - y_pred) * sample_weight[:, None])


def test_a_loss_of_the_users_own_is_given_tensors():
    model = FarFromData()
    model.compile("sgd")
    mpkeras.prepare(model, "mixed_float16")
    # Of x + 3 - x the half.
    report = mpkeras.trace_numerics(model, X.astype("float64"), np.full((4, 8), 3.0), np.full((4,), 0.5))
    assert report.loss == pytest.approx(1.5) and report.culprit is None


def test_a_layer_begins_with_the_state_that_it_has():
    paces = Paces(name="paces")
    model = keras.Sequential([keras.Input((8,)), paces, layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    paces.calls.assign(3)
    report = mpkeras.trace_numerics(model, np.full((4, 8), 0.5), np.zeros((4, 1)))
    # In the fourth call half of eight is 16.
    assert paces.compute_dtype == "bfloat16" and report.layers[0].outputs.max_abs == 16 and report.loss == 256
    assert int(paces.calls) == 3


def paced_by_a_native_count():
    """Returns a layer whose outputs grow with each call, by a number that is no variable of Keras, and the number."""
    if keras.backend.backend() == "torch":
        import torch

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.tensor(3))

            def forward(self, x):
                self.calls += 1
                return x * self.calls.to(x.dtype)

        module = Counting()
        return layers.TorchModuleWrapper(module, name="counting"), lambda: int(module.calls)
    import tensorflow as tf

    class Counting(Weighted):
        calls = None

        def build(self, shape):
            super().build(shape)
            self.calls = tf.Variable(3)

        def call(self, x):
            self.calls.assign_add(1)
            return x * tf.cast(self.calls, x.dtype)

    layer = Counting(name="counting")
    layer.build((None, 8))
    return layer, lambda: int(layer.calls)


@pytest.mark.backends("tensorflow", "torch")
def test_what_is_no_variable_of_keras_stays_too():
    counting, calls = paced_by_a_native_count()
    ones = {"kernel_initializer": "ones", "use_bias": False}
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, **ones), counting, layers.Dense(1, **ones)])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    before = calls()
    report = mpkeras.trace_numerics(model, np.full((2, 8), 0.25), np.zeros((2, 1)))
    # Four products of 2 are added up, times the number of the next call.
    assert report.loss == (8 * (before + 1)) ** 2
    mpkeras.audit(model, np.full((2, 8), 0.25))
    mpkeras.prepare(model, "float32")
    assert calls() == before


@pytest.mark.backends("torch")
def test_a_module_that_is_called_twice_has_its_buffers_for_the_backward_pass():
    import torch

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.end = layers.TorchModuleWrapper(torch.nn.BatchNorm1d(8)), layers.Dense(8)

        def call(self, x):
            return self.end(self.norm(self.norm(x)))

    model = Twice()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    report = mpkeras.trace_numerics(model, X, Y)
    assert report.loss == pytest.approx(model.train_on_batch(X, Y), rel=1e-5) and report.culprit is None


@pytest.mark.parametrize("layer_class", first_quick([layers.LSTM, layers.GRU, layers.ConvLSTM1D]))
def test_the_state_of_a_stateful_layer_is_no_error_of_16_bits(layer_class):
    keras.utils.set_random_seed(4)
    is_convolution = layer_class is layers.ConvLSTM1D
    loop = layer_class(3, *[2] * is_convolution, stateful=True, name="loop")
    shape = (5, 4, 2) if is_convolution else (5, 2)
    model = keras.Sequential([keras.Input(shape, batch_size=6), loop, layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(6, *shape)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")
    report = mpkeras.trace_numerics(model, x, y)
    (traced,) = [layer for layer in report.layers if name(layer.path) == "loop"]
    # Rounding alone: bfloat16 has 8 significant bits.
    assert 0 < traced.output_error < 0.02 and report.remedies() == []
    assert report.loss == pytest.approx(model.train_on_batch(x, y), rel=1e-4)


def frozen_base():
    base = stack_of_six(3, down=200.0)
    base.trainable = False
    return keras.Sequential([keras.Input((8,)), base, layers.Dense(8), layers.Dense(8, name="head")])


@pytest.mark.slow
@pytest.mark.parametrize("make", [frozen_base, lambda: stack_of_six(1, down=200.0)], ids=["a frozen base", "data"])
def test_gradients_that_no_step_computes_are_no_culprit(make):
    with mpkeras.policy_scope("mixed_float16"):
        model = make()
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_float16", loss_scale=64.0)
    report = mpkeras.trace_numerics(model, X, Y)
    assert report.culprit is None and "Everything is finite" in str(report)
    by_name = {name(layer.path): layer for layer in report.layers}
    assert by_name["layer_1"].grads.size == 0 and by_name[name(model.layers[-1].path)].grads.size > 0
    model.fit(X, Y, epochs=2, verbose=0)
    assert int(model.optimizer.skipped_steps.value) == 0


class Routed(keras.Model):
    """Chooses the layer that it calls by numbers that it has computed with its weights."""

    def __init__(self):
        super().__init__(name="routed")
        self.router = layers.Dense(2, kernel_initializer="zeros", name="router")
        self.experts = [layers.Dense(8, name="resting"), keras.Sequential([layers.Dense(8), layers.Dense(8)])]

    def call(self, x):
        return self.experts[bool(keras.ops.any(self.router(x) != 0))](x)


@pytest.mark.backends("torch")  # Elsewhere a step is traced once for all values.
def test_a_model_that_would_call_other_layers_with_other_weights_is_traced():
    model = Routed()
    for layer in (model.router, *model.experts):
        layer.build(X.shape)
    model(X)
    model.compile("sgd", "mse")
    mpkeras.apply_policy(model, "mixed_bfloat16")
    report = mpkeras.trace_numerics(model, X, Y)
    assert [name(layer.path) for layer in report.layers] == ["router", "resting"] and report.culprit is None


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")  # JAX has no kernel for attention in float16 on a CPU
def test_the_rule_for_a_layer_inside_of_an_attention_cures_it():
    def make(policy):
        keras.utils.set_random_seed(4)
        inputs = keras.Input((8, 8), name="x")
        attention = layers.MultiHeadAttention(2, 4, name="attention")
        model = keras.Model(inputs, layers.Dense(1)(attention(inputs, inputs)))
        attention.query_dense.kernel.assign(1e6 * attention.query_dense.kernel)
        attention.key_dense.kernel.assign(1e-6 * attention.key_dense.kernel)
        # Keys so small make gradients of their kernel that are too large for float16 at any scale but a small one.
        model.compile("sgd", "mse")
        return mpkeras.prepare(model, policy, loss_scale=2.0**-9)

    x, y = np.stack([X, X + 1]).reshape(1, 8, 8), np.ones((1, 8, 1))
    report = mpkeras.trace_numerics(make("mixed_float16"), x, y)
    assert report.culprit.path == "attention/query" and "path:^attention/query$" in report.rules
    policy = mpkeras.get_policy("mixed_float16")
    rules = (*policy.keep_float32, "path:^attention/query$")
    model = make(mpkeras.Policy("mixed_float16", keep_float32=rules))  # Warnings are errors here.
    assert mpkeras.trace_numerics(model, x, y).culprit is None
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.skipped_steps.value) == 0


@pytest.mark.parametrize(("value", "is_beyond"), [(65519.0, False), (65520.0, True)])
def test_what_rounds_to_the_largest_number_is_within_the_range(value, is_beyond):
    """65504 is float16's largest; the numbers below 65520 are rounded to it, and 65520 to infinity."""
    one = layers.Dense(1, kernel_initializer="ones", use_bias=False, name="one")
    model = keras.Sequential([keras.Input((1,)), one, layers.Dense(1, name="head")])
    model.compile("sgd", "mse")
    x, y = np.array([[value]], "float32"), np.ones((1, 1), "float32")
    report = mpkeras.trace_numerics(mpkeras.prepare(model, "mixed_float16"), x, y)
    what, _ = next(row for row in report.layers if row.path.endswith("one")).too_large
    assert (what == "output") == is_beyond


def test_inputs_and_weights_that_are_no_numbers_of_the_dtype_are_named():
    model = six_layers()
    with pytest.raises(ValueError, match=r"arrays of at least one example. Received: x=ndarray of shapes \[\(0,"):
        mpkeras.trace_numerics(model, X[:0], Y[:0])
    culprit = mpkeras.trace_numerics(model, X * 1e5, Y).culprit
    assert culprit.side == "input" and name(culprit.path) == "layer_1" and "more than float16 holds" in culprit.message
    model.layers[3].kernel.assign(np.full((8, 8), np.nan))
    culprit = mpkeras.trace_numerics(model, X, Y).culprit
    assert culprit.side == "weight" and name(culprit.path) == "layer_4" and "kernel" in culprit.message


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_a_clean_model_has_no_culprit_and_is_as_it_was(policy):
    keras.utils.set_random_seed(0)
    stack = [keras.Input((8,)), layers.Dense(8, "relu", activity_regularizer="l2"), layers.BatchNormalization()]
    model = keras.Sequential([*stack, layers.Dropout(0.5), layers.Dense(8)])
    model.compile("adam", "mse", metrics=["mae"])
    mpkeras.prepare(model, policy, loss_scale=1.0)
    model.train_on_batch(X, Y)

    def state():
        return [snapshot(v) for v in (model.variables, model.optimizer.variables, model.metrics_variables)]

    before = state()
    config, methods = model.get_config(), [layer.call for layer in model.layers]
    report = mpkeras.trace_numerics(model, X, Y)
    assert report.culprit is None and report.rules == () and "Everything is finite" in str(report)
    assert state() == before
    assert model.get_config() == config and [layer.call for layer in model.layers] == methods
    assert model.losses == [] or len(model.losses) == 1
    model.train_on_batch(X, Y)


def test_numbers_are_those_of_numpy():
    kernel = np.array([[2.0, 0.0], [0.0, -3e-9]], "float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, use_bias=False, name="dense")])
    model.layers[0].set_weights([kernel])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, without_outputs("mixed_float16"), loss_scale=8.0)
    x = np.array([[1.0, 1.0], [-4.0, 0.5]], "float32")
    report = mpkeras.trace_numerics(model, x, np.zeros((2, 2), "float32"))
    (dense,) = report.layers
    # Outputs [[2, 0], [-8, 0]]: of four, the two of -3e-9 and -1.5e-9 are zero in float16 (its smallest is 6e-8).
    assert (dense.outputs.min, dense.outputs.max, dense.outputs.max_abs) == (-8, 2, 8)
    assert dense.underflow == 0.5 and dense.overflow == 0
    # d mse / d output = 2 y / 4: 1, -4 and the tiny ones; kernel: x'g = [[17, ..], [-1, ..]].
    assert dense.true_weight_grads.max_abs == 17 and dense.weight_grads.max_abs == 17 * 8
    # By output 4, times the scale 32; by the data no step computes any.
    assert dense.true_grads.max_abs == 4 and dense.grads.max_abs == 32
    # 65520 rounds to inf: 17 * 2048 is below, 17 * 4096 above.
    assert report.window[1] == 2048
    assert report.loss == pytest.approx((4 + 64) / 4)


def test_a_regularized_weight_is_in_the_loss_and_in_the_gradient():
    dense = layers.Dense(2, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.25))
    model = keras.Sequential([keras.Input((2,)), dense])
    dense.set_weights([np.array([[2.0, 0.0], [0.0, -0.5]])])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, without_outputs("mixed_float16"), loss_scale=8.0)
    x = np.array([[1.0, 0.0], [0.0, 2.0]], "float32")
    report = mpkeras.trace_numerics(model, x, np.zeros((2, 2), "float32"))
    # Outputs [[2, 0], [0, -1]]; a quarter of 2^2 + 0.5^2 is added.
    assert report.loss == 5 / 4 + 4.25 / 4
    # d mse / d kernel = x' 2 y / 4 = [[1, 0], [0, -1]]; of the regularizer, half the kernel: [[1, 0], [0, -0.25]].
    (traced,) = report.layers
    assert (traced.true_weight_grads.max, traced.true_weight_grads.min) == (2, -1.25)
    assert (traced.weight_grads.max, traced.weight_grads.min) == (16, -10)


def test_each_pass_draws_what_the_next_step_draws():
    model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.25), layers.Dense(8)])
    model.compile("sgd", "mse")
    before = mpkeras.state_dict(model)
    dropout = mpkeras.trace_numerics(model, X, Y).layers[0]
    # In float32 both passes are the same.
    assert dropout.outputs.to_dict() == dropout.true_outputs.to_dict()
    after = mpkeras.state_dict(model)
    assert [key for key in before if before[key].tobytes() != after[key].tobytes()] == []


def test_the_means_of_several_losses_begin_with_numbers_after_a_trace():
    x = keras.Input((3,))
    model = keras.Model(x, {"left": layers.Dense(2, name="left")(x), "right": layers.Dense(1, name="right")(x)})
    model.compile("sgd", {"left": "mae", "right": "mse"})
    y = {"left": np.ones((5, 2)), "right": np.ones((5, 1))}
    # The first loss that is computed makes a mean for each output.
    mpkeras.trace_numerics(model, np.ones((5, 3)), y)
    means = [variable for variable in model.metrics_variables if "left_loss" in variable.path]
    assert [float(ops.convert_to_numpy(variable.value)) for variable in means] == [0.0, 0.0]
    assert model.test_on_batch(np.ones((5, 3)), y, return_dict=True).keys() == {"loss", "left_loss", "right_loss"}


def test_p27_gradients_that_are_lost_are_counted_and_the_scale_is_named():
    model = six_layers()
    model.compile(keras.optimizers.SGD(0.01), lambda y, p: 1e-9 * keras.losses.mean_squared_error(y, p))
    mpkeras.prepare(model, loss_scale=1.0)
    report = mpkeras.trace_numerics(model, X, Y)
    assert min(layer.grad_underflow for layer in report.layers) > 0.99
    # A 1/32 of 1e-9 is 2^-35: 2^-25 rounds to zero.
    assert report.window[0] >= 2.0**10 and "is too small" in str(report)
    assert set(report.lost) == {layer.path for layer in report.layers} and min(report.lost.values()) > 0.99
    better = mpkeras.trace_numerics(model, X, Y, loss_scale=np.int64(report.window[0]))
    assert better.loss_scale == report.window[0] and better.lost == {} and "is too small" not in str(better)
    # Half of it is not enough: the smallest was searched for.
    assert mpkeras.trace_numerics(model, X, Y, loss_scale=report.window[0] / 2).lost


def language_model(policy, weights=None, tokens=40):
    """A model of tokens, most of them rare, trained until most are easy: what is left of the loss is in a few."""
    rng = np.random.default_rng(0)
    text = np.zeros((16, 13), "int32")
    text[:, 0] = rng.zipf(1.5, 16) % tokens
    for i in range(12):
        text[:, i + 1] = np.where(rng.random(16) < 0.97, (text[:, i] * 3 + 1) % tokens, rng.integers(0, tokens, 16))
    x, y = text[:, :-1], text[:, 1:]
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    h = layers.Embedding(tokens, 16)(inputs)
    h = layers.Add()([h, layers.Dense(16, "relu")(layers.LayerNormalization()(h))])
    model = keras.Model(inputs, layers.Dense(tokens)(layers.LayerNormalization()(h)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if weights is None:
        model.compile(keras.optimizers.Adam(0.05), loss)
        for _ in range(60):
            model.train_on_batch(x, y)
    else:
        model.set_weights(weights)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    return mpkeras.prepare(model, without_outputs(policy)), x, y


@pytest.mark.slow
def test_a_healthy_language_model_raises_no_alarm():
    """Most of its gradients are tiny, as most tokens are easy; together they are nothing beside those of the others."""
    model, x, y = language_model("mixed_float16")
    other, _, _ = language_model("float32", model.get_weights())
    report = mpkeras.trace_numerics(model, x, y)
    assert max(layer.grad_underflow for layer in report.layers) > 0.01  # more than 1 in 100 rounds to zero
    assert report.window[0] <= report.loss_scale <= report.window[1] and report.lost == {}
    (about,) = report.remedies()
    assert about.startswith("Loss scales from ") and "suit" in about
    losses, expected = ([float(m.train_on_batch(x, y)) for _ in range(4)] for m in (model, other))
    np.testing.assert_allclose(losses, expected, rtol=2e-3)  # float16 has 11 significant bits


class Backward(layers.Layer):
    """Returns its input; its gradient is multiplied by `factor` on the way back."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        def multiplied(*args, upstream=None):
            grad = args[0] if upstream is None else upstream
            # Plain products by two constants TensorFlow makes one of, which float16 has no number for.
            return ops.abs(grad * self.factor) * ops.sign(grad)

        return ops.custom_gradient(lambda x: (x + 0.0, multiplied))(x)


def two_layers(*factors, policy="mixed_float16", loss_scale=1.0, loss_weight=1.0):
    """Two dense layers with factors on the gradient between them, in the order of the way back."""
    keras.utils.set_random_seed(0)
    between = [Backward(factor) for factor in factors[::-1]]
    stack = [keras.Input((8,)), layers.Dense(8, name="early"), *between, layers.Dense(8, name="late")]
    model = keras.Sequential(stack, name="net")
    # Without this `epsilon` Adam itself takes such gradients for zeros.
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-20), lambda y, p: loss_weight * ops.mean(ops.square(y - p)))
    return mpkeras.prepare(model, policy, loss_scale=loss_scale if policy == "mixed_float16" else None)


def steps_of_early(model):
    before = ops.convert_to_numpy(model.get_layer("early").kernel.value).copy()
    model.train_on_batch(X, Y)
    return ops.convert_to_numpy(model.get_layer("early").kernel.value) - before


@pytest.mark.slow
@pytest.mark.parametrize(
    "factors",
    [
        pytest.param([2.0**-13] * 2, id="small where it arrives"),
        pytest.param([2.0**-13] * 2 + [2.0**12] * 2, id="small on the way, large where it arrives"),
    ],
)
def test_a_layer_whose_gradient_is_lost_raises_an_alarm_that_is_true(factors):
    report = mpkeras.trace_numerics(two_layers(*factors), X, Y)
    assert {name(path) for path in report.lost} == {"early"}
    assert "The loss scale of 1 is too small: layer '" in str(report)
    # Not of those between layers, of which the column tells.
    assert "of the gradient of its weights. Scale the loss" in str(report)
    expected = steps_of_early(two_layers(*factors, policy="float32"))
    assert np.abs(expected).min() > 0.009  # Adam's first step is the learning rate
    lost = steps_of_early(two_layers(*factors)) == 0
    assert lost.mean() > 0.25
    found = steps_of_early(two_layers(*factors, loss_scale=report.window[0]))
    assert np.mean(np.abs(found - expected) < 1e-4) > 0.8  # a tenth may be lost


@pytest.mark.slow
def test_a_gradient_that_is_lost_beside_a_large_one_is_no_alarm():
    """As in a residual stream: nothing of it would be left in the sum."""

    def make(policy):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        h = layers.Dense(8, name="early")(inputs)
        branch = Backward(2.0**-12)(Backward(2.0**-13, name="last")(h))
        model = keras.Model(inputs, layers.Dense(8, name="late")(layers.Add()([h, branch])))
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-20), "mse")
        return mpkeras.prepare(model, policy, loss_scale=1.0 if policy == "mixed_float16" else None)

    report = mpkeras.trace_numerics(make("mixed_float16"), X, Y)
    last = next(layer for layer in report.layers if name(layer.path) == "last")
    assert last.grad_underflow > 0.4  # its gradient is lost on the way through it
    assert "too small" not in str(report) and "No loss scale" not in str(report)
    assert report.lost == {} and report.window[0] <= 1.0
    found, expected = steps_of_early(make("mixed_float16")), steps_of_early(make("float32"))
    assert np.mean(np.abs(found - expected) < 1e-4) > 0.95


@pytest.mark.slow
def test_that_no_loss_scale_suits_is_true():
    # The gradients of the last layer are 2^48 times those of the first.
    case = {"loss_weight": 2.0**16}
    factors = [2.0**-12] * 4
    report = mpkeras.trace_numerics(two_layers(*factors, **case), X, Y)
    smallest, highest = report.window
    assert smallest > highest and "No loss scale suits: from " in str(report) and "'mixed_bfloat16'" in str(report)
    model = two_layers(*factors, **case, loss_scale=highest)
    lost = steps_of_early(model) == 0
    assert not bool(ops.convert_to_numpy(model.optimizer.last_step_skipped)) and lost.mean() > 0.25
    model = two_layers(*factors, **case, loss_scale=2 * highest)
    steps_of_early(model)
    assert bool(ops.convert_to_numpy(model.optimizer.last_step_skipped))


@pytest.mark.parametrize("exponent", first_quick([13, 10, 16]))
def test_a_scale_is_called_too_large_if_steps_are_skipped_at_it(exponent):
    """LayerNormalization sums the gradient of its weights in float32: beyond 65504 it is still finite."""

    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), layers.LayerNormalization(name="norm")])
        # JAX has no eager step that skips.
        is_eager = keras.backend.backend() == "tensorflow"
        model.compile("sgd", lambda y, p: ops.sum(p * y), run_eagerly=is_eager)
        return mpkeras.prepare(model, without_outputs("mixed_float16"), loss_scale=2.0**exponent)

    x, y = np.tile(X, (64, 1)), np.tile(X, (64, 1))
    report, model = mpkeras.trace_numerics(make(), x, y), make()
    model.train_on_batch(x, y)
    is_skipped = bool(ops.convert_to_numpy(model.optimizer.last_step_skipped))
    assert is_skipped == (report.culprit is not None) == ("is too large" in str(report))
    assert is_skipped or report.window[1] >= 2.0**exponent


def test_a_gradient_that_is_zero_but_for_rounding_is_not_lost():
    class Shift(layers.Layer):
        def build(self, input_shape):
            self.shift = self.add_weight(shape=(1,), initializer="zeros")

        def call(self, x):
            return x + self.shift

    keras.utils.set_random_seed(0)
    # A normalization takes the shift away again.
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Shift(name="shift"), layers.LayerNormalization()])
    model.compile("sgd", "mse")
    report = mpkeras.trace_numerics(mpkeras.prepare(model, "mixed_float16", loss_scale=1.0), X, Y)
    shift = next(layer for layer in report.layers if name(layer.path) == "shift")
    assert shift.true_weight_grads.max_abs < 1e-6 and report.lost == {}


def test_what_is_lost_is_what_a_cast_loses():
    # float16's smallest numbers are multiples of 2^-24, from 2^-14 on they have 11 bits.
    grad = np.array([2.0**-25, 2.0**-25 * 1.01, 1.4 * 2**-24, -2.6 * 2.0**-24, 0.0, 1.0, 3.0001], "float32")
    expected = [0.0, 2.0**-24, 2.0**-24, -3 * 2.0**-24, 0.0, 1.0, np.float32(3.0001)]
    np.testing.assert_array_equal(rounded(grad, "float16", 1.0), expected)
    np.testing.assert_array_equal(rounded(grad / 64, "float16", 64.0), np.array(expected) / 64)
    # 3 and 4: of [3, 4] the 3 is lost.
    assert lost_share([np.array([3e-9]), np.array([4.0, np.nan]) * 1e-9], "float16", 1.0) == 1.0
    assert lost_share([np.array([3e-9, 4.0])], "float16", 1.0) == pytest.approx(7.5e-10)
    assert lost_share([np.array([3e-9, 4.0])], "float16", 2.0**20) < 1e-12
    assert lost_share([np.zeros(3)], "float16", 1.0) == 0.0


@pytest.mark.parametrize("exponent", [-40, -24, 3])
def test_from_a_safe_scale_on_nothing_that_matters_is_lost(exponent):
    grad = np.random.default_rng(0).normal(size=1000) * 2.0**exponent
    # A million that are tiny beside it change nothing, a thousand that are the half of it do.
    tiny, half = np.full(10**6, 2.0 ** (exponent - 30)), grad * 2.0**-8
    scale = smallest_safe_exponent([grad], "float16")
    assert lost_share([grad], "float16", 2.0**scale) < 0.015
    assert lost_share([grad], "float16", 2.0 ** (scale - 2)) > 0.015
    assert smallest_safe_exponent([grad, tiny], "float16") == scale
    assert smallest_safe_exponent([half], "float16") == scale + 8
    assert smallest_safe_exponent([np.zeros(3), np.array([np.nan])], "float16") is None


def test_a_gradient_that_is_rounded_on_its_way_back():
    grad = np.array([[2.0**-25, 1.4 * 2**-24, -0.7 * 2.0**-24], [1.0, 0.0, 2.0**-14]], "float32") / 8
    layer = layers.Dense(3, use_bias=False)
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.set_weights([np.zeros((2, 3), "float32")])

    class Rounding(layers.Layer):
        def call(self, x):
            return with_rounded_gradient(x, "float16", 8.0)

    model.add(Rounding())
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: ops.sum(y * p))
    model.train_on_batch(np.eye(2, dtype="float32"), grad)
    np.testing.assert_array_equal(-layer.get_weights()[0] * 8, [[0.0, 2.0**-24, -(2.0**-24)], [1.0, 0.0, 2.0**-14]])


def test_the_proposed_policy_keeps_what_the_model_trains_under():
    def dense(factor, name):
        return layers.Dense(3, kernel_initializer=keras.initializers.Constant(factor), use_bias=False, name=name)

    # A rescaling stays in float32, and is given what overflows in front of it.
    middle = [layers.Rescaling(1e-5), dense(1.0, "second"), layers.Rescaling(1e-5)]
    model = keras.Sequential([keras.Input((3,)), dense(400.0, "first"), *middle, dense(1.0, "end")], name="net")
    model.compile("adam", "mse")
    own = mpkeras.Policy("mixed_float16", slot_dtype="bfloat16", loss_scale=32.0, remat=["path:second"])
    mpkeras.prepare(model, own)
    x, y = np.full((4, 3), 100.0, "float32"), np.ones((4, 3), "float32")
    once = mpkeras.trace_numerics(model, x, y).policy()
    assert once.keep_float32 == (*own.keep_float32, "path:^net/first$")
    mpkeras.prepare(model, once)
    model.layers[2].kernel.assign(np.full((3, 3), 1e5))
    twice = mpkeras.trace_numerics(model, x, y).policy()
    assert twice.keep_float32 == (*once.keep_float32, "path:^net/second$")
    assert (twice.slot_dtype, twice.loss_scale.scale, twice.remat) == ("bfloat16", 32.0, ("path:second",))
    # What computes in bfloat16 throughout goes on doing so.
    bfloat16 = mpkeras.prepare(six_layers(3, "float32"), "bfloat16")
    assert mpkeras.trace_numerics(bfloat16, X, Y).policy().variable_dtype == "bfloat16"


@pytest.mark.slow
def test_bfloat16_holds_what_overflows_in_float16():
    assert mpkeras.trace_numerics(six_layers(3, "mixed_bfloat16", up=1e3), X, Y).rules == ()


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(8, name="shared")
        self.boom = Times(1e3, name="boom")
        self.block = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)], name="block")

    def call(self, x):
        return self.boom(self.block(self.shared(self.shared(x))))


class Behind(layers.Layer):
    """Computes `function` of what a layer of its own hands on."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, kernel_initializer="identity", name="inner")
        self.function = function

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.function(self.inner(x))


class Around(layers.Layer):
    """Runs another layer."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.layer(x) / 4


def compiled(model):
    model.compile("sgd", "mse")
    return model


def network(middle):
    keras.utils.set_random_seed(3)
    stack = [keras.Input((4,)), middle, layers.Dense(3, name="behind"), layers.Dense(1)]
    return compiled(keras.Sequential(stack, name="net"))


class OfTheUsers(layers.SimpleRNNCell):
    """A cell whose class may have steps of its own: it is called with a state in 16 bits."""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [256, 512])
def test_a_recurrent_layer_of_keras_that_sums_for_long_is_named(steps):
    """Of sums of 1/64 bfloat16 holds none above 4, which is the 256th."""
    cell = OfTheUsers(2, activation=None, kernel_initializer="ones", recurrent_initializer="identity")
    middle = layers.RNN(cell, name="sums")
    model = compiled(keras.Sequential([keras.Input((None, 1)), middle, layers.Dense(1)]))
    mpkeras.prepare(model, "mixed_bfloat16")
    report = mpkeras.trace_numerics(model, np.full((3, steps, 1), 1 / 64, "float32"), np.zeros((3, 1), "float32"))
    (sums,) = (layer for layer in report.layers if layer.class_name == "RNN")
    assert sums.output_error == (0.0 if steps == 256 else 0.5)
    named = [line for line in report.remedies() if "off by 50 %" in line]
    assert len(named) == (steps == 512) and all(f"'path:^{sums.path}$'" in line for line in named)


@pytest.mark.parametrize("is_inside", first_quick([True, False]))
def test_a_layer_that_loses_its_finite_outputs_is_named_with_a_rule_that_cures(is_inside):
    shifted = Behind(lambda h: (h + 256) - 256, name="shifted")
    model = mpkeras.prepare(network(Around(shifted, name="around") if is_inside else shifted), "mixed_bfloat16")
    x, y = np.full((4, 4), 3.0, "float32"), np.zeros((4, 1), "float32")
    report = mpkeras.trace_numerics(model, x, y)
    # 259 is 260 in bfloat16, and 3 becomes 4. The layer around it is as far off, and not at fault.
    off = {layer.path: layer.output_error for layer in report.layers if layer.is_off}
    assert off == {shifted.path: pytest.approx(1 / 3)}
    assert report.culprit is None
    assert report.remedies() == [
        f"Layer '{shifted.path}': its outputs in bfloat16 are off by 33 % from those in float32 on the same inputs: "
        f"keep it in float32 with `keep_float32=(..., 'path:^{shifted.path}$')`.",
        "`report.policy()` is the policy with these rules.",
    ]
    mpkeras.prepare(model, report.policy())
    report = mpkeras.trace_numerics(model, x, y)
    assert not report.remedies()
    assert [layer.outputs.max_abs for layer in report.layers if layer.path == shifted.path] == [3.0]


@pytest.mark.slow
def test_attention_is_compared_with_the_masks_that_it_was_given():
    keras.utils.set_random_seed(0)
    ids = keras.Input((6,), dtype="int32")
    words = layers.Embedding(5, 8, mask_zero=True, embeddings_initializer="normal")(ids)
    attended = layers.MultiHeadAttention(2, 4, name="attention")(words, words)
    model = mpkeras.prepare(compiled(keras.Model(ids, layers.Dense(1)(attended))), "mixed_bfloat16")
    # Rows of padding look at everything: without their masks they are half as large again.
    report = mpkeras.trace_numerics(model, np.array([[1, 2, 0, 0, 0, 0], [3, 4, 4, 0, 0, 0]]), np.zeros((2, 6, 1)))
    attention = next(layer for layer in report.layers if layer.path == "attention")
    assert 0 < attention.output_error < 0.02


def test_attention_with_dropout_is_looked_at_as_any_other():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    attended = layers.MultiHeadAttention(2, 3, dropout=0.25, name="attention")(inputs, inputs)
    model = mpkeras.prepare(compiled(keras.Model(inputs, layers.Dense(1)(attended))), "mixed_bfloat16")
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    attention = model.get_layer("attention")
    before = changes_of(attention)
    report = mpkeras.trace_numerics(model, x, np.ones((3, 5, 1)))
    assert report.culprit is None and changes_of(attention) == before
    softmax = next(layer for layer in report.layers if layer.class_name == "Softmax")
    assert softmax.outputs.size == 3 * 2 * 5 * 5 and 0 < softmax.outputs.max_abs < 1
    # By the inputs and the outputs.
    assert softmax.grads.size == 2 * softmax.outputs.size and softmax.grads.max_abs > 0


class Added(layers.Layer):
    """Adds a loss of its inputs, and hands them on."""

    def __init__(self, loss, **kwargs):
        super().__init__(**kwargs)
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


@pytest.mark.parametrize(
    ("value", "dtype", "loss", "is_lost", "is_infinite"),
    first_quick(
        [
            # The divergence of a narrow distribution: 1.25e-5.
            (0.005, "bfloat16", lambda v: ops.mean(ops.exp(v) - 1 - v), True, False),
            # 9e4, more than float16 holds, from numbers that it does.
            (300.0, "float16", lambda v: ops.mean(ops.square(v)), False, True),
            (3.0, "bfloat16", lambda v: ops.mean(ops.square(v)), False, False),
        ]
    ),
)
def test_a_loss_that_a_layer_adds_is_looked_at_as_its_outputs_are(value, dtype, loss, is_lost, is_infinite):
    # Behind a layer: what reads the data is in float32.
    first = layers.Dense(8, kernel_initializer="identity")
    stack = [keras.Input((8,)), first, Added(loss, name="added"), layers.Dense(1, kernel_initializer="zeros")]
    model = mpkeras.prepare(compiled(keras.Sequential(stack, name="net")), f"mixed_{dtype}")
    batch = np.full((4, 8), value), np.zeros((4, 1))
    report = mpkeras.trace_numerics(model, *batch, loss_scale=1.0)
    numerics = next(layer for layer in report.layers if layer.path == "net/added")
    assert (numerics.added_error > 0.1, numerics.added_overflow) == (is_lost, float(is_infinite))
    assert numerics.output_error == numerics.overflow == 0
    assert report.rules == (("path:^net/added$",) if is_lost or is_infinite else ())
    if is_lost:
        assert report.culprit is None
        assert "Layer 'net/added': the losses that it adds in bfloat16 are off by " in report.remedies()[0]
    elif is_infinite:
        assert (report.culprit.side, report.culprit.path, report.culprit.float32_cures) == ("loss", "net/added", True)
        assert report.culprit.message.endswith("adds in float16 is not finite: in float32 it is 9e+04")
        assert "Layer 'net/added': losses that it adds are not finite in float16" in report.remedies()[0]
    else:
        assert not report.remedies()
    cured = mpkeras.trace_numerics(mpkeras.prepare(model, report.policy()), *batch, loss_scale=1.0)
    # It counts once, beside a mean square of zeros.
    true = float(loss(ops.full((1,), value)))
    np.testing.assert_allclose(cured.loss, true, rtol=0.01)
    assert cured.culprit is None and not cured.rules


# JAX refuses numbers that it would draw but once.
DRAWS = ["numpy"] if keras.backend.backend() == "jax" else ["keras", "numpy"]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_layer_that_draws_numbers_that_nobody_knows_of_is_not_compared(draw):
    generator = np.random.default_rng(1)

    def noise(x):
        factor = generator.uniform(size=x.shape) if draw == "numpy" else keras.random.uniform(x.shape)
        return x * ops.cast(factor, x.dtype)

    model = network(layers.Lambda(noise, output_shape=lambda shape: shape, name="noise"))
    model = mpkeras.prepare(model, "mixed_bfloat16")
    report = mpkeras.trace_numerics(model, np.ones((4, 4), "float32"), np.zeros((4, 1), "float32"))
    assert not report.remedies()
    assert [layer.output_error for layer in report.layers if layer.path.endswith("noise")] == [0.0]


def test_layers_called_twice_and_inner_models():
    with mpkeras.policy_scope("mixed_float16"):
        model = Subclassed()
    model.compile("sgd", "mse")
    mpkeras.prepare(model, without_outputs("mixed_float16"))
    report = mpkeras.trace_numerics(model, X, Y)
    calls = [(name(layer.path), layer.number) for layer in report.layers]
    assert calls[:2] == [("shared", 0), ("shared", 1)] and len(calls) == 5
    assert name(report.culprit.path) == "boom" and "(call 2)" in str(report)


def test_a_gradient_between_two_calls_of_a_layer_is_not_blamed_on_that_layer():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    shared, steep = layers.Dense(4, name="shared"), Times(down=3e2, name="steep")
    outputs = layers.Dense(2, name="head")(shared(steep(shared(inputs))))
    model = mpkeras.prepare(compiled(keras.Model(inputs, outputs)), "mixed_float16", loss_scale=256.0)
    report = mpkeras.trace_numerics(model, np.ones((3, 4)), np.full((3, 2), 9.0))
    # The weights of `shared` have one gradient for both calls; it is the first one that is given inf.
    assert (report.culprit.side, report.culprit.path) == ("gradient", "steep")
    assert "by its input is not finite" in report.culprit.message


@pytest.mark.slow
def test_sequences_attention_and_wrappers(backend):
    inputs = keras.Input((6, 8))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(inputs)
    x = layers.TimeDistributed(layers.Dense(8))(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    x = Times(3e3, name="boom")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.Flatten()(x)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    mpkeras.prepare(model, "mixed_float16")
    report = mpkeras.trace_numerics(model, np.ones((2, 6, 8), "float32"), np.array([0, 2]))
    assert name(report.culprit.path) == "boom"
    classes = [layer.class_name for layer in report.layers]
    assert {"LSTM", "TimeDistributed", "MultiHeadAttention", "EinsumDense"} <= set(classes)
    assert "LSTMCell" not in classes


def test_what_people_see():
    # A loss scale is a number of any library.
    report = mpkeras.trace_numerics(six_layers(3, up=1e3), X, Y, loss_scale=np.float32(16.0))
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["loss_scale"] == report.loss_scale == 16.0
    text = str(report)
    assert "First culprit: the output of layer 'sequential" in text and "/layer_3' is not finite" in text
    assert "/layer_3$'" in text and "Largest gradient" in text
    figure = report.plot()
    assert len(figure.axes) == 2 and len(figure.axes[0].get_yticklabels()) == 6
    forward = mpkeras.trace_numerics(six_layers(), X)
    assert forward.loss is None and "gradient" not in str(forward) and len(forward.plot().axes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: layers.Dense(2), {}, TypeError, "keras.Model"),
        (lambda: keras.Sequential([keras.Input((8,)), layers.Dense(8)]), {}, ValueError, "compiled with a loss"),
        (six_layers, {"loss_scale": 0.0}, ValueError, "positive finite number"),
        (six_layers, {"loss_scale": True}, ValueError, "positive finite number. Received: loss_scale=True"),
        (lambda: keras.Model(name="gan"), {}, ValueError, "a `call`.*'gan', which has none. Trace the models inside"),
    ],
)
def test_bad_input(model, options, error, message):
    with pytest.raises(error, match=message):
        mpkeras.trace_numerics(model(), X, Y, **options)


def test_ranges_of_hand_worked_arrays():
    found = Range.of([np.array([0.0, -4.0, 0.25, np.inf, np.nan], "float32"), None])
    assert (found.min, found.max, found.max_abs, found.nonfinite, found.zeros, found.size) == (-4, 0.25, 4, 2, 1, 5)
    assert found.exponents.sum() == 2 and found.exponents[45 + 2] == 1 and found.exponents[45 - 2] == 1
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(overflow_limit("float16"))) and np.isfinite(np.float16(65519.0))
    assert overflow_limit("float16") == 65520
    assert np.float16(underflow_limit("float16")) == 0 and np.float16(underflow_limit("float16") * 1.001) > 0
    # Where the reference is 0 nothing was lost.
    assert underflow_share([np.array([0.0, 0.0, 0.0, 2.0])], [np.array([0.0, 1e-9, 0.0, 2.0])]) == 0.25


class OfTwoMatrices(layers.Layer):
    """Multiplies by a product of two weights."""

    def build(self, input_shape):
        self.a = self.add_weight(shape=(input_shape[-1], 257), initializer="ones", name="a")
        self.b = self.add_weight(shape=(257, 1), initializer="ones", name="b")

    def call(self, x):
        return ops.matmul(x, ops.matmul(self.a, self.b))


def in_bfloat16(layer):
    model = keras.Sequential([keras.Input((5, 1)), layer, layers.Dense(1)])
    model.compile("sgd", "mse")
    return mpkeras.prepare(model, "bfloat16")


def test_weights_in_bfloat16_are_read_in_float32_by_the_pass_in_float32():
    report = mpkeras.trace_numerics(in_bfloat16(OfTwoMatrices()), np.ones((2, 5, 1)), np.ones((2, 5, 1)))
    of_two = report.layers[0]
    # 257 is 256 in bfloat16.
    assert (of_two.compute_dtype, of_two.outputs.max_abs, of_two.true_outputs.max_abs) == ("bfloat16", 256.0, 257.0)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_cell_that_adds_parts_of_a_bias_in_bfloat16_runs_in_the_pass_in_float32():
    recurrent = layers.GRU(3, recurrent_initializer="glorot_uniform")
    report = mpkeras.trace_numerics(in_bfloat16(recurrent), np.ones((2, 5, 1)), np.ones((2, 1)))
    assert report.culprit is None and 0 < report.layers[0].true_outputs.max_abs < 1
