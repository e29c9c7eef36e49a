import pytest

from mpkeras.demo.plan import FirstSteps, Plan, duration, estimated_run_s, plan_case, rounds_within


def test_a_run_is_compiling_and_training_and_a_third_for_what_is_only_looked_at():
    # 2 s of compiling, 30 steps of 0.5 s, and 60 held-out examples, 20 batches of 3: as long as 20/3 steps.
    first = FirstSteps(compile_s=2.0, step_s=0.5)
    assert estimated_run_s(first, 30, batch_size=3, held_out_examples=60) == pytest.approx(2 + 15 + 10 / 3)


@pytest.mark.parametrize(
    ("run_s", "is_baseline", "expected"),
    [
        pytest.param(20.0, False, 3, id="all fit, just"),
        pytest.param(20.1, False, 2, id="one too many"),
        pytest.param(60.0, False, 1, id="one fits"),
        pytest.param(60.1, False, 0, id="none fits"),
        pytest.param(600.0, True, 1, id="the baseline is run all the same"),
        pytest.param(25.0, True, 2, id="the baseline is shortened, too"),
        pytest.param(0.0, False, 3, id="no time at all"),
        pytest.param(None, False, 3, id="not known"),
    ],
)
def test_as_many_runs_as_fit_into_the_limit(run_s, is_baseline, expected):
    step_s = None if run_s is None else run_s / 100
    assert plan_case(3, run_s, step_s, 60.0, is_baseline=is_baseline).seeds == expected


def test_what_is_not_run_is_said_with_the_numbers_and_the_way_to_run_it():
    # float16 convolutions on a Xeon with AMX.
    plan = plan_case(3, 440.0, 0.993, 120.0, is_baseline=False)
    assert plan.shortened == ("left out: at 993 ms a step 3 runs would take about 22 minutes. `--minutes 22` runs all.")
    assert plan.to_dict() == {
        "asked_seeds": 3,
        "seeds": 0,
        "run_s": 440.0,
        "step_ms": 993.0,
        "limit_s": 120.0,
        "shortened": plan.shortened,
    }
    assert plan_case(3, 50.5, 0.2, 120.0, is_baseline=False).shortened == (
        "2 of 3 runs: at 200 ms a step 3 runs would take about 3 minutes. `--minutes 3` runs all."
    )
    assert plan_case(1, 80.0, 0.2, 60.0, is_baseline=False).shortened.startswith(
        "left out: at 200 ms a step 1 run would take about 80 s. `--minutes 2`"
    )
    assert Plan(3, 3).shortened is None and plan_case(3, 1.0, 0.1, 60.0, is_baseline=False).shortened is None


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        pytest.param([0.25, 0.25], 20, id="as many as one would like"),
        pytest.param([1.0, 1.0], 15, id="as many as fit"),
        pytest.param([20.0], 3, id="three at least"),
        pytest.param([], 20, id="nothing to time"),
    ],
)
def test_rounds(steps_s, expected):
    assert rounds_within(steps_s, 30.0, 20) == expected


def test_durations():
    assert [duration(s) for s in (0.2, 89.4, 90.0, 1320.0)] == ["1 s", "89 s", "2 minutes", "22 minutes"]
