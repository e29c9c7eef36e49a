"""`plan_memory` for ten kinds of models: the step that then trains is the program whose bytes the plan has shown."""

import importlib.util

import keras
import numpy as np
import pytest

import mpkeras
from tests.tools.forecast.models_to_plan import MODELS, batch_for

# The compiler of the plan and that of the step are one: JAX on this CPU.
pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed"),
]
ROWS = 64
# Of memory that is given as a number, this is used.
USED = 0.95
# What is left of the temporaries of the step in float32 that keeps everything: from one that fits as it is to one that
# has to be accumulated.
SHARES = (0.7, 1.1, 0.85, 0.5)


def step_of(model, policy, accumulate_steps=1):
    """Returns the guarded step of a model under a policy, and its optimizer with its slots."""
    mpkeras.apply_policy(model, policy)
    outputs = getattr(model, "outputs", None) or [None]
    losses = "mse" if len(outputs) == 1 else ["mse"] * len(outputs)
    step = mpkeras.make_train_step(
        model, keras.optimizers.Adam(1e-3), losses, jit_compile=True, accumulate_steps=accumulate_steps
    )
    step.optimizer.build(model.trainable_variables)
    return step


def bytes_of(variables) -> int:
    sizes = (
        np.prod(v.shape, dtype=int) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables
    )
    return int(sum(sizes))


def state_bytes(step) -> int:
    return bytes_of([*step.model.variables, *step.optimizer.variables])


def planned(model, x, y, limit, **options):
    losses = ["mse"] * len(y) if isinstance(y, list) else "mse"
    optimizer = keras.optimizers.Adam(1e-3)
    return mpkeras.plan_memory(
        model, x, y, memory=limit, device="cpu", optimizer=optimizer, loss=losses, verbose=0, **options
    )


@pytest.mark.parametrize(
    ("name", "share"), [(name, SHARES[number % len(SHARES)]) for number, name in enumerate(MODELS)]
)
def test_the_step_that_then_trains_takes_what_the_plan_has_said(name, share):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    x, y = batch_for(model, ROWS)
    plain = step_of(model, "float32")
    limit = int((state_bytes(plain) + share * plain.temporary_bytes(x, y)) / USED)
    plan = planned(model, x, y, limit)
    (number,) = [number for number, row in enumerate(plan.candidates) if row["is_the_plan"]]
    # What costs less stands before it.
    too_large, chosen = plan.candidates[:number], plan.candidates[number]
    assert plan.fits and chosen["peak_bytes"] <= USED * limit
    assert all(row["peak_bytes"] > USED * limit for row in too_large)
    step = step_of(model, plan, plan.accumulate_steps)
    x, y = batch_for(model, plan.step_batch)
    assert step.temporary_bytes(x, y) == chosen["temporary_bytes"]
    assert state_bytes(step) == chosen["persistent_bytes"]
    assert np.isfinite(float(step(x, y)["loss"]))


@pytest.mark.parametrize("name", ["mlp", "batch_normalization", "causal_transformer"])
def test_nothing_fits(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    # Room for the weights, and for nothing that trains them.
    limit = bytes_of(model.variables)
    plan = planned(model, *batch_for(model, 4), limit)
    peaks = [row["peak_bytes"] for row in plan.candidates]
    assert not plan.fits and not any(row["fits"] for row in plan.candidates)
    assert plan.missing_bytes == min(peaks) - int(USED * limit)
    # All that may be tried has been, down to single rows, or the plan says why not.
    assert {row["accumulate_steps"] for row in plan.candidates} >= {1, 4}
    told = " ".join(plan.to_dict()["not_compiled"])
    assert 2 in {row["accumulate_steps"] for row in plan.candidates} or "2 parts" in told
    assert all(
        any(row["remat"] == remat for row in plan.candidates) or remat in told for remat in ("products", "blocks")
    )
    assert "Nothing that was tried fits" in str(plan)
