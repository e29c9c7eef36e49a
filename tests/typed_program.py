"""A user's program with types: `tests/test_types.py` runs it, and has `mypy --strict` read it.

An error that mypy misses is an error, too: `--strict` complains of a `type: ignore` for which it finds none.
"""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import keras
import numpy as np
import numpy.typing as npt

import mpkeras
from mpkeras.callbacks import BlackBox, Float32Fallback, MixedPrecision, NumericsMonitor, ResourceMonitor

Floats = npt.NDArray[np.float32]


class Scores(TypedDict):
    fit: float
    prepared: float
    loop: float
    skipped: int


def make_model(policy: mpkeras.Policy | None = None) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    if policy is not None:
        mpkeras.apply_policy(model, policy)
    return model


def make_callbacks(folder: Path, policy: str) -> list[keras.callbacks.Callback]:
    scale = mpkeras.DynamicLossScale(initial_scale=2.0**10, dynamic_growth_steps=50)
    return [
        MixedPrecision(policy, loss_scale=scale, on_min_scale="raise"),
        BlackBox(folder, keep=1),
        NumericsMonitor(every=2, gradients=True),
        Float32Fallback(patience=3),
        ResourceMonitor(batch_size=16),
    ]


def fitted(x: Floats, y: Floats, folder: Path) -> float:
    model = make_model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=make_callbacks(folder, "mixed_bfloat16"))
    return float(history.history["loss"][-1])


def prepared(x: Floats, y: Floats) -> float:
    model = make_model()
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0, slot_dtype="float32")
    model.compile(optimizer, "mse")
    model = mpkeras.prepare(model, mpkeras.Policy("mixed_float16", keep_float32=["Softmax"]), jit_compile=False)
    model.train_on_batch(x, y)
    return float(optimizer.loss_scale)


def loop(x: Floats, y: Floats) -> tuple[float, int]:
    model = make_model(mpkeras.global_policy())
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=mpkeras.FixedLossScale(8.0))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    step = mpkeras.make_train_step(model, optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    state = step.state_dict()
    results = [step(x[rows : rows + 16], y[rows : rows + 16]) for rows in range(0, len(x), 16)]
    step.load_state_dict(state)
    return float(results[-1]["loss"]), sum(bool(result["skipped"]) for result in results)


@mpkeras.float32_island
def squared(x: Floats, times: int) -> Floats:
    return x * x * times


def main(folder: Path) -> Scores:
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y: Floats = squared(x, 2).sum(axis=1, keepdims=True)
    with mpkeras.policy_scope("mixed_bfloat16"):
        loss, skipped = loop(x, y)
    return {"fit": fitted(x, y, folder), "prepared": prepared(x, y), "loop": loss, "skipped": skipped}


def reports(model: keras.Model, x: Floats, y: Floats) -> list[str]:
    """What is only read by mypy: each takes seconds."""
    forecast = mpkeras.forecast(model, (32, 4), device="l4", policies=("mixed_bfloat16",), largest_batch=True)
    advice = mpkeras.advise(model, x, y, jit_compile=(True, False), budget_s=20.0)
    numerics = mpkeras.trace_numerics(model, x, y, loss_scale=256.0)
    operation = mpkeras.load_capsule(Path("step.mpk")).first_operation()
    forecast.plot().savefig("forecast.png")
    with mpkeras.autoprepare(numerics.policy()) as automatic:
        automatic.undo()
    mpkeras.load_state_dict(model, mpkeras.state_dict(model))
    return [str(forecast), mpkeras.audit(model).summary(), str(mpkeras.hardware()), str(operation), str(advice)]


if TYPE_CHECKING:
    model = make_model()
    optimizer = mpkeras.LossScaleOptimizer("sgd", dynamic_growth_steps=3)
    mpkeras.LossScaleOptimizer("sgd", dynamic="no")  # type: ignore[arg-type]
    mpkeras.LossScaleOptimizer("sgd", initial_scale="256")  # type: ignore[arg-type]
    mpkeras.Policy("mixed_float16", slot_dtype=16)  # type: ignore[arg-type]
    mpkeras.Policy(16)  # type: ignore[arg-type]
    mpkeras.prepare(model, loss_scal=1.0)  # type: ignore[call-arg]
    mpkeras.prepare(model, rollback="no")  # type: ignore[arg-type]
    mpkeras.prepare(3).compile()  # type: ignore[attr-defined]
    mpkeras.make_train_step(model, optimizer, "mse").ir()  # type: ignore[attr-defined]
    mpkeras.forecast(model, (32, 4), device=8)  # type: ignore[arg-type]
    mpkeras.forecast(model, (32, 4)).show()  # type: ignore[attr-defined]
    mpkeras.advise(model, [], budget_s="20")  # type: ignore[arg-type]
    mpkeras.advise(model, []).show()  # type: ignore[attr-defined]
    mpkeras.audit(model).table().sort()  # type: ignore[attr-defined]
    mpkeras.autoprepare().stop()  # type: ignore[attr-defined]
    mpkeras.load_capsule(3)  # type: ignore[arg-type]
    MixedPrecision(on_min_scale=1.0)  # type: ignore[arg-type]
    MixedPrecision(jit_compile="auto")  # type: ignore[arg-type]
    NumericsMonitor(every=0.5)  # type: ignore[arg-type]
    squared(np.ones(2, "float32"), "2")  # type: ignore[arg-type]
