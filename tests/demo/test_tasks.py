import math

import pytest

from mpkeras.demo.tasks import TASKS, digits_task, text_task


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
