from types import SimpleNamespace

import keras
import numpy as np
import pytest

from mpkeras.demo import comparison
from mpkeras.demo.plan import FirstSteps
from mpkeras.demo.tasks import Task, digits_task, text_task


def linear_model():
    inputs = keras.Input((2,), name="inputs")
    return keras.Model(inputs, keras.layers.Dense(2, name="outputs")(inputs))


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
        return FirstSteps(1.0, (steps_s or {}).get(policy, 0.01))

    monkeypatch.setattr(comparison, "run", run)
    monkeypatch.setattr(comparison, "first_steps", first_steps)
    monkeypatch.setattr(comparison, "_compiled", lambda task, data_set, seed, epochs: object())
    monkeypatch.setattr(
        comparison, "interleaved_step_times", lambda models, x, y, batch_size, rounds: dict.fromkeys(models, rounds)
    )
    task = SimpleNamespace(name="tiny", epochs=4, batch_size=2, steps=lambda data_set, epochs: 5 * epochs)
    data_set = SimpleNamespace(x_train=None, y_train=None, x_held_out=range(12))
    return comparison.compare([task], [data_set], policies, seeds, limit_s=limit_s)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "compute_dtype", "loss_scale"),
    [
        ("float32", "float32", 1.0),
        ("mixed_bfloat16", "bfloat16", 1.0),
        ("mixed_float16", "float16", 2.0**15),
    ],
)
def test_record_of_a_run(policy, compute_dtype, loss_scale):
    task, data_set = tiny_task()
    record = comparison.run(task, data_set, policy, seed=0, epochs=2, verbose=0)
    assert record["error"] is None
    assert (record["task"], record["policy"], record["seed"]) == ("tiny", policy, 0)
    assert record["steps"] == 8  # four batches of two, twice
    assert (record["skipped_steps"], record["loss_scale"]) == (0, loss_scale)
    assert record["quality"] == record["history"]["quality"][-1] == record["history"]["val_loss"][-1]
    assert record["history"]["loss_scale"] == [loss_scale, loss_scale]
    assert record["compute_dtypes"]["outputs"] == compute_dtype
    assert record["layer_output_bytes"] == 2 * 2 * (4 if policy == "float32" else 2)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_layers_that_lack_a_kernel_are_named(backend, policy):
    model = text_task(quick=True).build()
    named = [name for name, _ in comparison.missing_kernels(model, policy)]
    # JAX has no float16 attention on CPUs; the demo uses nothing else that a backend lacks.
    on_jax_cpu = backend == "jax" and "cpu" in str(keras.ops.zeros(()).device).lower()
    assert named == (["MultiHeadAttention"] if on_jax_cpu and policy == "mixed_float16" else [])


@pytest.mark.slow
def test_a_run_is_repeated_by_its_seed_and_changed_by_another():
    task, data_set = tiny_task()
    records = [comparison.run(task, data_set, "float32", seed, 2, verbose=0) for seed in (3, 3, 4)]
    first, second, other = [record["history"]["val_loss"] for record in records]
    assert first == second
    assert first != other


def test_the_global_policy_has_no_say():
    built_under = []

    def build():
        built_under.append(keras.config.dtype_policy().name)
        return linear_model()

    task, data_set = tiny_task(build)
    keras.config.set_dtype_policy("mixed_float16")
    record = comparison.run(task, data_set, "mixed_bfloat16", seed=0, epochs=1, verbose=0)
    assert built_under == ["float32"]
    assert record["compute_dtypes"]["outputs"] == "bfloat16"
    assert keras.config.dtype_policy().name == "mixed_float16"


def test_a_missing_kernel_is_a_result():
    def build():
        raise NotImplementedError("no float16 kernel\nfor this layer")

    task, data_set = tiny_task(build)
    record = comparison.run(task, data_set, "mixed_float16", seed=0, epochs=1)
    assert record["error"] == "NotImplementedError: no float16 kernel"
    assert "in build" in record["traceback"]
    assert "quality" not in record


def test_an_error_of_the_backend_is_a_result():
    """Asks the backend for something that it cannot do, and expects its own exception to be caught."""

    def build():
        keras.ops.matmul(keras.ops.zeros((2, 3)), keras.ops.zeros((2, 3)))

    task, data_set = tiny_task(build)
    if keras.backend.backend() == "jax":  # checks shapes in Python, with a TypeError
        with pytest.raises(TypeError):
            comparison.run(task, data_set, "float32", seed=0, epochs=1)
    else:
        assert comparison.run(task, data_set, "float32", seed=0, epochs=1)["error"]


@pytest.mark.parametrize("mistake", [AttributeError, TypeError, KeyError, ValueError])
def test_a_mistake_in_the_program_is_not_hidden(mistake):
    def build():
        raise mistake("a mistake")

    task, data_set = tiny_task(build)
    with pytest.raises(mistake):
        comparison.run(task, data_set, "float32", seed=0, epochs=1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(0, 1e-3, id="starts at a tenth"),
        pytest.param(8, 1e-2, id="peak after a tenth of 80 steps"),
        pytest.param(80, 1e-3, id="ends at a tenth"),
    ],
)
def test_learning_rate(step, expected):
    task, data_set = tiny_task(epochs=20)  # four steps an epoch
    schedule = comparison._optimizer(task, data_set, epochs=20)._learning_rate
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)  # float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_task", "dtypes"),
    [
        pytest.param(
            digits_task,
            {"conv2d": "bfloat16", "batch_normalization": "float32", "probabilities": "float32"},
            id="digits",
        ),
        pytest.param(text_task, {"multi_head_attention": "bfloat16", "logits": "bfloat16"}, id="text"),
    ],
)
def test_quick_tasks_learn_something_in_mixed_precision(make_task, dtypes):
    keras.utils.clear_session()  # layer names start from the beginning
    task = make_task(quick=True)
    record = comparison.run(task, task.load(), "mixed_bfloat16", seed=0, epochs=2, verbose=0)
    assert record["error"] is None
    first, last = record["history"]["loss"]
    assert last < first
    assert dtypes.items() <= record["compute_dtypes"].items()
