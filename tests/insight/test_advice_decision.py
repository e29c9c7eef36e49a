"""What `advise` chooses from given times, and how it spends its time: no step is run."""

import pytest

from mpkeras.insight.advice import grid_of
from mpkeras.insight.decision import decide, rounds_won
from mpkeras.insight.timing import Cell, NotTrainable, measure_grid


def cell(policy, jit=False, times=(), memory=None):
    return Cell(policy, jit, times_ms=list(times), memory_bytes=memory)


def chosen(cells, present_jit=False, **options):
    return decide(cells, present_jit, **options).chosen.name


@pytest.mark.parametrize(
    ("bfloat16_ms", "expected", "bother"),
    [
        pytest.param(5.0, "mixed_bfloat16, jit_compile=False", True, id="twice as fast"),
        pytest.param(10.0 / 1.05, "mixed_bfloat16, jit_compile=False", True, id="5 % faster"),
        pytest.param(10.0 / 1.03, "float32, jit_compile=False", False, id="3 % faster is not worth it"),
        pytest.param(12.0, "float32, jit_compile=False", False, id="slower"),
    ],
)
def test_speed_decides(bfloat16_ms, expected, bother):
    found = decide([cell("float32", times=[10.0] * 6), cell("mixed_bfloat16", times=[bfloat16_ms] * 6)], False)
    assert (found.chosen.name, found.bother) == (expected, bother)
    assert found.speedup[1] == pytest.approx(10.0 / bfloat16_ms)
    assert found.sureness() == "sure"


@pytest.mark.parametrize(
    ("memory", "ms", "expected"),
    [
        pytest.param(800, 10.0, "mixed_bfloat16", id="20 % less at the same speed"),
        pytest.param(810, 10.0, "float32", id="19 % less is not worth it"),
        pytest.param(500, 10.0 / 0.96, "float32", id="half of it, but 4 % slower"),
        pytest.param(500, 10.0 / 0.98, "mixed_bfloat16", id="half of it, 2 % slower"),
    ],
)
def test_memory_decides_at_nearly_the_same_speed(memory, ms, expected):
    cells = [cell("float32", times=[10.0] * 5, memory=1000), cell("mixed_bfloat16", times=[ms] * 5, memory=memory)]
    assert decide(cells, False).chosen.policy == expected
    assert decide(cells, False, memory_counts=False).chosen.policy == "float32"


def test_of_two_that_are_alike_the_one_that_asks_for_less_is_chosen():
    times = {"float32": 20.0, "mixed_float16": 10.0, "mixed_bfloat16": 10.1}
    cells = [cell(policy, jit, [ms] * 5) for policy, ms in times.items() for jit in (False, True)]
    # 1 % slower, but without loss scaling, and with the setting the model has.
    assert chosen(cells, present_jit=True) == "mixed_bfloat16, jit_compile=True"
    assert chosen(cells, present_jit=False) == "mixed_bfloat16, jit_compile=False"
    cells[-1].times_ms = cells[-2].times_ms = [10.3] * 5
    assert chosen(cells, present_jit=False) == "mixed_float16, jit_compile=False"


def test_ratios_are_of_the_same_round():
    # A machine that is three times slower in every other round: medians over all rounds would say nothing.
    slow = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
    cells = [cell("float32", times=[10.0 * s for s in slow]), cell("mixed_bfloat16", times=[8.0 * s for s in slow])]
    found = decide(cells, False)
    assert found.speedup == pytest.approx((1.25, 1.25, 1.25))
    assert rounds_won(cells[1], cells[0]) == (6, 6)


@pytest.mark.parametrize(
    ("faster_rounds", "expected"),
    [
        pytest.param(20, "sure", id="all"),
        pytest.param(19, "sure", id="95 %"),
        pytest.param(18, "fairly sure", id="90 %"),
        pytest.param(15, "fairly sure", id="75 %"),
        pytest.param(14, "not sure", id="70 %"),
    ],
)
def test_sureness_is_the_share_of_rounds_that_agree(faster_rounds, expected):
    times = [5.0] * faster_rounds + [11.0] * (20 - faster_rounds)
    found = decide([cell("float32", times=[10.0] * 20), cell("mixed_bfloat16", times=times)], False)
    assert found.bother and found.sureness() == expected


def test_few_rounds_are_not_sure():
    found = decide([cell("float32", times=[10.0] * 2), cell("mixed_bfloat16", times=[5.0] * 2)], False)
    assert found.sureness() == "not sure"


def test_failed_cells_are_left_out():
    failed = cell("mixed_float16")
    failed.failure = "loss not finite: inf"
    assert chosen([cell("float32", times=[10.0]), failed]) == "float32, jit_compile=False"
    assert chosen([failed, cell("mixed_bfloat16", times=[10.0])]) == "mixed_bfloat16, jit_compile=False"
    assert decide([failed], False) is None


def test_the_grid_begins_with_what_suits():
    names = [cell.name for cell in grid_of((True, False), "mixed_float16")]
    assert names == [
        "float32, jit_compile=True",
        "mixed_float16, jit_compile=True",
        "float32, jit_compile=False",
        "mixed_float16, jit_compile=False",
        "mixed_bfloat16, jit_compile=True",
        "mixed_bfloat16, jit_compile=False",
    ]


