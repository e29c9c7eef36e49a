"""The documented place of `Forecast` and `MemoryPlan`."""

from mpkeras.tools.forecast.forecast import Forecast
from mpkeras.tools.forecast.memory_plan import MemoryPlan

__all__ = ["Forecast", "MemoryPlan"]
