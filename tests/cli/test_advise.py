"""`mpkeras advise MODEL`: what it prints, and one line with status 2 for what it cannot use."""

import json

import keras
import numpy as np
import pytest

from _mpkeras_cli.saved_model import _losses, random_inputs
from mpkeras.devices.native import Device
from tests.cases import first_quick
from tests.cli.lines import lines_of

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

printed, failing_line = lines_of("advise")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    inputs = keras.Input((4,), name="features")
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return path


@pytest.mark.slow
def test_random_inputs_and_a_stand_in_loss_are_said(capsys, path):
    text = printed(capsys, path, "--batch-size", "5", "--budget", "3")
    assert "trained on 5 examples a step" in text
    assert "random numbers; the mean square of the outputs stood in for the loss" in text


@pytest.mark.slow
def test_data_and_the_loss_of_the_file(capsys, path, tmp_path):
    np.savez(tmp_path / "batch.npz", x=np.ones((6, 4), "float32"), y=np.ones((6, 3), "float32"))
    result = json.loads(printed(capsys, path, "--data", tmp_path / "batch.npz", "--budget", "3", "--json"))
    assert "with the loss that the model was saved with" in result["advice"][-1]
    assert any("trained on 6 examples" in line for line in result["advice"])
    assert result["policy"] and len(result["cells"]) >= 3


@pytest.mark.slow
def test_inputs_by_name_and_no_targets(capsys, path, tmp_path):
    np.savez(tmp_path / "batch.npz", features=np.ones((6, 4), "float32"))
    text = printed(capsys, path, "--data", tmp_path / "batch.npz", "--budget", "2", "--batch-size", "2")
    assert "trained on 2 examples" in text and "stood in for the loss: no targets" in text


def two_outputs():
    inputs = keras.Input((4,), name="features")
    outputs = [keras.layers.Dense(units, name=name)(inputs) for name, units in (("weight", 2), ("age", 1))]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), ["mae", keras.losses.Huber()])
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*HDF5 file:UserWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", first_quick(["model.keras", "model.h5"]))
def test_several_outputs_and_the_loss_of_an_older_file(capsys, tmp_path, name):
    two_outputs().save(tmp_path / name)
    targets = {"age": np.ones((5, 1)), "weight": np.ones((5, 2))}
    np.savez(tmp_path / "batch.npz", features=np.ones((5, 4), "float32"), **targets)
    options = [tmp_path / name, "--data", tmp_path / "batch.npz", "--budget", "2"]
    text = printed(capsys, *options)
    assert "with the loss that the model was saved with" in text
    # 15 weights, and as much momentum.
    assert "Weights and optimizer state, with SGD: 120 bytes" in text
    np.savez(tmp_path / "batch.npz", x=np.ones((5, 4)), y=targets["age"])
    assert "each of the outputs ['age', 'weight'], by its name. Received: " in failing_line(capsys, *options)


def test_inputs_of_several_lengths_are_refused_in_options(capsys, tmp_path):
    inputs = [keras.Input((4,), name="a"), keras.Input((4,), name="b")]
    keras.Model(inputs, keras.layers.Add()(inputs)).save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", a=np.ones((2, 4)), b=np.ones((3, 4)))
    line = failing_line(capsys, tmp_path / "model.keras", "--data", tmp_path / "batch.npz")
    assert line.endswith("Received: x=list of [2, 3] examples. Write such a batch into `--data FILE.npz`.")


def test_losses_of_an_older_file_keep_their_structure():
    losses = _losses({"a": ["mse", None], "b": {"class_name": "Huber", "config": {"delta": 2.0}}})
    assert losses["a"] == [keras.losses.mean_squared_error, None] and isinstance(losses["b"], keras.losses.Huber)


def difference(y, y_pred):
    return y_pred - y


@pytest.mark.slow
def test_a_loss_that_is_not_known_here_is_not_said_to_be_missing(capsys, path, tmp_path):
    model = keras.saving.load_model(path)
    model.compile("sgd", difference)
    model.save(tmp_path / "own.keras")
    np.savez(tmp_path / "batch.npz", x=np.ones((6, 4), "float32"), y=np.ones((6, 3), "float32"))
    text = printed(capsys, tmp_path / "own.keras", "--data", tmp_path / "batch.npz", "--budget", "2")
    assert "no loss in the file" not in text
    assert "stood in for the loss: what the file says of optimizer and loss is not known here (" in text


