"""G8: models trained in mixed precision give the same numbers where mpkeras cannot be imported."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.tools.export.convert import convert
from tests.sixteen_bits import without_outputs

IMAGES = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(4, 5)).astype("float32")

LOAD = """
import sys
from pathlib import Path
sys.modules["mpkeras"] = None
import keras, numpy as np
folder = Path(sys.argv[1])
images = np.load(folder / "images.npy")
for path in sorted(folder.glob("*.keras")):
    model = keras.saving.load_model(path)
    outputs = keras.tree.flatten(model(images))
    dtypes = [keras.backend.standardize_dtype(output.dtype) for output in outputs]
    arrays = [keras.ops.convert_to_numpy(keras.ops.cast(output, "float32")) for output in outputs]
    np.savez(path.with_suffix(".npz"), *arrays)
    print(path.stem, *dtypes)
"""
GO_ON = """
import json, sys, warnings
from pathlib import Path
sys.modules["mpkeras"] = None
import keras, numpy as np
folder = Path(sys.argv[1])
rows, targets = (np.load(folder / f"{name}.npy") for name in ("rows", "targets"))
for path in sorted(folder.glob("*.keras")):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.saving.load_model(path)
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer
    values = [keras.ops.convert_to_numpy(variable.value) for variable in inner.variables]
    found = {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        "inner": type(inner).__name__,
        "iterations": int(inner.iterations),
        "scale": float(optimizer.dynamic_scale),
        "finite_steps": int(optimizer.step_counter),
        "growth": optimizer.dynamic_growth_steps,
        "warnings": [str(one.message) for one in caught],
        "outputs": keras.ops.convert_to_numpy(keras.ops.cast(model(rows), "float32")).tolist(),
        "slots": [float(np.sum(np.abs(value.astype("float64")))) for value in values],
    }
    found["loss"] = float(model.fit(rows, targets, verbose=0).history["loss"][0])
    print(path.stem, json.dumps(found))
"""
SERVE = """
import sys
from pathlib import Path
sys.modules["mpkeras"] = sys.modules["keras"] = None
import numpy as np, tensorflow as tf
folder = Path(sys.argv[1])
images = np.load(folder / "images.npy")
for path in sorted(folder.glob("*_served")):
    loaded = tf.saved_model.load(str(path))
    output = loaded.signatures["serving_default"](tf.constant(images))["output_0"]
    np.savez(str(path) + ".npz", output.numpy())
    print(path.name, output.dtype.name)
