"""Recurrent layers in 16 bits over many steps, against float32 and float64."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion import recurrent_states
from mpkeras.policies import default_rules
from tests.cases import first_quick

BACKEND = keras.backend.backend()
SLOW_GATES = keras.initializers.Constant(5.0)
SCALES = np.linspace(0.5, 1.5, 4, dtype="float32")


def scaled(x):
    return ops.sigmoid(x * ops.convert_to_tensor(SCALES))


class OwnCell(layers.GRUCell):
    """A cell with a step of the user's."""

    def call(self, inputs, states, training=False):
        return super().call(inputs, states, training)


def slow_lstm(**options):
    return layers.LSTMCell(4, bias_initializer=SLOW_GATES, unit_forget_bias=False, **options)


# By layer, and by the shape that it takes.
KINDS = {
    "a GRU": (lambda: layers.GRU(5, bias_initializer=SLOW_GATES), (150, 3)),
    "reset before": (lambda: layers.RNN(layers.GRUCell(4, reset_after=False, bias_initializer=SLOW_GATES)), (150, 3)),
    "gate by gate": (lambda: layers.RNN(layers.GRUCell(4, implementation=1, bias_initializer=SLOW_GATES)), (150, 3)),
    "an LSTM backwards": (lambda: layers.RNN(slow_lstm(), go_backwards=True), (150, 3)),
    "both ways": (lambda: layers.Bidirectional(layers.RNN(slow_lstm(), return_sequences=True)), (150, 3)),
    "stacked": (lambda: layers.RNN([slow_lstm(), layers.GRUCell(3, bias_initializer=SLOW_GATES)]), (150, 3)),
    "a count": (lambda: layers.SimpleRNN(3, activation="relu", recurrent_initializer="identity"), (700, 3)),
    "no bias": (lambda: layers.SimpleRNN(2, activation=None, use_bias=False, recurrent_initializer="ones"), (9, 3)),
    "images": (
        lambda: layers.ConvLSTM1D(2, 3, padding="same", bias_initializer=SLOW_GATES, unit_forget_bias=False),
        (150, 4, 2),
    ),
    "in a loop of Python": (lambda: layers.GRU(4, unroll=True, bias_initializer=SLOW_GATES), (24, 3)),
}


