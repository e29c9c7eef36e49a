"""G6: training goes on exactly from every format, in a new process and under another global policy."""

import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.prepare import prepare
from tests.step_modes import snapshot
from tests.training import resume_program

ROOT = Path(__file__).parents[2]
# As in setup.cfg: NumPy 2 on TensorFlow variables.
NOT_OURS = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def run(command, directory):
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", NOT_OURS, "-m", "tests.training.resume_program", command, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder with every outcome, and what the runs without interruption came to."""
    directory = tmp_path_factory.mktemp("resume")
    resume_program.first_half(directory)
    killed = run("kill", directory)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    _check_that_the_files_hold_a_state_away_from_its_defaults(directory)
    done = run("resume", directory)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory, {dropout: resume_program.whole_run(dropout) for dropout in (False, True)}


def _check_that_the_files_hold_a_state_away_from_its_defaults(directory):
    # Here and not in a test of its own, for which another worker would run the programs once more.
    def saved(file):
        state = np.load(directory / file)
        return {key.rpartition("/")[2]: state[key].item() for key in state if state[key].shape == ()}

    # 1024 -> 4096 (two finite steps) -> 2048 (two overflows in a row) -> 8192, and one overflow since
    half = saved("state.npz")
    assert (half["dynamic_scale"], half["hysteresis_counter"]) == (8192.0, 1)
    assert (half["skipped_steps"], half["consecutive_skips"], half["last_step_skipped"]) == (6, 1, True)
    assert saved("middle.npz")["step_counter"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), resume_program.CASES)
def test_training_goes_on_exactly(resumed, name, policy):
    """P19: the optimizer whose state is saved is the one that a file makes."""
    if name in resume_program.TF_FORMATS and keras.backend.backend() != "tensorflow":
        pytest.skip("for tensorflow")
    directory, whole = resumed
    expected = whole[name in resume_program.WITH_DROPOUT]
    outcome = np.load(directory / f"{name} {policy}.npz")
    if name in resume_program.WITHOUT_START:
        expected = {key: array for key, array in expected.items() if not key.startswith("start")}
    assert set(outcome) >= set(expected)
    different = [key for key in expected if outcome[key].tobytes() != expected[key].tobytes()]
    if name in ("killed", "killed.keras"):
        # Keras' files hold no metrics: the means over the broken epoch are those of its last batches.
        different = [key for key in different if key not in ("loss", "mae")]
        assert [outcome[key][-1] for key in ("loss", "mae")] == [expected[key][-1] for key in ("loss", "mae")]
    assert not different


def stock_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A model that stock Keras trained, and the folder of its files."""
    # Before any test's own seed: with weights far from the targets a third step would overflow.
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("mixed_float16")
    model = stock_model()
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    x, y = np.ones((4, 6), "float32"), np.ones((4, 1), "float32")
    for target in (1e6 * y, 1e6 * y, y, y, y):
        model.train_on_batch(x, target)
    directory = tmp_path_factory.mktemp("stock")
    model.save(directory / "stock.keras")
    model.save_weights(directory / "stock.weights.h5")
    keras.config.set_dtype_policy("float32")
    return model, directory


def loaded_by_keras(directory):
    # Keras puts its loss scaling on a loaded model under this global policy only.
    keras.config.set_dtype_policy("mixed_float16")
    return prepare(keras.saving.load_model(directory / "stock.keras"))


def loaded_and_compiled(directory):
    model = keras.saving.load_model(directory / "stock.keras", compile=False)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return with_weights(prepare(model), directory / "stock.keras")


def built_anew(directory):
    return with_weights(prepare(stock_model(), "mixed_float16"), directory / "stock.weights.h5")


def with_weights(model, path):
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("load", [loaded_by_keras, loaded_and_compiled, built_anew])
def test_files_of_stock_keras_go_on_with_their_scale(stock, load):
    trained, directory = stock
    model = load(directory)
    optimizer = model.optimizer
    assert isinstance(optimizer, LossScaleOptimizer)
    assert float(optimizer.dynamic_scale) == 2.0**13
    assert int(optimizer.step_counter) == int(optimizer.iterations) == 3
    assert snapshot(model.variables) == snapshot(trained.variables)
    assert snapshot(optimizer.inner_optimizer.variables) == snapshot(trained.optimizer.inner_optimizer.variables)
    assert np.isfinite(float(model.train_on_batch(np.ones((4, 6)), np.ones((4, 1)))))
    assert int(optimizer.iterations) == 4


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_checkpoint_holds_random_states_in_float32_again_too(tmp_path):
    import tensorflow as tf

    def model_in_float32_again(seed):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5, seed=seed), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callbacks = [mpkeras.callbacks.MixedPrecision("mixed_bfloat16")]
        model.fit(np.ones((4, 6)), np.ones((4, 1)), batch_size=2, verbose=0, callbacks=callbacks)
        return mpkeras.apply_policy(model, "float32")

    model, other = map(model_in_float32_again, (3, 5))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "tf"))
    tf.train.Checkpoint(model=other).read(path).assert_consumed()
    states = [snapshot([m.layers[0].seed_generator.state]) for m in (model, other)]
    assert states[0] == states[1]
