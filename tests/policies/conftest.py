"""Policies registered by a test are gone after it."""

import pytest

from mpkeras.policies.policy import REGISTERED


@pytest.fixture(autouse=True)
def fresh_registry():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
