"""How `advise` spends its time, on a clock of its own: no step is run."""

import pytest

from mpkeras.tools.advise.bench import Cell, NotTrainable, measure_grid, orders_in_turn


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


def test_every_cell_has_all_rounds_and_is_first_equally_often():
    bench = FakeBench({A: 10.0, B: 11.0, C: 12.0})
    cells = grid(bench, rounds=9)
    assert [(len(cell.times_ms), cell.failure) for cell in cells] == [(9, None)] * 3
    firsts = bench.measured[3::3]
    assert {name: firsts.count(name) for name in (A, B, C)} == {A: 3, B: 3, C: 3}


@pytest.mark.parametrize(
    ("step_ms", "rounds"),
    [
        # More than three times as slow: after 3 rounds; more than 1.5 times: after 12; ten times: the first step.
        ((10.0, 20.0, 40.0), [20, 12, 3]),
        ((10.0, 20.0, 101.0), [20, 12, 1]),
    ],
)
def test_hopeless_cells_drop_out(step_ms, rounds):
    cells = grid(FakeBench(dict(zip((A, B, C), step_ms, strict=True))), rounds=20)
    assert [len(cell.times_ms) for cell in cells] == rounds


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


def test_what_cannot_be_compiled_in_time_says_so_and_the_first_is_measured_all_the_same():
    bench = FakeBench({A: 100.0, B: 100.0, C: 100.0}, compile_s={A: 1.0, B: 7.0, C: 7.0})
    cells = grid(bench, budget_s=10.0)
    assert bench.begun == [A, B] and bench.now <= 10.0
    assert cells[2].failure == "not measured: time" and not cells[2].is_measured
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
    grid(FakeBench({A: 10.0, B: 10.0, C: 10.0}), rounds=4, progress=seen.append)
    assert seen[0] == 1 and seen[-1] == 7
    assert seen == sorted(set(seen))


def test_each_comes_first_second_and_last_equally_often():
    orders = orders_in_turn(["a", "b", "c"], 7)
    assert len(orders) == 7 and all(sorted(order) == ["a", "b", "c"] for order in orders)
    for block in (orders[:3], orders[3:6]):
        assert [sorted(column) for column in zip(*block, strict=True)] == [["a", "b", "c"]] * 3
    assert orders_in_turn([], 3) == []