def model_of(layer, shape, mask_value=None):
    inputs = keras.Input(shape)
    hidden = inputs if mask_value is None else layers.Masking(mask_value)(inputs)
    return keras.Model(inputs, layers.Dense(2)(layer(hidden)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_adds_up(kind, policy):
    """Gates of 0.993 keep nearly all, and small positive inputs add to it."""
    make, shape = KINDS[kind]
    keras.utils.set_random_seed(4)
    x = np.random.default_rng(2).uniform(0.1, 0.4, size=(3, *shape)).astype("float32")
    x[1, 10:20] = -7.0
    model = model_of(make(), shape, None if kind == "images" else -7.0)
    expected = model.predict(x, verbose=0)
    mpkeras.apply_policy(model, policy)
    error = np.linalg.norm(model.predict(x, verbose=0) - expected) / np.linalg.norm(expected)
    assert error < (0.004 if policy == "mixed_float16" else 0.025)
    mpkeras.apply_policy(model, "float32")
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)


def test_numbers_of_a_count():
    """1,000 steps of 1, where bfloat16 stops at 256."""
    counter = layers.SimpleRNN(
        1, activation=None, kernel_initializer="ones", recurrent_initializer="ones", return_sequences=True
    )
    model = keras.Sequential([keras.Input((1000, 1)), counter, layers.Dense(1, kernel_initializer="ones")])
    mpkeras.apply_policy(model, "mixed_bfloat16")
    counts = model.predict(np.ones((1, 1000, 1)), verbose=0)[0, :, 0]
    # As an output of a hidden layer it is rounded, once.
    np.testing.assert_allclose(counts, np.arange(1, 1001), rtol=1 / 256)


@pytest.mark.slow
def test_a_count_from_batch_to_batch():
    """603 steps of 1 in nine batches: a whole number that bfloat16 does not hold."""
    counter = layers.SimpleRNN(
        1, activation=None, kernel_initializer="ones", recurrent_initializer="ones", stateful=True
    )
    model = keras.Sequential([keras.Input(batch_shape=(2, 67, 1)), counter, layers.Dense(1, kernel_initializer="ones")])
    mpkeras.apply_policy(model, "mixed_bfloat16")
    x, begin = np.ones((2, 67, 1), "float32"), ops.convert_to_tensor([[3.0], [5.0]])
    for _ in range(9):
        model(x)
    np.testing.assert_array_equal(ops.convert_to_numpy(counter.states[0].value), [[603.0], [603.0]])
    # From a state that is handed over, and from none.
    counter(ops.convert_to_tensor(x), initial_state=[begin])
    np.testing.assert_array_equal(ops.convert_to_numpy(counter.states[0].value), [[70.0], [72.0]])
    counter.reset_state()
    model(x)
    np.testing.assert_array_equal(ops.convert_to_numpy(counter.states[0].value), [[67.0], [67.0]])
    mpkeras.apply_policy(model, "float32")
    assert "call" not in vars(counter)


# By layer, and by the shape of a batch. Keras carries a state in all of them.
STATEFUL = {
    "a GRU": (lambda: layers.GRU(3, bias_initializer=SLOW_GATES, stateful=True), (2, 3, 2)),
    "both ways": (lambda: layers.Bidirectional(layers.LSTM(2, stateful=True)), (2, 3, 2)),
    "stacked": (lambda: layers.RNN([slow_lstm(), layers.GRUCell(3)], stateful=True), (2, 3, 2)),
    "images": (lambda: layers.ConvLSTM1D(2, 3, padding="same", stateful=True), (2, 3, 4, 2)),
}


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")  # JAX carries no state from step to step of `fit`
@pytest.mark.parametrize("kind", STATEFUL)
def test_states_are_float32_from_step_to_step(kind):
    make, shape = STATEFUL[kind]
    keras.utils.set_random_seed(8)
    layer = make()
    model = keras.Sequential([keras.Input(batch_shape=shape), layer, layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    x = np.random.default_rng(6).normal(size=(4, *shape)).astype("float32")
    for batch in x:
        model.train_on_batch(batch, np.zeros((2, 1)))
    loops = [layer.forward_layer, layer.backward_layer] if kind == "both ways" else [layer]
    for state in keras.tree.flatten([loop.states for loop in loops]):
        value = ops.convert_to_numpy(state.value)
        rounded = ops.convert_to_numpy(ops.cast(ops.cast(value, "bfloat16"), "float32"))
        assert np.mean(value != rounded) > 0.5


@pytest.mark.parametrize("cell", first_quick([
    lambda **options: layers.SimpleRNNCell(4, **options),
    lambda **options: layers.LSTMCell(4, **options),
    lambda **options: layers.LSTMCell(4, implementation=1, **options),
    lambda **options: layers.GRUCell(4, **options),
    lambda **options: layers.GRUCell(4, reset_after=False, use_bias=False, **options),
]))  # fmt: skip
@pytest.mark.parametrize("rates", [(0.3, 0.4), pytest.param((0.5, 0.0), marks=pytest.mark.slow)])
def test_drops_what_stock_keras_drops(cell, rates):
    """Over four steps, in which stock Keras loses little."""
    x = np.random.default_rng(3).normal(size=(6, 4, 3)).astype("float32")
    outputs = []
    for converts in (False, True):
        with mpkeras.policy_scope("float32"):
            layer = layers.RNN(cell(dropout=rates[0], recurrent_dropout=rates[1], seed=7), return_sequences=True)
            model = model_of(layer, x.shape[1:])
        for number, weight in enumerate(model.weights):
            if weight.dtype == "float32":
                weight.assign(np.random.default_rng(number).normal(size=weight.shape) / 2)
        if converts:
            mpkeras.apply_policy(model, "mixed_bfloat16")
        else:
            layer.dtype_policy = layer.cell.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
        outputs.append(ops.convert_to_numpy(ops.cast(layer(x, training=True), "float32")))
    stock, ours = outputs
    np.testing.assert_allclose(ours, stock, atol=0.03)
    assert np.abs(ours - ops.convert_to_numpy(ops.cast(layer(x, training=False), "float32"))).max() > 0.1


def test_gates_apply_functions_of_the_users_to_float32():
    """One with a constant of its own stops stock Keras on TensorFlow and JAX."""
    x = np.random.default_rng(5).normal(size=(2, 6, 3)).astype("float32")
    model = model_of(layers.LSTM(4, recurrent_activation=scaled), x.shape[1:])
    expected = ops.convert_to_numpy(model(x))
    mpkeras.apply_policy(model, "mixed_float16")
    np.testing.assert_allclose(ops.convert_to_numpy(model(x)), expected, atol=2e-3)


@pytest.mark.parametrize("make, rules, is_changed", first_quick([
    (lambda: layers.RNN(layers.LSTMCell(2)), (), True),
    (lambda: layers.RNN(OwnCell(2)), (), False),
    (lambda: layers.RNN([layers.LSTMCell(2), OwnCell(2)]), (), False),
    (lambda: layers.RNN(layers.LSTMCell(2, name="kept")), ("path:kept",), False),
]))  # fmt: skip
def test_cells_of_the_users_own_take_what_they_took(make, rules, is_changed):
    x = np.random.default_rng(6).normal(size=(2, 4, 3)).astype("float32")
    layer = make()
    model = model_of(layer, x.shape[1:])
    expected = ops.convert_to_numpy(model(x))
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_bfloat16", keep_float32=(*default_rules(), *rules)))
    np.testing.assert_allclose(ops.convert_to_numpy(model(x)), expected, atol=0.03)
    states = []
    original = recurrent_states._step

    def step(*args, **options):
        states.append(args[2])
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_states, "_step", step)
        layer(x)
    assert bool(states) is is_changed


@pytest.mark.parametrize("options, has_mask, is_for_cudnn", [
    ({}, False, True),
    ({}, True, BACKEND == "tensorflow"),
    ({"use_cudnn": False}, False, False),
    ({"unroll": True}, False, False),
    ({"activation": "relu"}, False, False),
    ({"use_bias": False}, False, False),
    ({"recurrent_dropout": 0.1}, False, False),
])  # fmt: skip
def test_the_loop_of_cudnn_is_left_alone(monkeypatch, options, has_mask, is_for_cudnn):
    monkeypatch.setattr(recurrent_states._backend, "has_cudnn", lambda: True)
    x = np.random.default_rng(8).normal(size=(2, 2, 3)).astype("float32")
    layer = layers.LSTM(2, **options)
    mpkeras.apply_policy(model_of(layer, x.shape[1:]), "mixed_bfloat16")
    calls = []

    def step_of_lstm(*args):
        calls.append(args)
        return step(*args)

    step = recurrent_states._STEPS[layers.LSTMCell]
    monkeypatch.setitem(recurrent_states._STEPS, layers.LSTMCell, step_of_lstm)
    layer(x, mask=np.ones((2, 2), "bool") if has_mask else None)
    assert bool(calls) is not is_for_cudnn


@pytest.mark.backends("jax")
@pytest.mark.parametrize("kind", [layers.LSTMCell, layers.GRUCell])
def test_steps_keep_less_than_in_float32(kind):
    """The gates of all steps, which stock Keras keeps, too, would be as large as those of float32."""
    import jax

    x = np.ones((8, 64, 16), "float32")
    kept = []
    for policy in ("float32", "mixed_bfloat16"):
        model = model_of(layers.RNN(kind(32)), x.shape[1:])
        mpkeras.apply_policy(model, policy)
        rest = [weight.value for weight in model.non_trainable_variables]

        def loss(weights, x, model=model, rest=rest):
            return ops.sum(model.stateless_call(weights, rest, x, training=True)[0])

        _, derivative = jax.vjp(loss, [weight.value for weight in model.trainable_weights], x)
        kept.append(sum(values.nbytes for values in jax.tree.leaves(derivative) if values.shape[:1] == (64,)))
    assert kept[1] < 0.6 * kept[0]


def gradients(layer, x):
    import torch

    loss = ops.sum(ops.cast(layer(x), "float32"))
    found = torch.autograd.grad(loss, [weight.value for weight in layer.trainable_weights])
    return [gradient.double().cpu().numpy() for gradient in found]


@pytest.mark.backends("torch")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_the_sum_over_many_steps(kind, policy):
    """Each of 700 steps adds about the same."""
    x = np.full((3, 700, 4), 0.25, "float32")
    layer = kind(6, return_sequences=True)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layers.Dense(1)(layers.Bidirectional(layer)(inputs)))
    mpkeras.apply_policy(model, policy)
    layer = model.layers[1].backward_layer
    assert layer.compute_dtype == policy.removeprefix("mixed_")
    wide = kind.from_config(layer.get_config() | {"dtype": "float64"})
    wide.build(x.shape)
    wide.set_weights(layer.get_weights())
    for found, expected in zip(gradients(layer, x), gradients(wide, x), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    mpkeras.apply_policy(model, "float32")
    assert "inner_loop" not in vars(layer) and layer.use_cudnn == "auto"
