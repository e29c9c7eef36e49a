"""G4: after the same faults the same scales on every backend, for 240 random sequences through the real optimizer.

What they are compared with is the documented rule in plain Python, written here a second time: a backend that equals
it bit for bit equals the other two.
"""

import random
import struct

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.training.step import make_train_step

GROUPS, SEQUENCES_PER_GROUP = 16, 15
# TensorFlow in a graph and under XLA, JAX compiled, torch op by op.
COMPILED = {"tensorflow": (False, True), "jax": (True,), "torch": (False,)}[keras.backend.backend()]
# With a prediction of 0, the loss sqrt(prediction - target) and its gradient 1 / (2 sqrt(...)) are these:
TARGETS = {
    "finite": (-1.0,),  # 1 and 1/2
    "gradient": (0.0,),  # 0 and infinity
    "loss": (-np.inf, 1.0),  # infinity and 0; NaN and NaN
}


def float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


class Rule:
    """One scale, moved event by event; a product of two float32 numbers is exact in Python before it is rounded."""

    def __init__(self, settings):
        self.settings = {name: n if isinstance(n, int) else float32(n) for name, n in settings.items()}
        self.scale = self.settings["initial_scale"]
        self.finite_row = self.bad_row = 0

    def after(self, event: str) -> float:
        s = self.settings
        if event == "finite":
            self.bad_row = 0
            self.finite_row += 1
            if self.finite_row == s["dynamic_growth_steps"]:
                self.finite_row = 0
                self.scale = min(float32(self.scale * s["growth_factor"]), s["max_scale"])
        elif event == "gradient":
            self.finite_row = 0
            self.bad_row += 1
            if self.bad_row >= s["hysteresis"]:
                self.scale = max(float32(self.scale * s["backoff_factor"]), s["min_scale"])
        # No scale cures a loss that is not finite: for the scale this step never was.
        return self.scale


def random_settings(generator) -> dict:
    initial_scale = 2.0 ** generator.uniform(-3, 20)
    return {
        "initial_scale": initial_scale,
        "growth_factor": generator.choice([2.0, 4.0, generator.uniform(1.01, 3.0)]),
        "backoff_factor": generator.choice([0.5, 0.25, generator.uniform(0.1, 0.95)]),
        "dynamic_growth_steps": generator.randint(1, 5),
        "min_scale": initial_scale / 2.0 ** generator.uniform(0, 8),
        "max_scale": initial_scale * 2.0 ** generator.uniform(0, 8),
        "hysteresis": generator.randint(1, 3),
    }


def random_events(generator) -> list:
    weights = [generator.choice([1, 3, 10]), generator.choice([1, 3]), 1]
    return generator.choices(["finite", "gradient", "loss"], weights, k=generator.randint(20, 60))


def cases(group: int):
    """Returns the settings and the sequences of one group.

    With these seeds each move, each border and each wait of the rule comes in 20 sequences and more.
    """
    generator = random.Random(group)
    return random_settings(generator), [random_events(generator) for _ in range(SEQUENCES_PER_GROUP)]


def root_of_the_error(y, y_pred):
    return keras.ops.sqrt(y_pred - y)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("group", [0, 1, 2, *(pytest.param(i, marks=pytest.mark.matrix) for i in range(3, GROUPS))])
def test_scales_are_those_of_the_documented_rule(group, jit_compile):
    settings, sequences = cases(group)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    # Without a learning rate the prediction stays 0, and so do the losses what the events say.
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=mpkeras.DynamicLossScale(**settings))
    optimizer.build(model.trainable_variables)
    initial_state = [(v, keras.ops.convert_to_numpy(v.value).copy()) for v in optimizer.scale_state.values()]
    step = make_train_step(model, optimizer, root_of_the_error, jit_compile=jit_compile)
    x, generator = np.ones((1, 1), "float32"), random.Random(group)
    for events in sequences:
        rule = Rule(settings)
        for variable, value in initial_state:
            variable.assign(value)
        for i, event in enumerate(events):
            result = step(x, np.full((1, 1), generator.choice(TARGETS[event]), "float32"))
            found = float(result["loss_scale"]), bool(result["skipped"])
            assert found == (rule.after(event), event != "finite"), (settings, events[: i + 1])
    assert model.get_weights()[0] == 0.0


def test_the_rule_by_hand():
    settings = {"initial_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "dynamic_growth_steps": 2}
    rule = Rule({**settings, "min_scale": 4.0, "max_scale": 16.0, "hysteresis": 2})
    events = ["finite", "loss", "finite", "finite", "finite", "gradient", "loss", "gradient", "gradient", "gradient"]
    assert [rule.after(event) for event in events] == [8, 8, 16, 16, 16, 16, 16, 8, 4, 4]
