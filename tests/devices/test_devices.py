"""What a result was measured on."""

import keras
import numpy as np
import pytest

from mpkeras.devices import environment, version


@pytest.mark.backends("tensorflow")
def test_versions_are_those_of_what_is_imported():
    # Of a nightly, too, which pip knows under another name.
    assert version("keras") == environment()["keras"] == keras.__version__
    assert version("numpy") == np.__version__ and version("no-such-package") is None
