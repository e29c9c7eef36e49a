"""P17: several optimizers, each with a scale of its own: one skips a step, and the other takes it.

tests/training/test_own_train_steps.py has a GAN and its `train_step`.
"""

import keras
import pytest
from keras import ops

from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.inventory import find_optimizers
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
from tests.step_modes import MODES

SCALE = 1024.0


def compiled(step, variables, mode):
    if mode in ("graph", "xla"):
        import tensorflow as tf

        return tf.function(step, jit_compile=mode == "xla")
    if mode == "jit":
        import jax

        @jax.jit
        def updated(values, *args):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
                step(*args)
            return [scope.get_current_value(v) for v in variables]

        def assigned(*args):
            for variable, value in zip(variables, updated([v.value for v in variables], *args), strict=True):
                variable.assign(value)

        return assigned
    return step


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_both_losses_are_scaled_before_either_is_applied(mode):
    optimizers = [LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=DynamicLossScale(SCALE)) for _ in range(2)]
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])

    def step(*slopes):
        scaled = [optimizer.scale_loss(slope) for optimizer, slope in zip(optimizers, slopes, strict=True)]
        for optimizer, slope, variable in zip(optimizers, scaled, variables, strict=True):
            optimizer.apply([ops.reshape(slope, (1,))], [variable])

    step = compiled(step, [*variables, *(v for optimizer in optimizers for v in optimizer.variables)], mode)
    # The gradient of the second one overflows in the second step; its loss does not.
    for slopes in ((1.0, 1.0), (2.0, 1e37), (3.0, 3.0)):
        step(*map(ops.convert_to_tensor, slopes))
    assert [ops.convert_to_numpy(v).tolist() for v in variables] == [[1.0 - 0.5 * 6], [1.0 - 0.5 * 4]]
    assert [float(optimizer.loss_scale) for optimizer in optimizers] == [SCALE, SCALE / 2]
    found = [(int(o.skipped_steps), int(o.iterations), int(o.nonfinite_losses)) for o in optimizers]
    assert found == [(0, 3, 0), (1, 2, 0)]


# ------------------------------------------------------------------------- optimizers wherever a model holds them


class Holder(keras.Model):
    """Holds optimizers in every way there is."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.in_dict = {"g": keras.optimizers.SGD(), "rate": 0.1, "d": keras.optimizers.SGD()}
        self.in_list = [keras.optimizers.SGD(), None]
        self._in_tuple = (1.0, keras.optimizers.SGD())
        self.alone = keras.optimizers.SGD()
        self.again = self.in_list[0]

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


PLACES = ["optimizer", "in_dict['g']", "in_dict['d']", "in_list[0]", "_in_tuple[1]", "alone"]


def test_optimizers_in_lists_tuples_and_dictionaries_are_found_and_wrapped_where_they_are():
    model = Holder()
    model.build((None, 2))
    model.compile("sgd", "mse")
    plain, containers = find_optimizers(model), (model.in_dict, model.in_list)
    assert list(plain) == PLACES
    prepare(model, "mixed_float16")
    found = find_optimizers(model)
    assert list(found) == PLACES and all(isinstance(each, LossScaleOptimizer) for each in found.values())
    assert [each.inner_optimizer for each in found.values()] == list(plain.values())
    assert containers[0] is model.in_dict and containers[1] is model.in_list
    assert model.in_dict["d"] is found["in_dict['d']"] and model.again is model.in_list[0]
    assert (model.in_dict["rate"], model.in_list[1], model._in_tuple[0]) == (0.1, None, 1.0)
    prepare(model, "mixed_float16")
    assert list(map(id, find_optimizers(model).values())) == list(map(id, found.values()))
