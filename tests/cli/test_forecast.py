"""`mpkeras forecast`: what it prints of a file, and one line on bad input."""

import importlib.util
import json

import keras
import pytest
from keras import layers

from tests.cli.lines import lines_of

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed")

printed, failing_line = lines_of("forecast")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = keras.Sequential([keras.Input((None, 24)), layers.Dense(48, "relu"), layers.Dense(8)], name="small")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    path = tmp_path_factory.mktemp("saved") / "small.keras"
    model.save(path)
    return str(path)


@needs_jax
@pytest.mark.slow
def test_a_file_as_it_was_saved(capsys, tmp_path, saved):
    options = ["--batch", "6", "--open-size", "5", "--policy", "mixed_bfloat16", "--plot", str(tmp_path / "plot.png")]
    found = json.loads(printed(capsys, saved, "--device", "cpu", "--json", *options))
    assert (found["device"], found["batch"], list(found["policies"])) == ("cpu", 6, ["mixed_bfloat16"])
    weights = 24 * 48 + 48 + 48 * 8 + 8
    # The weights, and the momentum that the file's optimizer keeps.
    assert 0 <= found["policies"]["mixed_bfloat16"]["persistent_bytes"] - 8 * weights < 100
    # 6 rows of 5 steps each: forward, and to the weights of both layers and the inputs of the second.
    flops = 2 * 30 * (2 * 24 * 48 + 3 * 48 * 8)
    assert sum(found["policies"]["mixed_bfloat16"]["matrix_flops"].values()) == flops
    assert (tmp_path / "plot.png").stat().st_size > 5000


def difference(y, y_pred):
    return y_pred - y


@needs_jax
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*HDF5 file:UserWarning")
def test_an_older_file_and_one_whose_loss_is_not_known_here(capsys, tmp_path, saved):
    model = keras.saving.load_model(saved, compile=False)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.save(tmp_path / "small.h5")
    options = ["--batch", "6", "--open-size", "5", "--policy", "float32", "--device", "cpu", "--json"]

    def state(path):
        return json.loads(printed(capsys, str(path), *options))["policies"]["float32"]["persistent_bytes"]

    assert state(tmp_path / "small.h5") == state(saved)
    model.compile("sgd", difference)
    model.save(tmp_path / "own.keras")
    with pytest.warns(
        UserWarning, match="Adam and the mean squared error stand in: .* not known here .*--import MODULE"
    ):
        assert state(tmp_path / "own.keras") > state(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h10"], "argument --device: Expected `--device` to be one that can be compiled"),
        (["--batch", "0"], "argument --batch: expected a whole number of at least 1, received '0'"),
        (["--policy", "half"], "Received: 'half'. Registered: bfloat16, float16, float32, float64, mixed_auto, mixed_"),
        (["--policy", "float32", "--policy", "float32"], "Received: ['float32', 'float32']. Pass each once."),
        (["--plot", "plot.xyz"], "argument --plot: cannot draw into 'plot.xyz' (Format 'xyz' is not supported"),
        (["--plot", "missing/plot.png"], "argument --plot: cannot draw into 'missing/plot.png' ([Errno 2] No such"),
        (["--devices", "7"], "Expected a batch that 7 devices can share evenly. Received: 32 rows. Pass `--batch 28`."),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, saved, arguments, message):
    monkeypatch.chdir(tmp_path)
    # All of it is said before anything is compiled, and leaves no file.
    monkeypatch.setattr("mpkeras.tools.forecast.forecast.Compiler", None)
    assert message in failing_line(capsys, saved, *arguments)
    assert list(tmp_path.iterdir()) == []