"""


ROWS = np.random.default_rng(2).normal(size=(8, 6)).astype("float32")
ROW_TARGETS = np.random.default_rng(3).normal(size=(8, 2)).astype("float32")


def run(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split(maxsplit=1) for line in done.stdout.strip().splitlines()]


def cnn():
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))


def with_softmax():
    model = cnn()
    return keras.Model(model.inputs, keras.layers.Softmax()(model.outputs[0]))


def residual():
    x = inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(8, 3, strides=2)(x)
    for _ in range(3):
        y = keras.layers.BatchNormalization()(x)
        y = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(y)
        x = keras.layers.Add()([x, keras.layers.Dropout(0.2)(y)])
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))


def nested():
    inputs = keras.Input((32, 32, 3))
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.Activation("relu")(cnn()(inputs))))


def application():
    """A backbone as one fine-tunes it, frozen; without the weights."""
    backbone = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), include_top=False, pooling="avg")
    backbone.trainable = False
    inputs = keras.Input((32, 32, 3))
    return keras.Model(inputs, keras.layers.Dense(5)(backbone(inputs)))


# Not compiled by XLA, of which a saved model knows nothing.
def by_callback(model, policy):
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(IMAGES, TARGETS, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model


def by_prepare(model, policy):
    model.compile("sgd", "mse", jit_compile=False)
    mpkeras.prepare(model, policy).train_on_batch(IMAGES, TARGETS)
    return model


def by_prepare_with_remat(model, policy):
    model.compile("sgd", "mse", jit_compile=False)
    mpkeras.prepare(model, policy, remat="blocks").train_on_batch(IMAGES, TARGETS)
    assert "again" in {entry.kind for entry in replaced_attributes(model)}
    return model


def by_apply_policy(model, policy):
    mpkeras.apply_policy(model, policy)
    mpkeras.make_train_step(model, keras.optimizers.SGD(0.01), "mse", jit_compile=False)(IMAGES, TARGETS)
    return model


def by_apply_policy_alone(model, policy):
    """For a large model, of which a step is traced for longer than all else here takes."""
    return mpkeras.apply_policy(model, policy)


# What a model is, how it became mixed, under which policy, and the dtype of its output.
CASES = {
    "callback": (cnn, by_callback, without_outputs("mixed_float16"), "float32"),
    "prepare": (with_softmax, by_prepare, "mixed_float16", "float32"),
    "remat": (residual, by_prepare_with_remat, "mixed_bfloat16", "float32"),
    "apply_policy": (cnn, by_apply_policy, "mixed_float16", "float32"),
    "apply_policy_softmax": (with_softmax, by_apply_policy, "mixed_bfloat16", "float32"),
    "nested": (nested, by_apply_policy, "mixed_float16", "float32"),
    "nested_callback": (nested, by_callback, without_outputs("mixed_bfloat16"), "float32"),
    "application": (application, by_apply_policy_alone, "mixed_float16", "float32"),
}


def dense(optimizer):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@keras.saving.register_keras_serializable("tests")
class Halving(mpkeras.LossScale):
    """A rule that is known here alone, with a state of its own."""

    def initial_state(self):
        return {"dynamic_scale": 64.0, "steps": 0}

    def next_state(self, state, is_finite):
        return {"dynamic_scale": keras.ops.maximum(state["dynamic_scale"] * 0.5, 1.0), "steps": state["steps"] + 1}

    def get_config(self):
        return {}


def with_callback(policy, **options):
    def train(model):
        precision = mpkeras.callbacks.MixedPrecision(policy, **options)
        model.fit(ROWS, ROW_TARGETS, batch_size=4, verbose=0, callbacks=[precision])

    return train


def with_prepare(policy, **options):
    def train(model):
        mpkeras.prepare(model, policy, **options).fit(ROWS, ROW_TARGETS, batch_size=4, verbose=0)

    return train


def with_plain_fit(model):
    model.fit(ROWS, ROW_TARGETS, batch_size=4, verbose=0)


NEVER = 2**31 - 1
# The optimizer given to `compile`, how two steps are trained, and what plain Keras goes on with: the scale, the finite
# steps in a row, and the steps before the scale grows.
COMPILED = {
    "prepare": ("adam", with_prepare("mixed_float16", loss_scale=mpkeras.DynamicLossScale(64.0)), 64.0, 2, 2000),
    "callback": (
        keras.optimizers.SGD(0.125, momentum=0.5),
        # At the default of 2**15 a gradient near 2, which some shufflings of the rows have, overflows.
        with_callback("mixed_float16", loss_scale=mpkeras.DynamicLossScale(128.0)),
        128.0,
        2,
        2000,
    ),
    "bounds": (
        "adam",
        with_prepare("mixed_float16", loss_scale=mpkeras.DynamicLossScale(64.0, 4.0, 0.25, 2, 0.5, 512.0, 3)),
        256.0,
        0,
        2,
    ),
    "fixed": ("adam", with_prepare("mixed_float16", loss_scale=16.0), 16.0, 0, NEVER),
    "own_rule": ("adam", with_prepare("mixed_float16", loss_scale=Halving()), 16.0, 0, 2000),
    "bfloat16": ("adam", with_prepare("mixed_bfloat16"), 1.0, 0, NEVER),
    "small_slots": (
        "adam",
        with_prepare(mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")),
        1.0,
        0,
        NEVER,
    ),
    "small_weights": ("adam", with_prepare("bfloat16"), 1.0, 0, NEVER),
    "plain_fit": (lambda: mpkeras.LossScaleOptimizer("adam", 32.0, 5), with_plain_fit, 32.0, 2, 5),
}


def predictions(model, inputs=IMAGES):
    outputs = keras.tree.flatten(model(inputs))
    return [keras.ops.convert_to_numpy(keras.ops.cast(output, "float32")) for output in outputs]


# On JAX tests/test_public_api.py loads a trained model; here each operation of a large one is compiled by itself.
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.slow
# Keras 3.10 warns of the structure of inputs for any Functional model that it has loaded.
@pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")
def test_saved_models_load_and_give_the_same_numbers(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    expected, dtypes = {}, {}
    for name, (make, train, policy, dtype) in CASES.items():
        model = train(make(), policy)
        model.save(tmp_path / f"{name}.keras")
        expected[name], dtypes[name] = predictions(model), dtype
    convert(tmp_path / "callback.keras", tmp_path / "converted.keras", "mixed_bfloat16")
    expected["converted"] = predictions(keras.saving.load_model(tmp_path / "converted.keras"))
    dtypes["converted"] = "float32"

    assert dict(run(LOAD, tmp_path)) == dtypes
    for name, arrays in expected.items():
        with np.load(tmp_path / f"{name}.npz") as found:
            for array, key in zip(arrays, found.files, strict=True):
                np.testing.assert_array_equal(found[key], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")
def test_a_compiled_model_goes_on_in_plain_keras(tmp_path):
    """With its optimizer's state and loss scale, and without a warning."""
    np.save(tmp_path / "rows.npy", ROWS)
    np.save(tmp_path / "targets.npy", ROW_TARGETS)
    expected = {}
    for name, (optimizer, train, scale, finite_steps, growth) in COMPILED.items():
        model = dense(optimizer() if callable(optimizer) else optimizer)
        train(model)
        model.save(tmp_path / f"{name}.keras")
        inner = model.optimizer.inner_optimizer
        expected[name] = {
            "class": "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
            "inner": type(inner).__name__,
            "iterations": 2,
            "scale": scale,
            "finite_steps": finite_steps,
            "growth": growth,
            "warnings": [],
            "outputs": predictions(model, ROWS)[0].tolist(),
            "slots": [
                float(np.sum(np.abs(keras.ops.convert_to_numpy(v.value).astype("float64")))) for v in inner.variables
            ],
        }
    found = {name: json.loads(line) for name, line in run(GO_ON, tmp_path)}
    losses = {name: row.pop("loss") for name, row in found.items()}
    assert found == expected
    assert all(np.isfinite(loss) for loss in losses.values())


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_saved_model_is_served_by_tensorflow_alone(tmp_path):
    import tensorflow as tf

    np.save(tmp_path / "images.npy", IMAGES)
    expected = {}
    for name in ("apply_policy", "apply_policy_softmax", "nested", "application"):
        make, train, policy, _ = CASES[name]
        model = train(make(), policy)
        model.export(tmp_path / f"{name}_served", verbose=False)
        # A graph, as what is served: operation by operation TensorFlow may choose other kernels.
        expected[f"{name}_served"] = tf.function(model)(IMAGES).numpy()
    assert dict(run(SERVE, tmp_path)) == dict.fromkeys(expected, "float32")
    for name, array in expected.items():
        with np.load(tmp_path / f"{name}.npz") as found:
            np.testing.assert_array_equal(found["arr_0"], array, err_msg=name)
