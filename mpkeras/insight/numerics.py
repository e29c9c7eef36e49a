"""The documented place of `NumericsReport`."""

from mpkeras.tools.numerics.numerics import NumericsReport

__all__ = ["NumericsReport"]
