"""The documented place of `Forecast`."""

from mpkeras.tools.forecast.forecast import Forecast

__all__ = ["Forecast"]
