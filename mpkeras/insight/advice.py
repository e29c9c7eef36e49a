"""The documented place of `AdviceReport`."""

from mpkeras.tools.advise.advice import AdviceReport

__all__ = ["AdviceReport"]
