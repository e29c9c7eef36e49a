"""What users may rely on: the names, an import that changes nothing, and models that need no mpkeras."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.tools.forecast.memory_plan import MemoryPlan


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
def test_importing_loads_no_tool_until_it_is_asked_for():
    code = """
import sys, mpkeras

def tools():
    return sorted(name for name in sys.modules if name.startswith("mpkeras.tools."))

assert not tools(), tools()
assert set(mpkeras.__all__) <= set(dir(mpkeras)), dir(mpkeras)
mpkeras.callbacks.BlackBox, mpkeras.hardware
assert not hasattr(mpkeras, "hardwear") and not hasattr(mpkeras.callbacks, "Blackbox")
print(*tools())
"""
    loaded = set(run(code).splitlines()[-1].split())
    assert {"mpkeras.tools.blackbox.black_box", "mpkeras.tools.advise.hardware"} <= loaded
    assert "mpkeras.tools.forecast.memory_plan" not in loaded


@pytest.mark.slow
def test_what_a_file_holds_of_a_plan_is_read_without_the_tool_that_makes_plans():
    """The policy: the class of the plan is not there to be found by its name, as nobody has imported it."""
    policy = mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16", remat="blocks")
    config = {
        "module": MemoryPlan.__module__,
        "class_name": MemoryPlan.__name__,
        "config": policy.get_config(),
        "registered_name": keras.saving.get_registered_name(MemoryPlan),
    }
    code = f"""
import sys, keras, mpkeras
policy = keras.saving.deserialize_keras_object({config!r})
assert not any(name.startswith("mpkeras.tools.") for name in sys.modules)
print(type(policy).__name__, policy.name, policy.slot_dtype, policy.remat)
"""
    assert run(code).endswith("Policy mixed_bfloat16 bfloat16 blocks")


@pytest.mark.slow
def test_a_trained_model_and_its_weights_load_where_mpkeras_cannot_be_imported(tmp_path):
    """G8. Plain Keras leaves out the optimizer's state in a file of weights, and says so where there is one."""

    def new_model():
        inputs = keras.Input((4,))
        x = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(inputs))
        return keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))

    model, data = new_model(), np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)
    model.compile("adam", "mse")
    model.fit(data, data[:, :2], verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_float16")])
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    expected = keras.ops.convert_to_numpy(model(data))
    code = """
import sys, warnings
sys.modules["mpkeras"] = None
import keras, numpy as np
folder = sys.argv[1]
model = keras.saving.load_model(folder + "/model.keras", compile=False)
data = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)
out = keras.ops.convert_to_numpy(keras.ops.cast(model(data), "float32"))
print(" ".join(layer.compute_dtype for layer in model.layers[1:]))
print(" ".join(repr(float(v)) for v in out.ravel()))
kernel = model.layers[1].kernel
trained = keras.ops.convert_to_numpy(kernel)
kernel.assign(0.0 * kernel)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.load_weights(folder + "/model.weights.h5")
    before = len(caught)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder + "/model.weights.h5")
print((keras.ops.convert_to_numpy(kernel) == trained).all(), before, caught[-1].message)
"""
    dtypes, values, weights = run(code, str(tmp_path)).splitlines()[-3:]
    assert dtypes == "float16 float32 float32"
    np.testing.assert_array_equal(np.array(values.split(), float), expected.astype(float).ravel())
    assert weights.startswith("True 0 Skipping variable loading for optimizer 'adam'")