class FakeBench:
    """Steps that take the given times on a clock of their own."""

    def __init__(self, step_ms, compile_s=0.5, failures=()):
        self.now = 0.0
        self.step_ms, self.compile_s, self.failures = step_ms, compile_s, dict(failures)
        self.begun, self.measured = [], []

    def clock(self):
        return self.now

    def begin(self, cell):
        self.begun.append(cell.name)
        seconds = self.compile_s[cell.name] if isinstance(self.compile_s, dict) else self.compile_s
        self.now += seconds
        if cell.name in self.failures:
            raise self.failures[cell.name]
        return self.measure(cell, 1)

    def measure(self, cell, steps):
        self.measured.append(cell.name)
        self.now += 1e-3 * steps * self.step_ms[cell.name]
        return self.step_ms[cell.name]


A, B, C = (Cell(policy, True).name for policy in ("float32", "mixed_bfloat16", "mixed_float16"))


def three_cells():
    return [Cell(policy, True) for policy in ("float32", "mixed_bfloat16", "mixed_float16")]


def grid(bench, cells=None, **options):
    cells = three_cells() if cells is None else cells
    measure_grid(cells, bench, clock=bench.clock, **{"budget_s": 60.0, **options})
    return cells


def test_rounds_and_the_turns_in_them():
    cells = grid(FakeBench({A: 10.0, B: 11.0, C: 12.0}), rounds=9)
    assert [len(cell.times_ms) for cell in cells] == [9, 9, 9]
    assert [cell.failure for cell in cells] == [None] * 3


def test_each_is_first_equally_often():
    bench = FakeBench({A: 10.0, B: 11.0, C: 12.0})
    grid(bench, rounds=9)
    firsts = bench.measured[3::3]
    assert {name: firsts.count(name) for name in (A, B, C)} == {A: 3, B: 3, C: 3}


def test_hopeless_cells_drop_out():
    cells = grid(FakeBench({A: 10.0, B: 20.0, C: 40.0}), rounds=20)
    # More than three times as slow: after 3 rounds; more than 1.5 times: after 12.
    assert [len(cell.times_ms) for cell in cells] == [20, 12, 3]


def test_the_worst_are_not_timed_again():
    bench = FakeBench({A: 10.0, B: 20.0, C: 101.0})
    cells = grid(bench, rounds=5)
    assert cells[2].times_ms == [101.0] and bench.measured.count(C) == 1


def test_short_steps_are_read_together():
    bench = FakeBench({A: 2.0, B: 2.0, C: 2.0}, compile_s=0.0)
    grid(bench, rounds=1)
    # Three steps of warming up, then ten of each (20 ms).
    assert bench.now == pytest.approx(1e-3 * (3 * 2.0 + 30 * 2.0))


def test_the_budget_bounds_all_of_it():
    bench = FakeBench({A: 100.0, B: 100.0, C: 100.0}, compile_s=1.0)
    cells = grid(bench, budget_s=6.0, rounds=1000)
    assert bench.now <= 6.0 + 1e-6
    assert min(len(cell.times_ms) for cell in cells) >= 5


def test_what_cannot_be_compiled_in_time_says_so():
    bench = FakeBench({A: 100.0, B: 100.0, C: 100.0}, compile_s={A: 1.0, B: 7.0, C: 7.0})
    cells = grid(bench, budget_s=10.0)
    assert bench.begun == [A, B]
    assert cells[2].failure == "not measured: time" and not cells[2].is_measured
    assert bench.now <= 10.0


def test_a_budget_that_is_over_at_once_still_measures_the_first():
    cells = grid(FakeBench({A: 1000.0, B: 1.0, C: 1.0}, compile_s=9.0), budget_s=0.1)
    assert [cell.is_measured for cell in cells] == [True, False, False]


def test_a_setting_that_is_hopeless_in_float32_is_not_tried_in_16_bits():
    cells = [Cell("float32", True), Cell("float32", False), Cell("mixed_bfloat16", False)]
    times = {cells[0].name: 10.0, cells[1].name: 200.0, cells[2].name: 200.0}
    grid(FakeBench(times), cells, rounds=5)
    assert cells[2].failure == "not measured: 20 times slower in float32"


def test_failures_are_kept_and_the_others_go_on():
    failures = {A: ValueError("no kernel\nfor this"), C: NotTrainable("loss not finite: nan")}
    cells = grid(FakeBench({A: 10.0, B: 10.0, C: 10.0}, failures=failures), rounds=4)
    assert cells[0].failure == "raises: ValueError: no kernel for this"
    assert isinstance(cells[0].error, ValueError)
    assert cells[2].failure == "loss not finite: nan"
    assert len(cells[1].times_ms) == 4


def test_progress_ends_where_it_should():
    seen = []
    grid(FakeBench({A: 10.0, B: 10.0, C: 10.0}), rounds=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (1, 7) and seen[-1] == (7, 7)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
