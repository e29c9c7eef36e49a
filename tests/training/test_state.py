"""`state_dict` and `load_state_dict`; that training goes on exactly from them is in `test_resume.py`."""

import keras
import numpy as np
import pytest

from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import training_backend
from mpkeras.training.prepare import prepare
from mpkeras.training.state import load_state_dict, state_dict
from tests.step_modes import snapshot

X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)
Y = np.full((8, 1), 0.1, "float32")
KERNEL, SCALE = "model/0/kernel", "optimizers/0/7/dynamic_scale"


def compiled(dtype=None):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, dtype=dtype),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"], run_eagerly=True)
    return model


def trained():
    """A model with the state of one skipped step."""
    model = prepare(compiled(), "mixed_float16", loss_scale=DynamicLossScale(256.0))
    model.optimizer.build(model.trainable_variables)
    model.test_on_batch(X, Y)
    model.optimizer.skipped_steps.assign(1)
    model.optimizer.dynamic_scale.assign(128.0)
    return model


def everything(model):
    return snapshot(model.variables + model.metrics_variables + model.optimizer.variables)


def test_names_do_not_depend_on_what_the_process_made_before_nor_on_what_is_frozen():
    model = trained()
    first, second = state_dict(trained()), state_dict(model)
    assert list(first) == list(second)
    assert {KERNEL, SCALE, "metrics/0/total"} <= set(first)
    assert any(key.endswith("/seed_generator_state") for key in first)
    assert not any(key.endswith("_1") for key in first)
    model.layers[0].trainable = False
    assert list(state_dict(model)) == list(first)


def test_the_arrays_are_copies():
    model = trained()
    state = state_dict(model)
    as_saved = {key: array.copy() for key, array in state.items()}
    for variable in model.trainable_variables:
        variable.assign(variable + 1.0)
    assert all(np.array_equal(state[key], as_saved[key]) for key in state)


def test_a_new_model_takes_everything(tmp_path):
    model = trained()
    np.savez(tmp_path / "state.npz", **state_dict(model))
    fresh = prepare(compiled(), "mixed_float16", loss_scale=DynamicLossScale(256.0))
    fresh.test_on_batch(X, Y)
    load_state_dict(fresh, np.load(tmp_path / "state.npz"))
    assert everything(fresh) == everything(model)
    assert int(fresh.optimizer.skipped_steps) == 1
    assert float(fresh.optimizer.dynamic_scale) == 128.0


def test_bfloat16_variables_survive_savez(tmp_path):
    """NumPy writes them as two bytes without a type."""
    # Stock Keras trains them; mpkeras refuses.
    model = compiled(dtype="bfloat16")
    model.train_on_batch(X, Y)
    state = state_dict(model)
    assert state[KERNEL].dtype.name == "bfloat16"
    np.savez(tmp_path / "state.npz", **state)
    assert np.load(tmp_path / "state.npz")[KERNEL].dtype == np.dtype("V2")
    as_saved = everything(model)
    model.train_on_batch(X, Y)
    assert everything(model) != as_saved
    load_state_dict(model, np.load(tmp_path / "state.npz"))
    assert everything(model) == as_saved


