import math

import keras
import numpy as np
import pytest

from mpkeras.demo import tasks
from mpkeras.demo.tasks import TASKS, digits_task, text_task

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_quality_of_text_is_bits_per_byte():
    # Guessing evenly among 256 bytes costs log(256) nats, which is 8 bits.
    assert text_task().quality({"val_loss": math.log(256), "loss": 1.0}) == pytest.approx(8.0)


def test_quality_of_digits_is_held_out_accuracy():
    assert digits_task().quality({"val_accuracy": 0.75, "accuracy": 1.0}) == 0.75


def test_steps_of_digits_are_passes_over_the_data():
    task = digits_task()
    # 1352 images in batches of 128: eleven steps, the last one not full.
    assert task.steps(task.load(), epochs=3) == 33


@pytest.mark.parametrize("quick", [False, True])
def test_epochs_of_text_use_each_byte_once(quick):
    task = text_task(quick)
    data_set = task.load()
    steps = task.steps(data_set, task.epochs)
    assert steps == task.steps_per_epoch * task.epochs
    assert len(data_set.x_train) == steps * task.batch_size


@pytest.mark.parametrize("name", TASKS)
def test_quick_is_smaller(name):
    assert TASKS[name](quick=True).build().count_params() < 0.1 * TASKS[name]().build().count_params()


def text_model(blocks=1):
    return tasks.text_model(context=6, width=8, heads=2, hidden=16, blocks=blocks)


def logits(model, codes):
    return keras.ops.convert_to_numpy(model(np.array([codes], "int32")))[0]


def test_digits_model_returns_probabilities():
    model = tasks.digits_model(width=2, hidden=8)
    output = keras.ops.convert_to_numpy(model(np.linspace(0, 1, 128, dtype="float32").reshape(2, 8, 8, 1)))
    assert output.shape == (2, 10)
    np.testing.assert_allclose(output.sum(axis=-1), 1.0, rtol=1e-6)  # ten float32 roundings


def test_digits_model_has_batch_normalization_and_a_softmax_head():
    model = tasks.digits_model(width=2, hidden=8)
    assert sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers) == 3
    assert model.layers[-1].activation is keras.activations.softmax


def test_text_model_does_not_look_ahead():
    model = text_model(blocks=2)
    one, other = logits(model, [1, 2, 3, 4, 5, 6]), logits(model, [1, 2, 3, 99, 5, 6])
    np.testing.assert_allclose(one[:3], other[:3], rtol=1e-5, atol=1e-6)  # another order of summation at most
    assert np.abs(one[3] - other[3]).max() > 1e-2


def test_text_model_looks_back():
    model = text_model()
    one, other = logits(model, [1, 2, 3, 4, 5, 6]), logits(model, [99, 2, 3, 4, 5, 6])
    assert np.abs(one[5] - other[5]).max() > 1e-4


def test_positions_are_told_apart_and_trained():
    model = text_model()
    output = logits(model, [7, 7, 7, 7, 7, 7])
    assert np.abs(output[1] - output[4]).max() > 1e-2
    tables = [tuple(w.shape) for w in model.trainable_variables if w.path.endswith("embeddings")]
    assert sorted(tables) == [(6, 8), (256, 8)]


def test_models_are_float32_as_built():
    for model in (text_model(), tasks.digits_model(width=2, hidden=8)):
        assert {layer.compute_dtype for layer in model.layers} == {"float32"}
