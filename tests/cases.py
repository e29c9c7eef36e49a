"""Cases of parametrized tests that take long together."""

import pytest


def first_quick(cases) -> list:
    """Returns `cases` for `pytest.mark.parametrize`, all but the first, which tells most, marked `slow`.

    A tuple is a value for each of several arguments.
    """
    first, *others = cases
    values = (case if isinstance(case, tuple) else (case,) for case in others)
    return [first, *(pytest.param(*value, marks=pytest.mark.slow) for value in values)]