def test_without_measuring_there_is_no_table_and_the_remedy_is_an_option(capsys, path):
    text = printed(capsys, path, "--no-measure")
    assert "jit_compile" in text and "Step (ms)" not in text and "measure=False" not in text
    assert "Leave out `--no-measure` to have steps timed, with `--data FILE.npz` on your own batch." in text
    lines = text.splitlines()
    assert lines[0].startswith("Advice for model ") and lines[0].endswith(", nothing measured")
    assert lines[1:3] == ["", "Not measured, and so not sure: this is a guess from the device and the layers alone."]


IGNORED = "--no-measure: not allowed with argument {}, as nothing is run"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--data none.npz", "`numpy.savez"),
        ("--data broken.npz", "`numpy.savez"),
        ("--data one.npy", "`numpy.savez"),
        ("--data other.npz", "Expected an array `x`, or one for each of the inputs ['features']"),
        ("--data empty.npz", "at least one example"),
        pytest.param("--data wrong.npz", "Give one that it takes: `--data FILE.npz`.", marks=pytest.mark.slow),
        ("--budget 0", "--budget: expected a positive number of seconds, received '0'"),
        ("--budget inf", "received 'inf'"),
        ("--batch-size -1", "--batch-size: expected a whole number of at least 1, received '-1'"),
        ("--import no_such_module_here", "module"),
        ("--no-measure --data none.npz", IGNORED.format("--data")),
        ("--no-measure --batch-size 5", IGNORED.format("--batch-size")),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, path, tmp_path, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.npz").write_bytes(b"PK no zip")
    np.save(tmp_path / "one.npy", np.ones((2, 4)))
    np.savez(tmp_path / "other.npz", z=np.ones(3))
    np.savez(tmp_path / "empty.npz", x=np.ones((0, 4)))
    np.savez(tmp_path / "wrong.npz", x=np.ones((2, 9)))
    assert expected in failing_line(capsys, path, *arguments.split())


def test_what_16_bits_are_good_for_is_followed_by_the_commands(capsys, path, monkeypatch):
    gpu = Device("gpu", "V100", compute_capability=(7, 0))
    monkeypatch.setattr("mpkeras.devices.native.probe", lambda backend: [gpu])
    text = printed(capsys, path, "--no-measure")
    assert "`mpkeras run --policy mixed_float16 SCRIPT` trains so" in text
    assert f"`mpkeras convert {path} --policy mixed_float16 OUT.keras` converts the file." in text


@keras.saving.register_keras_serializable("test_advice_command")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_of_a_model_without_names_of_inputs_x_alone_is_asked_for(capsys, tmp_path):
    model = Subclassed()
    model(np.ones((2, 4)))
    model.save(tmp_path / "own.keras")
    np.savez(tmp_path / "other.npz", z=np.ones((2, 4)))
    line = failing_line(capsys, tmp_path / "own.keras", "--data", tmp_path / "other.npz")
    assert "Expected an array `x`. Received: " in line and "with ['z']. Write it with `numpy.savez" in line
    with pytest.raises(ValueError, match="says what inputs.*--data"):
        random_inputs(model, 4)
    with pytest.raises(ValueError, match="Received: 'open', a Sequential that is not built. Give a batch"):
        random_inputs(keras.Sequential([keras.layers.Dense(2)], name="open"), 4)


def test_random_inputs_follow_the_structure_of_the_model():
    inputs = {"image": keras.Input((2, 2), name="image"), "words": keras.Input((5,), dtype="int32", name="words")}
    outputs = keras.layers.Flatten()(inputs["image"]), keras.layers.Embedding(2, 3)(inputs["words"])
    batch = random_inputs(keras.Model(inputs, outputs), 4)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "image": ((4, 2, 2), "float32"),
        "words": ((4, 5), "int32"),
    }
    assert set(np.unique(batch["words"])) <= {0, 1}


def test_a_model_of_one_batch_size_is_given_that_many_rows():
    inputs = keras.Input(batch_shape=(6, 5, 3))
    model = keras.Model(inputs, keras.layers.GRU(2, stateful=True)(inputs))
    assert random_inputs(model, None).shape == (6, 5, 3) and random_inputs(model, 7).shape == (7, 5, 3)


def test_words_and_inputs_of_unknown_size_cannot_be_made():
    words = keras.Input((2,), dtype="string", name="words")
    with pytest.raises(ValueError, match="Expected inputs of numbers.* Received: input 'words' of text.*--data"):
        random_inputs(keras.Model(words, keras.layers.StringLookup(vocabulary=["yes", "no"])(words)), 4)
    with pytest.raises(ValueError, match="known shape.*--data"):
        random_inputs(keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(2)]), 4)
