"""The documented place of `Comparison`."""

from mpkeras.tools.blackbox.comparison import Comparison

__all__ = ["Comparison"]
