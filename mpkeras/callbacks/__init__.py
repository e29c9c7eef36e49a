"""Callbacks for `model.fit`."""

from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.callbacks.resource_monitor import ResourceMonitor

__all__ = ["MixedPrecision", "ResourceMonitor"]
