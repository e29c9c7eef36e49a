"""Callbacks for `model.fit`."""

from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.callbacks.numerics_monitor import NumericsMonitor

__all__ = ["MixedPrecision", "NumericsMonitor"]
