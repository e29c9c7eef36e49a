"""Kinds of layers, policies and parts of a step that are computed again: their numbers are those without.

One of the three batches is bad. What it leaves is compared with what it leaves in a training that keeps everything.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from tests.conversion.test_remat import ROWS, TARGETS, TOKENS, Branches, recurrent, replaced_on, transformer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* steps skipped in epoch", "ignore:Step .* was skipped"),
]
# The second of three batches of 8, whose gradients are not finite.
BAD_ROW = 11


def residual(make_inner):
    """Returns a model of three blocks, with the layer that `make_inner()` returns in each."""
    x = inputs = keras.Input((16,))
    for _ in range(3):
        x = layers.Add()([x, make_inner()(layers.Dense(16, "tanh")(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


def inner_model(name=None):
    return keras.Sequential([keras.Input((16,)), layers.Dense(16, "tanh"), layers.Dropout(0.2)], name=name)


def with_nested_models():
    x = inputs = keras.Input((16,))
    for _ in range(3):
        x = layers.Add()([x, inner_model()(x)])
    return keras.Model(inputs, layers.Dense(1)(x))


def with_shared_layers():
    shared, norm = layers.Dense(16, "tanh"), layers.BatchNormalization()
    x = inputs = keras.Input((16,))
    for _ in range(3):
        x = layers.Add()([x, norm(shared(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


def with_dropout():
    return residual(lambda: layers.Dropout(0.3))


def accumulating():
    return keras.optimizers.SGD(1e-2, gradient_accumulation_steps=2)


# Name: model, inputs, policy, optimizer, tolerance of losses. XLA joins other operations, and rounds elsewhere.
KINDS = {
    "dropout": (with_dropout, ROWS, "float32", None, 1e-5),
    "dropout in float16": (with_dropout, ROWS, "mixed_float16", None, 2e-2),
    "statistics": (lambda: residual(layers.BatchNormalization), ROWS, "float32", None, 1e-5),
    "causal attention": (transformer, TOKENS, "float32", None, 1e-5),
    "LSTM": (recurrent, TOKENS, "float32", None, 1e-5),
    "nested models": (with_nested_models, ROWS, "float32", None, 1e-5),
    "subclassed": (Branches, ROWS, "float32", None, 1e-5),
    "shared layers": (with_shared_layers, ROWS, "float32", None, 1e-5),
    "float8": (lambda: residual(lambda: layers.Dense(16)), ROWS, "mixed_float8", None, 5e-2),
    "small state": (with_dropout, ROWS, "bfloat16", None, 5e-2),
    "accumulation": (with_dropout, ROWS, "float32", accumulating, 1e-5),
}


def prepared(kind, remat):
    make, x, policy, optimizer, _ = KINDS[kind]
    keras.utils.set_random_seed(5)
    model = make()
    if not model.built:
        model.build((None, x.shape[1]))
    model.compile(keras.optimizers.SGD(1e-2, 0.5) if optimizer is None else optimizer(), "mse")
    return mpkeras.prepare(model, policy, loss_scale=64.0, remat=remat)


def trained(kind, remat, callbacks=()):
    """Returns the losses of 9 steps, the model after them, and how many steps were skipped."""
    model = prepared(kind, remat)
    y = TARGETS.copy()
    y[BAD_ROW] = np.nan
    keras.utils.set_random_seed(6)
    losses: list = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(KINDS[kind][1], y, callbacks=[log, *callbacks], **options).history
    return losses, model, int(history["skipped_steps"][-1])


def counts(variable) -> bool:
    return any(word in variable.path for word in ("seed", "count", "iteration"))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_with_a_bad_batch_are_those_without(kind):
    plain, _, skipped = trained(kind, None)
    again, model, skipped_again = trained(kind, "blocks")
    reference = trained(kind, None)[1]
    assert mpkeras.audit(model).computed_again and not mpkeras.audit(reference).computed_again
    assert skipped == skipped_again > 0
    assert np.isfinite(again).tolist() == np.isfinite(plain).tolist()
    tolerance = KINDS[kind][4]
    np.testing.assert_allclose(again, plain, rtol=tolerance, atol=tolerance / 10)
    for variable, expected in zip(model.variables, reference.variables, strict=True):
        value, expected = (ops.convert_to_numpy(ops.cast(v, "float32")) for v in (variable, expected))
        if counts(variable):
            np.testing.assert_array_equal(value, expected, err_msg=variable.path)
        else:
            np.testing.assert_allclose(value, expected, rtol=10 * tolerance, atol=tolerance, err_msg=variable.path)
    if kind == "float8":
        assert "float8" in str(mpkeras.audit(model))


@pytest.mark.parametrize("kind", ["dropout in float16", "statistics", "LSTM"])
@pytest.mark.parametrize("door", ["fit", "step"])
def test_a_kept_step_computes_again_and_has_the_same_bits(kind, door, tmp_path):
    x, y = KINDS[kind][1], TARGETS.copy()
    y[BAD_ROW] = np.inf
    if door == "fit":
        box = mpkeras.callbacks.BlackBox(tmp_path)
        trained_model = trained(kind, "blocks", [box])[1]
        path = box.capsules[0]
    else:
        trained_model = prepared(kind, None)
        mpkeras.apply_policy(trained_model, KINDS[kind][2])
        step = mpkeras.make_train_step(trained_model, keras.optimizers.SGD(1e-2), "mse", remat="blocks")
        step(x[:8], y[:8])
        assert bool(step(x[8:16], y[8:16])["skipped"])
        path = tmp_path / "step.mpk"
        step.capsule(path)
    capsule = mpkeras.load_capsule(path)
    assert capsule.run()["same_bits"] and capsule.first_operation().where == "y"
    # Paths may be others: Keras numbers operations, and leaves out the names of Sequential models.
    parts = (mpkeras.audit(model).computed_again for model in (capsule.model, trained_model))
    assert len(next(parts)) == len(next(parts)) > 0
    assert replaced_on(capsule.model) == replaced_on(trained_model)