CHANGES = [
    pytest.param({SCALE: None}, r"without 1 keys \['optimizers/0/7/dynamic_scale'\]", id="missing"),
    pytest.param({"model/99/k": np.zeros(2)}, r"unknown 1 keys \['model/99/k'\]\. Load it into", id="unknown"),
    pytest.param({7: np.zeros(2)}, r"unknown 1 keys \[7\]\. Load it into", id="no name"),
    pytest.param({KERNEL: np.zeros((6, 5), "float32")}, r"shape \(6, 4\).*/kernel'.*shape \(6, 5\)", id="shape"),
    pytest.param({KERNEL: np.zeros((6, 4))}, r"dtype float32.*dtype float64", id="dtype"),
    pytest.param({KERNEL: np.zeros((6, 4), "V2")}, r"dtype float32.*dtype \|V2", id="two bytes for four"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_a_state_that_does_not_fit_changes_nothing(changes, message):
    state = {**state_dict(trained()), **changes}
    state = {key: array for key, array in state.items() if array is not None}
    model = trained()
    before = state_dict(model)
    assert before[KERNEL].tobytes() != state[KERNEL].tobytes()
    with pytest.raises(ValueError, match=message):
        load_state_dict(model, state)
    assert all(np.array_equal(array, before[key]) for key, array in state_dict(model).items())


@pytest.mark.backends("torch")
def test_a_state_goes_on_on_a_machine_with_other_devices(monkeypatch):
    model, other = trained(), trained()
    state = state_dict(model)
    masks = np.arange(16, dtype="uint8")
    with pytest.warns(UserWarning, match=r"a state with \['random/cuda'\], of a machine.*Go on on such a machine"):
        load_state_dict(other, {**state, "random/cuda": masks})
    assert all(np.array_equal(array, state[key]) for key, array in state_dict(other).items())
    # A GPU here, and none there.
    states = training_backend.global_random_states
    monkeypatch.setattr(training_backend, "global_random_states", lambda: {**states(), "cuda": masks})
    with pytest.warns(UserWarning, match=r"a state without \['random/cuda'\]"):
        load_state_dict(other, state)
    # Of another backend, or of no machine.
    for changed in ({**state, "random/tpu": masks}, {key: state[key] for key in state if key != "random/cpu"}):
        with pytest.raises(ValueError, match="random/"):
            load_state_dict(other, changed)


def test_what_is_not_built_is_named():
    fresh = prepare(compiled(), "mixed_float16", loss_scale=DynamicLossScale(256.0))
    with pytest.raises(ValueError, match="metrics are not built yet: call `model.test_on_batch"):
        load_state_dict(fresh, state_dict(trained()))
    with pytest.raises(ValueError, match="Expected a built model.*Call it on a batch"):
        state_dict(keras.Sequential([keras.layers.Dense(1)]))


def test_arguments_of_a_wrong_type_are_named():
    model = trained()
    for arguments, message in (
        ({"optimizers": "adam"}, "optimizers='adam'"),
        ({"optimizers": keras.optimizers.SGD()}, "list, one alone, too: `optimizers="),
        ({"extra": None}, "extra=None"),
        ({"extra": ["count"]}, r"extra=\['count'\]"),
    ):
        with pytest.raises(TypeError, match=message):
            state_dict(model, **arguments)
        with pytest.raises(TypeError, match=message):
            load_state_dict(model, state_dict(model), **arguments)
    with pytest.raises(TypeError, match="Expected a `keras.Model`. Received: None"):
        state_dict(None)
    with pytest.raises(TypeError, match="Expected `state` to be a dictionary of arrays.*Received: None"):
        load_state_dict(model, None)


def test_further_optimizers_and_variables():
    model = trained()
    model.other_optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"Expected built optimizers.*Call `optimizer.build"):
        state_dict(model)
    model.other_optimizer.build(model.layers[-1].trainable_variables)
    counter = keras.Variable(5, dtype="int32", trainable=False, name="epochs_seen")
    state = state_dict(model, extra=[counter])
    assert any(key.startswith("optimizers/1/") and key.endswith("/dynamic_scale") for key in state)
    assert state["extra/0/epochs_seen"] == 5
    chosen = state_dict(model, optimizers=[model.other_optimizer])
    assert not any(key.startswith("optimizers/1/") for key in chosen)
    counter.assign(0)
    model.other_optimizer.dynamic_scale.assign(2.0)
    load_state_dict(model, state, extra=[counter])
    assert int(counter) == 5
    assert float(model.other_optimizer.dynamic_scale) == 2.0**15


def test_within_fit_the_state_is_that_of_the_last_step():
    """JAX keeps it out of the variables until the epoch ends, or a callback asks for its model."""
    seen = []

    class Look(keras.callbacks.Callback):
        def __init__(self, model):
            super().__init__()
            self.own = model

        def on_train_batch_end(self, batch, logs=None):
            seen.append(state_dict(self.own)[KERNEL].tobytes())

    model = prepare(compiled(), "mixed_float16", loss_scale=256.0)
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0, callbacks=[Look(model)])
    assert len(set(seen)) == 2
