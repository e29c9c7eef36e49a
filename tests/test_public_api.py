"""What users may rely on: the names, an import that changes nothing, and models that need no mpkeras."""

import os
import subprocess
import sys

import keras
import pytest

import mpkeras


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("name", mpkeras.__all__)
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(mpkeras, name)
    assert name == "__version__" or (thing.__doc__ or "").strip()


@pytest.mark.slow
def test_importing_changes_nothing_of_keras():
    """G1: every attribute of every loaded module and class of Keras is the same object as before."""
    code = """
import sys, types, keras

def picture():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name == "keras" or name.startswith("keras."):
            for key, value in list(vars(module).items()):
                seen[name, key] = id(value)
                if isinstance(value, type) and value.__module__.startswith("keras"):
                    seen.update({(name, key, k): id(v) for k, v in list(vars(value).items())})
    return seen

before = picture()
policy = keras.config.dtype_policy()
import mpkeras
after = picture()
# The registries of custom objects are there to be added to; submodules become attributes when imported.
changed = [k for k in before if before[k] != after.get(k) and not k[-1].startswith("__")
           and "_abc_" not in k[-1]]
assert not changed, changed
assert keras.config.dtype_policy() == policy
print("same")
"""
    assert run(code).endswith("same")


@pytest.mark.slow
def test_importing_loads_no_other_backend_and_nothing_heavy(backend):
    code = """
import sys, keras
before = set(sys.modules)
import mpkeras
print(" ".join(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(run(code).splitlines()[-1].split())
    assert not loaded & ({"tensorflow", "jax", "torch"} - {backend})
    assert not loaded & {"sklearn", "matplotlib", "rich", "pandas", "scipy", "hypothesis"}


@pytest.mark.slow
def test_policy_from_the_environment():
    code = "import mpkeras, keras; print(mpkeras.global_policy().name, keras.config.dtype_policy().name)"
    assert run(code, MPKERAS_POLICY="mixed_bfloat16").endswith("mixed_bfloat16 mixed_bfloat16")


@pytest.mark.slow
def test_a_trained_model_loads_where_mpkeras_cannot_be_imported(tmp_path):
    """G8"""
    import numpy as np

    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))
    model.compile("adam", "mse")
    data = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)
    model.fit(data, data[:, :2], verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_float16")])
    path = tmp_path / "model.keras"
    model.save(path)
    expected = keras.ops.convert_to_numpy(model(data))
    code = """
import sys
sys.modules["mpkeras"] = None
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1], compile=False)
data = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)
out = keras.ops.convert_to_numpy(keras.ops.cast(model(data), "float32"))
print(" ".join(layer.compute_dtype for layer in model.layers[1:]))
print(" ".join(repr(float(v)) for v in out.ravel()))
"""
    dtypes, values = run(code, str(path)).splitlines()[-2:]
    assert dtypes == "float16 float32 float32"
    np.testing.assert_array_equal(np.array(values.split(), float), expected.astype(float).ravel())


@pytest.mark.slow
def test_a_weights_file_loads_where_mpkeras_cannot_be_imported(tmp_path):
    """Plain Keras takes the weights. It leaves out the optimizer's state, and says so where there is one."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    mpkeras.prepare(model, "mixed_float16").optimizer.build(model.trainable_variables)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    code = """
import sys, warnings
sys.modules["mpkeras"] = None
import keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.load_weights(sys.argv[1])
    before = len(caught)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(sys.argv[1])
print(before, caught[-1].message)
print(" ".join(repr(float(v)) for v in keras.ops.convert_to_numpy(model.layers[0].kernel).ravel()))
"""
    warned, values = run(code, str(path)).splitlines()[-2:]
    assert warned.startswith("0 Skipping variable loading for optimizer 'adam'")
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel)
    assert values.split() == [repr(float(v)) for v in kernel.ravel()]
