"""One meaning, whichever door: the same model trained through each way in is the same model afterwards."""

import keras
import numpy as np
import pytest

import mpkeras

POLICY = mpkeras.Policy(
    "mixed_float16",
    keep_float32=(*mpkeras.Policy("mixed_float16").keep_float32, "path:wide"),
    loss_scale=mpkeras.DynamicLossScale(2.0**12, dynamic_growth_steps=3),
)
X = np.random.default_rng(3).normal(size=(48, 6)).astype("float32")
Y = np.random.default_rng(4).integers(0, 3, size=(48,))
# The third of six batches overflows in float16: its loss is NaN. (A ReLU can swallow a NaN on TensorFlow.)
X[17] = 1e38
LEARNING_RATE = 0.05


def made():
    keras.utils.set_random_seed(11)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="narrow"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, "tanh", name="wide"),
            keras.layers.Dense(3, "softmax", name="head"),
        ]
    )


def compiled(model):
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "sparse_categorical_crossentropy")
    return model


def fit(model, callbacks=()):
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks)).history
    return {name: history[name][-1] for name in ("loss_scale", "skipped_steps")}


def by_callback():
    model = compiled(made())
    return model, fit(model, [mpkeras.callbacks.MixedPrecision(POLICY)])


def by_prepare():
    model = mpkeras.prepare(compiled(made()), POLICY)
    return model, fit(model)


def by_autoprepare():
    with mpkeras.autoprepare(POLICY):
        model = compiled(made())
    return model, fit(model)


def by_the_line():
    mpkeras.set_global_policy(POLICY)
    model = compiled(made())
    return model, fit(model)


def by_apply_policy_and_step():
    model = mpkeras.apply_policy(made(), POLICY)
    with mpkeras.policy_scope(POLICY):
        step = mpkeras.make_train_step(model, keras.optimizers.SGD(LEARNING_RATE), "sparse_categorical_crossentropy")
    for start in range(0, len(X), 8):
        step(X[start : start + 8], Y[start : start + 8])
    optimizer = step.optimizer
    return model, {"loss_scale": float(optimizer.loss_scale), "skipped_steps": int(optimizer.skipped_steps)}


def in_float32_without_the_bad_batch():
    model = compiled(made())
    good = np.delete(np.arange(len(X)), np.arange(16, 24))
    model.fit(X[good], Y[good], batch_size=8, shuffle=False, verbose=0)
    return model.get_layer("head").kernel.numpy()


DOORS = [by_callback, by_prepare, by_autoprepare, by_the_line, by_apply_policy_and_step]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 of 6 steps skipped:UserWarning")  # said where there are epochs
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_layers_rules_checks_and_logs(door):
    model, logs = door()
    mpkeras.set_global_policy(None)
    assert {layer.name: layer.compute_dtype for layer in model.layers if layer.weights} == {
        "narrow": "float16",
        model.layers[1].name: "float32",
        "wide": "float32",
        "head": "float32",
    }
    # Two finite steps, a skipped one that halves nothing, as its loss itself is NaN, and three finite ones: the scale
    # doubles once, on the first or on the third of them.
    assert logs == {"loss_scale": 2.0**13, "skipped_steps": 1}
    kernel = model.get_layer("head").kernel
    np.testing.assert_allclose(kernel, in_float32_without_the_bad_batch(), rtol=5e-3, atol=1e-3)  # 11 bits
