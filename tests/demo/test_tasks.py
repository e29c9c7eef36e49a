import math

import keras
import numpy as np
import pytest

from mpkeras.demo import tasks
from mpkeras.demo.tasks import TASKS, digits_task, text_task
from tests.cases import first_quick

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_quality_is_held_out_accuracy_or_bits_per_byte():
    assert digits_task().quality({"val_accuracy": 0.75, "accuracy": 1.0}) == 0.75
    # Guessing evenly among 256 bytes costs log(256) nats, which is 8 bits.
    assert text_task().quality({"val_loss": math.log(256), "loss": 1.0}) == pytest.approx(8.0)


def test_steps_of_digits_are_passes_over_the_data():
    task = digits_task()
    # 1352 images in batches of 128: eleven steps, the last one not full.
    assert task.steps(task.load(), epochs=3) == 33


def test_epochs_of_text_use_each_byte_once():
    task = text_task(quick=True)
    data_set = task.load()
    steps = task.steps(data_set, task.epochs)
    assert steps == task.steps_per_epoch * task.epochs
    assert len(data_set.x_train) == steps * task.batch_size


@pytest.mark.parametrize("name", first_quick(["digits", "text"]))
def test_quick_is_smaller(name):
    assert TASKS[name](quick=True).build().count_params() < 0.1 * TASKS[name]().build().count_params()


def test_digits_model_has_batch_normalization_and_a_softmax_head():
    model = tasks.digits_model(width=2, hidden=8)
    assert sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers) == 3
    assert model.layers[-1].activation is keras.activations.softmax and model.output_shape == (None, 10)


def test_text_model_looks_back_and_not_ahead_and_tells_positions_apart():
    model = tasks.text_model(context=6, width=8, heads=2, hidden=16, blocks=2)

    def logits(*codes):
        return keras.ops.convert_to_numpy(model(np.array([codes], "int32")))[0]

    one, other = logits(1, 2, 3, 4, 5, 6), logits(1, 2, 3, 99, 5, 6)
    np.testing.assert_allclose(one[:3], other[:3], rtol=1e-5, atol=1e-6)  # another order of summation at most
    assert np.abs(one[3] - other[3]).max() > 1e-2 and np.abs(one[5] - other[5]).max() > 1e-4
    same = logits(7, 7, 7, 7, 7, 7)
    assert np.abs(same[1] - same[4]).max() > 1e-2
    tables = [tuple(w.shape) for w in model.trainable_variables if w.path.endswith("embeddings")]
    assert sorted(tables) == [(6, 8), (256, 8)]


def test_digits_are_split_by_class_into_1352_and_445():
    digits = tasks.load_digits()
    # 178, 182, 177, 183, 181, 182, 181, 179, 174 and 180 images of each digit; a quarter, rounded down.
    assert np.bincount(digits.y_held_out).tolist() == [44, 45, 44, 45, 45, 45, 45, 44, 43, 45]
    assert np.bincount(digits.y_train).tolist() == [134, 137, 133, 138, 136, 137, 136, 135, 131, 135]
    assert digits.x_train.shape == (1352, 8, 8, 1) and digits.x_train.dtype == "float32"
    assert (digits.x_train.min(), digits.x_train.max()) == (0.0, 1.0)
    train = {image.tobytes() for image in digits.x_train}
    assert not any(image.tobytes() in train for image in digits.x_held_out)


@pytest.mark.parametrize("load", [tasks.load_digits, lambda: tasks.load_text(16, 2000, 500)], ids=["digits", "text"])
def test_loading_twice_gives_the_same(load):
    first, second = load(), load()
    for one, other in zip(first[:4], second[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.source == second.source


@pytest.mark.parametrize(
    ("text", "x", "y"),
    [
        pytest.param(b"abcdefg", [[97, 98, 99], [100, 101, 102]], [[98, 99, 100], [101, 102, 103]], id="two windows"),
        pytest.param(b"abcdef", [[97, 98, 99]], [[98, 99, 100]], id="no byte after the second"),
        pytest.param(b"\xffabc", [[255, 97, 98]], [[97, 98, 99]], id="bytes above 127"),
    ],
)
def test_byte_windows(text, x, y):
    windows, following = tasks.byte_windows(text, context=3)
    assert (windows.tolist(), following.tolist()) == (x, y)
    assert windows.dtype == following.dtype == "int32"


@pytest.fixture
def files(tmp_path):
    """Eight files of 100 bytes: `0.py` holds the digit 0 a hundred times, and so on."""
    paths = [tmp_path / f"{number}.py" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_bytes(str(number).encode() * 100)
    return paths


def test_a_file_is_either_held_out_or_trained_on_by_the_seed(files):
    held_out, train = tasks.split_files(files, train_bytes=450, held_out_bytes=201)
    assert (len(held_out), len(train)) == (3, 5)  # of 100 bytes each, and only whole ones
    assert set(held_out).isdisjoint(train)
    assert tasks.split_files(files, 300, 300, seed=1) == tasks.split_files(files, 300, 300, seed=1)
    assert tasks.split_files(files, 300, 300, seed=1) != tasks.split_files(files, 300, 300, seed=2)
    with pytest.raises(ValueError, match=r"Expected 801 bytes.*8 files.*Ask for fewer bytes"):
        tasks.split_files(files, train_bytes=501, held_out_bytes=300)


def test_of_a_long_file_the_beginning_is_read_and_counted(files, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_FILE_BYTES", 40)
    held_out, train = tasks.split_files(files, train_bytes=41, held_out_bytes=80)
    assert (len(held_out), len(train)) == (2, 2)
    monkeypatch.setattr(tasks, "MAX_FILE_BYTES", 3)
    assert tasks.read_bytes(files[:3], limit=8) == b"00011122"


def test_text_has_the_bytes_asked_for_and_whole_files_apart():
    text = tasks.load_text(context=16, train_bytes=16 * 100 + 1, held_out_bytes=16 * 20 + 1)
    assert text.x_train.shape == text.y_train.shape == (100, 16) and text.x_held_out.shape == (20, 16)
    np.testing.assert_array_equal(text.x_train[:, 1:], text.y_train[:, :-1])
    assert set(text.source["train_files"]).isdisjoint(text.source["held_out_files"])
    assert (text.source["train_bytes"], text.source["held_out_bytes"]) == (1601, 321)


def test_only_modules_of_the_standard_library_are_read_and_there_must_be_some(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Run `--task digits`"):
        tasks.standard_library_files()
    for name in ("os.py", "ast.py", "sitecustomize.py", "_sysconfigdata__linux_x86_64.py", "os.txt"):
        (tmp_path / name).write_text("pass\n")
    assert [path.name for path in tasks.standard_library_files()] == ["ast.py", "os.py"]
