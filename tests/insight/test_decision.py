"""What `advise` chooses from given times: no step is run."""

import pytest

from mpkeras.insight.advice import grid_of
from mpkeras.insight.decision import decide, rounds_won
from mpkeras.insight.timing import Cell


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
