"""`plan_memory`: the first way to train that the compiler says fits; and the doors that take it."""

import importlib.util

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras._replaced import replaced_attributes
from tests.tools.forecast.test_forecast import needs_compilers

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed")
ONCE = pytest.mark.backends("tensorflow")
ROWS = np.random.default_rng(2).normal(size=(32, 64)).astype("float32")


def residual(width=64, blocks=4):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((width,))
    for _ in range(blocks):
        x = layers.Add()([x, layers.Dense(width)(layers.Dense(8 * width, "gelu")(x))])
    model = keras.Model(inputs, layers.Dense(1)(x), name="residual")
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


def peaks(plan):
    return [row["peak_bytes"] for row in plan.candidates]


@needs_compilers
@ONCE
@pytest.mark.slow
@pytest.mark.every_case
def test_what_fits_is_found_and_no_plan_is_over_its_limit():
    model, shape = residual(128, 6), (4096, 128)
    everything = mpkeras.plan_memory(model, shape, memory=2**20, device="h100", policies=["float32"], verbose=0)
    assert not everything.fits and everything.missing_bytes > 0 and "Nothing that was tried fits" in str(everything)
    rows = everything.candidates
    # In this order, each with less memory than the one before.
    assert [(row["slot_dtype"], row["remat"], row["accumulate_steps"]) for row in rows[:6]] == [
        ("auto", None, 1),
        ("bfloat16", None, 1),
        ("bfloat16", "products", 1),
        ("bfloat16", "blocks", 1),
        ("bfloat16", "blocks", 2),
        ("bfloat16", "blocks", 4),
    ]
    assert peaks(everything)[:6] == sorted(peaks(everything)[:6], reverse=True)
    for number in (0, 1, 3, 5):
        # Just room for this one: 5 % are left free.
        limit = int(peaks(everything)[number] / 0.95) + 100
        plan = mpkeras.plan_memory(model, shape, memory=limit, device="h100", policies=["float32"], verbose=0)
        assert plan.fits and peaks(plan) == peaks(everything)[: number + 1] and peaks(plan)[-1] <= 0.95 * limit
        row = rows[number]
        assert (plan.slot_dtype, plan.remat, plan.accumulate_steps) == tuple(
            row[key] for key in ("slot_dtype", "remat", "accumulate_steps")
        )
        assert plan.step_batch == 4096 // row["accumulate_steps"]
    # The figure is that of `forecast` for the same policy.
    report = mpkeras.forecast(model, shape, device="h100", policies=[plan.renamed("mine")], verbose=0)
    of_plan = [row for row in rows if row["remat"] == "blocks"][0]
    assert report.policies["mine"]["peak_bytes"] == of_plan["peak_bytes"]


@needs_jax
@ONCE
@pytest.mark.slow
def test_the_program_that_then_trains_is_the_one_of_the_plan():
    model = residual()
    everything = mpkeras.plan_memory(model, (1024, 64), memory=2**20, device="cpu", policies=["float32"], verbose=0)
    assert [row["remat"] for row in everything.candidates[:4]] == [None, None, "products", "blocks"]
    report = mpkeras.forecast(
        model,
        (1024, 64),
        device="cpu",
        policies=[mpkeras.Policy("float32", slot_dtype="bfloat16", remat="blocks").renamed("mine")],
        verbose=0,
    )
    assert report.policies["mine"]["peak_bytes"] == everything.candidates[3]["peak_bytes"]


@needs_jax
@ONCE
@pytest.mark.slow
def test_the_largest_batch():
    plan = mpkeras.plan_memory(
        residual(), (64, 64), memory="40MB", device="cpu", policies=["float32"], batch="largest", verbose=0
    )
    tried = {row["batch"]: row["peak_bytes"] for row in plan.candidates if row["remat"] == "blocks"}
    assert plan.fits and tried[plan.batch] <= 0.95 * 40e6
    assert min(n for n, peak in tried.items() if peak > 0.95 * 40e6) <= 1.03 * plan.batch + 1


@pytest.fixture
def compiled(monkeypatch):
    """Programs whose temporaries are told by a function `(remat, rows) -> bytes`; returns what was compiled."""
    compiled = []

    def install(temporary_bytes):
        class Compiler:
            def __init__(self, request, deadline):
                self.remat = {name: policy.remat for name, policy in request.policies.items()}

            def __enter__(self):
                return self

            def __exit__(self, *reason):
                pass

            def compile(self, name, rows, accumulate_steps):
                compiled.append((name, rows))
                temporary = temporary_bytes(self.remat[name], rows)
                sizes = {"persistent_bytes": 100, "temporary_bytes": temporary, "peak_bytes": 100 + temporary}
                return {**sizes, "matrix_flops": {"float32": 10 * rows}, "moved_bytes": 1}

        monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", Compiler)
        return compiled

    return install


