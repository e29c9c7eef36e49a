"""Cases of parametrized tests that take long together."""

import pytest


def first_quick(cases) -> list:
    """Returns `cases` for `pytest.mark.parametrize`, all but the first, which tells most, marked `slow`.

    A tuple is a value for each of several arguments.
    """
    first, *others = cases
    return [first, *map(_slow, others)]


def _slow(case):
    if hasattr(case, "marks"):  # a `pytest.param`
        return case._replace(marks=(*case.marks, pytest.mark.slow))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
