"""What the demo runs: plans, times, memory, and what a run returns."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.demo import runs
from mpkeras.demo.runs import Plan, duration, estimated_run_s, plan_case, rounds_within
from mpkeras.demo.tasks import Task, digits_task, text_task
from mpkeras.policies.dtypes import bytes_of
from tests.step_modes import snapshot


def linear_model():
    inputs = keras.Input((2,), name="inputs")
    x = keras.layers.Dense(2, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="outputs")(x))


def tiny_task(build=linear_model, epochs=2):
    """Eight examples of two numbers, to be copied."""
    x = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
    data_set = SimpleNamespace(x_train=x, y_train=x, x_held_out=x, y_held_out=x, source={"name": "a line"})
    task = Task(
        name="tiny",
        title="a line",
        quality_name="held-out error",
        higher_is_better=False,
        tolerance=0.0,
        load=lambda: data_set,
        build=build,
        loss=keras.losses.MeanSquaredError,
        metrics=list,
        quality=lambda logs: logs["val_loss"],
        learning_rate=1e-2,
        batch_size=2,
        epochs=epochs,
    )
    return task, data_set


def order_of_runs(monkeypatch, policies, seeds, failing=(), steps_s=None, limit_s=60.0):
    """Runs of 4 epochs of 5 steps, with 12 held-out examples in batches of 2: as long as 28 steps, and 1 s more."""

    def run(task, data_set, policy, seed, epochs, verbose):
        error = "no" if "run" in failing and policy == "b" else None
        return {"policy": policy, "seed": seed, "epochs": epochs, "error": error}

    def first_steps(model, policy, x, y, batch_size):
        if "first step" in failing and policy == "b":
            raise RuntimeError("no kernel")
        return 1.0, (steps_s or {}).get(policy, 0.01)

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "first_steps", first_steps)
    monkeypatch.setattr(runs, "_compiled", lambda task, data_set, seed, epochs: object())
    monkeypatch.setattr(
        runs, "interleaved_step_times", lambda models, x, y, batch_size, rounds: dict.fromkeys(models, rounds)
    )
    task = SimpleNamespace(name="tiny", epochs=4, batch_size=2, steps=lambda data_set, epochs: 5 * epochs)
    data_set = SimpleNamespace(x_train=None, y_train=None, x_held_out=range(12))
    return runs.compare([task], [data_set], policies, seeds, limit_s=limit_s)


def test_all_policies_run_with_each_seed_and_are_timed(monkeypatch, capsys):
    records, timed, plans = order_of_runs(monkeypatch, ["a", "b"], seeds=2)
    assert [(r["policy"], r["seed"]) for r in records] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert {record["epochs"] for record in records} == {4}
    assert timed == {"tiny": {"a": 30, "b": 30}}
    assert {plan.shortened for plan in plans["tiny"].values()} == {None}
    printed = capsys.readouterr().out
    assert "tiny, a: about 3 s for 2 runs\n" in printed
    # 30 rounds of 0.02 s, and 3 before them.
    assert "tiny, timing steps of a, b in turn: about 1 s\n" in printed
    order_of_runs(monkeypatch, ["a"], seeds=1)
    assert "tiny, a: about 1 s for 1 run\n" in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["run", "first step"])
def test_a_policy_that_cannot_run_is_tried_once_said_and_not_timed(monkeypatch, capsys, failing):
    records, timed, _ = order_of_runs(monkeypatch, ["a", "b"], seeds=3, failing=(failing, "run"))
    assert [record["policy"] for record in records] == ["a", "b", "a", "a"]
    assert "not run: no" in capsys.readouterr().out
    assert list(timed["tiny"]) == ["a"]


def test_what_would_take_minutes_is_shortened_or_left_out_and_said_before(monkeypatch, capsys):
    # A run of b takes 1 + 28 * 1 s, so that two of the three are within a minute; one of c takes 1 + 28 * 3 s.
    steps_s = {"float32": 5.0, "b": 1.0, "c": 3.0}
    records, timed, plans = order_of_runs(monkeypatch, ["float32", "b", "c"], seeds=3, steps_s=steps_s)
    # float32 is run once, as all is measured against it.
    assert [(r["policy"], r["seed"]) for r in records] == [("float32", 0), ("b", 0), ("b", 1)]
    # Ten rounds of 5 + 1 s are a minute.
    assert timed == {"tiny": {"float32": 10, "b": 10}}
    printed = capsys.readouterr().out
    assert "in turn: about 78 s\n" in printed  # and three rounds to warm up
    assert "tiny, b: 2 of 3 runs: at 1000 ms a step 3 runs would take about 87 s. `--minutes 2` runs all." in printed
    assert "tiny, c: left out: at 3000 ms a step 3 runs would take about 4 minutes." in printed
    assert printed.index("left out") < printed.index("seed 1 of")
    assert plans["tiny"]["c"].seeds == 0


# In float16 the first batch counts at 2**16, twice the guess, and training goes on at a quarter of that.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "compute_dtype", "loss_scale"),
    [("float32", "float32", 1.0), ("mixed_bfloat16", "bfloat16", 1.0), ("mixed_float16", "float16", 2.0**14)],
)
def test_record_of_a_run(policy, compute_dtype, loss_scale):
    task, data_set = tiny_task()
    record = runs.run(task, data_set, policy, seed=0, epochs=2, verbose=0)
    assert record["error"] is None
    assert (record["task"], record["policy"], record["seed"]) == ("tiny", policy, 0)
    assert record["steps"] == 8  # four batches of two, twice
    assert (record["skipped_steps"], record["loss_scale"]) == (0, loss_scale)
    assert record["quality"] == record["history"]["quality"][-1] == record["history"]["val_loss"][-1]
    assert record["history"]["loss_scale"] == [loss_scale, loss_scale]
    assert record["compute_dtypes"] == {"inputs": compute_dtype, "hidden": compute_dtype, "outputs": "float32"}
    assert record["layer_output_bytes"] == 2 * 2 * (4 if policy == "float32" else 2) + 2 * 2 * 4


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_layers_that_lack_a_kernel_are_named(backend, policy):
    model = text_task(quick=True).build()
    named = [name for name, _ in runs.missing_kernels(model, policy)]
    # JAX has no float16 attention on CPUs; the demo uses nothing else that a backend lacks.
    on_jax_cpu = backend == "jax" and "cpu" in str(keras.ops.zeros(()).device).lower()
    assert named == (["MultiHeadAttention"] if on_jax_cpu and policy == "mixed_float16" else [])


@pytest.mark.slow
def test_a_run_is_repeated_by_its_seed_and_changed_by_another():
    task, data_set = tiny_task()
    records = [runs.run(task, data_set, "float32", seed, 2, verbose=0) for seed in (3, 3, 4)]
    first, second, other = [record["history"]["val_loss"] for record in records]
    assert first == second
    assert first != other


@pytest.mark.slow
def test_the_global_policy_has_no_say():
    built_under = []

    def build():
        built_under.append(keras.config.dtype_policy().name)
        return linear_model()

    task, data_set = tiny_task(build)
    keras.config.set_dtype_policy("mixed_float16")
    record = runs.run(task, data_set, "mixed_bfloat16", seed=0, epochs=1, verbose=0)
    assert built_under == ["float32"]
    assert record["compute_dtypes"]["hidden"] == "bfloat16"
    assert keras.config.dtype_policy().name == "mixed_float16"


def failing_task(error):
    def build():
        raise error

    return tiny_task(build)


def test_a_missing_kernel_is_a_result():
    task, data_set = failing_task(NotImplementedError("no float16 kernel\nfor this layer"))
    record = runs.run(task, data_set, "mixed_float16", seed=0, epochs=1)
    assert record["error"] == "NotImplementedError: no float16 kernel"
    assert "in build" in record["traceback"] and "quality" not in record


# JAX checks shapes in Python, with a TypeError.
@pytest.mark.backends("tensorflow", "torch")
def test_an_exception_of_the_backend_is_a_result():
    task, data_set = tiny_task(lambda: keras.ops.matmul(keras.ops.zeros((2, 3)), keras.ops.zeros((2, 3))))
    assert runs.run(task, data_set, "float32", seed=0, epochs=1)["error"]


def test_a_mistake_in_the_program_is_not_hidden():
    task, data_set = failing_task(ValueError("a mistake"))
    with pytest.raises(ValueError, match="a mistake"):
        runs.run(task, data_set, "float32", seed=0, epochs=1)


def test_the_learning_rate_starts_and_ends_at_a_tenth_and_peaks_after_a_tenth_of_80_steps():
    task, data_set = tiny_task(epochs=20)  # four steps an epoch
    schedule = runs._optimizer(task, data_set, epochs=20)._learning_rate
    rates = [float(schedule(step)) for step in (0, 8, 80)]
    assert rates == pytest.approx([1e-3, 1e-2, 1e-3], rel=1e-5)  # float32


# JAX, on which it compiles for longest, runs a task above; the command trains the one of text.
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.slow
def test_the_quick_digits_learn_something_in_mixed_precision():
    keras.utils.clear_session()  # layer names start from the beginning
    task = digits_task(quick=True)
    record = runs.run(task, task.load(), "mixed_bfloat16", seed=0, epochs=2, verbose=0)
    first, last = record["history"]["loss"]
    assert record["error"] is None and last < first
    dtypes = {"conv2d": "bfloat16", "batch_normalization": "float32", "probabilities": "float32"}
    assert dtypes.items() <= record["compute_dtypes"].items()


def test_a_run_is_compiling_and_training_and_a_third_for_what_is_only_looked_at():
    # 2 s of compiling, 30 steps of 0.5 s, and 60 held-out examples, 20 batches of 3: as long as 20/3 steps.
    assert estimated_run_s(2.0, 0.5, 30, batch_size=3, held_out_examples=60) == pytest.approx(2 + 15 + 10 / 3)


@pytest.mark.parametrize(
    ("run_s", "is_baseline", "expected"),
    [
        pytest.param(20.0, False, 3, id="all fit, just"),
        pytest.param(20.1, False, 2, id="one too many"),
        pytest.param(60.1, False, 0, id="none fits"),
        pytest.param(600.0, True, 1, id="the baseline is run all the same"),
        pytest.param(25.0, True, 2, id="the baseline is shortened, too"),
        pytest.param(0.0, False, 3, id="no time at all"),
    ],
)
def test_as_many_runs_as_fit_into_the_limit(run_s, is_baseline, expected):
    assert plan_case(3, run_s, run_s / 100, 60.0, is_baseline=is_baseline).seeds == expected


@pytest.mark.parametrize(
    ("seeds", "run_s", "step_s", "limit_s", "expected"),
    [
        # float16 convolutions on a Xeon with AMX.
        (3, 440.0, 0.993, 120.0, "left out: at 993 ms a step 3 runs would take about 22 minutes. `--minutes 22` runs"),
        (3, 50.5, 0.2, 120.0, "2 of 3 runs: at 200 ms a step 3 runs would take about 3 minutes. `--minutes 3` runs"),
        (1, 80.0, 0.2, 60.0, "left out: at 200 ms a step 1 run would take about 80 s. `--minutes 2` runs"),
        (3, 1.0, 0.1, 60.0, None),
    ],
)
def test_what_is_not_run_is_said_with_the_numbers_and_the_way_to_run_it(seeds, run_s, step_s, limit_s, expected):
    plan = plan_case(seeds, run_s, step_s, limit_s, is_baseline=False)
    said = None if expected is None else f"{expected} all."
    numbers = {"asked_seeds": seeds, "run_s": run_s, "step_ms": 1e3 * step_s, "limit_s": limit_s}
    assert plan.to_dict() == {**numbers, "seeds": plan.seeds, "shortened": said}
    assert Plan(3, 3).shortened is None


def test_rounds_and_durations():
    # As many as fit, or as one would like, and three at least; there may be nothing to time.
    assert [rounds_within(round_s, 30.0, 20) for round_s in (0.5, 2.0, 20.0, 0.0)] == [20, 15, 3, 20]
    assert [duration(s) for s in (0.2, 89.4, 90.0, 1320.0)] == ["1 s", "89 s", "2 minutes", "22 minutes"]


EXAMPLES = np.arange(14, dtype="float32").reshape(7, 2)


class FakeModel:
    """Notes the batches it takes and moves a clock on by `seconds` a step."""

    def __init__(self, name, seconds, clock, calls):
        self.name, self.seconds, self.clock, self.calls = name, seconds, clock, calls

    def train_on_batch(self, x, y):
        self.calls.append((self.name, x[0, 0], len(x), len(y)))
        self.clock[0] += self.seconds


@pytest.fixture
def fakes(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(runs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(runs, "prepare", lambda model, policy: calls.append(("prepare", policy)))
    slow, fast = FakeModel("a", 0.5, clock, calls), FakeModel("b", 0.25, clock, calls)
    return {"float32": slow, "mixed_float16": fast}, calls


def test_models_take_turns_on_the_same_full_batches_and_are_timed_but_for_the_warm_up(fakes, monkeypatch):
    monkeypatch.setattr(runs, "WARM_UP_ROUNDS", 1)
    models, calls = fakes
    times = runs.interleaved_step_times(models, EXAMPLES, EXAMPLES, batch_size=3, rounds=2)
    assert times == {"float32": [500.0, 500.0], "mixed_float16": [250.0, 250.0]}
    rounds = [calls[i : i + 2] for i in (0, 2, 4)]
    assert [sorted(of_round) for of_round in rounds] == [
        [("a", 0.0, 3, 3), ("b", 0.0, 3, 3)],
        [("a", 6.0, 3, 3), ("b", 6.0, 3, 3)],  # the seventh example fills no batch
        [("a", 0.0, 3, 3), ("b", 0.0, 3, 3)],
    ]
    assert {of_round[0][0] for of_round in rounds[:2]} == {"a", "b"}  # each goes first once


def test_the_first_step_compiles_and_the_second_does_not(fakes):
    models, calls = fakes
    model = models["mixed_float16"]
    model.seconds = 4.0

    def faster_from_now_on(x, y, train_on_batch=model.train_on_batch):
        train_on_batch(x, y)
        model.seconds = 0.5

    model.train_on_batch = faster_from_now_on
    assert runs.first_steps(model, "mixed_float16", EXAMPLES, EXAMPLES, batch_size=3) == (3.5, 0.5)
    assert calls == [("prepare", "mixed_float16"), ("b", 0.0, 3, 3), ("b", 0.0, 3, 3)]
    # A second step that is slower by chance: no compiling.
    model.train_on_batch = lambda x, y: setattr(fakes[0]["float32"], "seconds", 1.0)
    assert runs.first_steps(model, "mixed_float16", EXAMPLES, EXAMPLES, batch_size=3)[0] == 0.0


@pytest.mark.slow
def test_a_real_model_is_timed_under_its_policy(backend):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(3)(inputs)))
    model.compile("sgd", "mse", jit_compile=backend == "jax")
    compile_s, step_s = runs.first_steps(model, "mixed_float16", EXAMPLES / 14, EXAMPLES / 14, batch_size=3)
    assert step_s > 0 and compile_s >= 0
    times = runs.interleaved_step_times({"mixed_float16": model}, EXAMPLES / 14, EXAMPLES / 14, batch_size=3, rounds=2)
    assert len(times["mixed_float16"]) == 2
    assert min(times["mixed_float16"]) > 0
    assert [layer.compute_dtype for layer in model.layers[1:]] == ["float16", "float32"]
    assert int(model.optimizer.iterations) == 2 + runs.WARM_UP_ROUNDS + 2


def test_layer_outputs_count_by_the_policy_that_the_layers_have_now_and_the_model_stays():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8)(inputs) + 1.0
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
    ones = np.ones((5, 4), "float32")
    # 8 numbers, 8 after the addition, 3 probabilities: 19 of 4 bytes, ten examples.
    assert runs.layer_output_bytes(model, ones, batch_size=10) == 10 * 19 * 4
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    before = snapshot(model.variables), model.get_config()
    # The dense layer and the addition in two bytes, the softmax head in four.
    assert runs.layer_output_bytes(model, ones, batch_size=10) == 10 * (16 * 2 + 3 * 4)
    assert (snapshot(model.variables), model.get_config()) == before


def test_bytes_of_a_tensor():
    assert [bytes_of((2, 3), dtype) for dtype in ("float32", "bfloat16", "uint8", "bool")] == [24, 12, 6, 6]


def test_xla_tells_its_temporary_bytes_on_jax_only(backend):
    task, data_set = tiny_task(epochs=1)
    model = runs._compiled(task, data_set, 0, 1)
    mpkeras.prepare(model, "mixed_bfloat16")
    assert (runs.xla_temporary_bytes(model, task, data_set) is not None) == (backend == "jax")