def in_parts(remat, rows):
    return rows * {None: 100, "products": 50, "blocks": 20}[remat]


def test_a_plan_names_what_is_computed_again(compiled):
    compiled(in_parts)
    plan = mpkeras.plan_memory(residual(), (8, 64), memory=300 / 0.95 + 1, policies=["float32"], verbose=0)
    assert (plan.remat, plan.fits, plan.missing_bytes) == ("blocks", True, 0)
    parts = plan.to_dict()["computed_again"]
    assert len(parts) == 4 and [last.rsplit("_")[0] for _, last in parts] == 4 * ["add"]
    assert f"4 parts: {parts[0][0]} to {parts[0][1]}, {parts[1][0]} to" in str(plan)


@ONCE
def test_what_the_backend_cannot_compute_again_is_no_candidate(compiled):
    class Alone(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    model = Alone()
    model.build((None, 4))
    names = compiled(in_parts)
    plan = mpkeras.plan_memory(model, (8, 4), memory=1, policies=["float32"], allow=("remat",), verbose=0)
    assert names == [("float32", 8)] and not plan.fits and plan.computed_again == []
    assert "remat products: not possible. Expected a Functional or Sequential model" in str(plan)
    assert "remat blocks: not possible. Expected a model with repeated blocks" in str(plan)


class Planned(mpkeras.Policy):
    """A plan as `plan_memory` returns it, without a compiler."""

    _accumulate_steps = 4


@pytest.mark.parametrize("door", ["prepare", "callback", "global"])
def test_doors_take_it_as_a_policy(door):
    """The mean over four quarters of a batch is that over the batch."""
    keras.utils.set_random_seed(3)
    plan = Planned("float32", slot_dtype="bfloat16", remat="blocks")
    callbacks = [mpkeras.callbacks.MixedPrecision(plan)] if door == "callback" else []
    model = residual()
    if door == "prepare":
        mpkeras.prepare(model, plan)
    elif door == "global":
        with mpkeras.policy_scope(Planned("mixed_bfloat16", slot_dtype="bfloat16", remat="blocks")):
            model = residual()
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    model.fit(ROWS, ROWS[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    assert model.optimizer.gradient_accumulation_steps == 4
    assert {entry.kind for entry in replaced_attributes(model)} >= {"again"}
    # One update of Adam: each weight moves by its learning rate, whatever the gradient.
    moved = [
        np.abs(keras.ops.convert_to_numpy(v) - old).max()
        for v, old in zip(model.trainable_variables, before, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_step_accumulates_as_the_plan_says(policy):
    def updates_of(step):
        return int(keras.ops.convert_to_numpy(step.optimizer.inner_optimizer.iterations))

    def weights(plan, remat=None, **options):
        model = mpkeras.apply_policy(residual(16, 3), plan)
        step = mpkeras.make_train_step(model, "adam", "mse", remat=remat, **options)
        for n in range(8):
            step(ROWS[4 * n : 4 * n + 4, :16], ROWS[4 * n : 4 * n + 4, :1])
        return [keras.ops.convert_to_numpy(v) for v in model.weights], updates_of(step)

    by_plan, updates = weights(Planned(policy, remat="blocks"))
    passed, updates_passed = weights(mpkeras.Policy(policy, remat="blocks"), accumulate_steps=4)
    assert updates == updates_passed == 2
    for value, expected in zip(by_plan, passed, strict=True):
        np.testing.assert_array_equal(value, expected)
    # Another `remat` is another policy, of the same plan; what is passed is what counts.
    assert weights(Planned(policy), remat="blocks")[1] == 2
    assert weights(Planned(policy), accumulate_steps=1)[1] == 8


@ONCE
@pytest.mark.parametrize(
    "options, error, words",
    [
        ({}, ValueError, "`memory` or `device`.*neither"),
        ({"memory": "16"}, None, None),
        ({"memory": "x16GB"}, ValueError, "memory='x16GB'.*'16GB'"),
        ({"memory": True}, TypeError, "memory=True"),
        ({"memory": 0}, ValueError, "memory=0"),
        ({"memory": "1GB", "allow": "remat"}, TypeError, "tuple of names"),
        ({"memory": "1GB", "allow": ("remats",)}, ValueError, r"\['remats'\]"),
        ({"memory": "1GB", "batch": "most"}, ValueError, "batch='most'"),
        ({"memory": "1GB", "policies": []}, ValueError, "at least one policy"),
        ({"memory": "1GB", "budget_s": -1}, ValueError, "budget_s"),
    ],
)
def test_bad_input_is_said_before_anything_is_compiled(monkeypatch, options, error, words):
    class Compiled(Exception):
        pass

    def compiler(*args):
        raise Compiled

    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", compiler)
    with pytest.raises(error or Compiled, match=words):
        mpkeras.plan_memory(residual(), (8, 64), verbose=0, **options)
