"""Callbacks for `model.fit`."""

from mpkeras.callbacks.black_box import BlackBox
from mpkeras.callbacks.float32_fallback import Float32Fallback
from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.callbacks.numerics_monitor import NumericsMonitor
from mpkeras.callbacks.resource_monitor import ResourceMonitor

__all__ = ["BlackBox", "Float32Fallback", "MixedPrecision", "NumericsMonitor", "ResourceMonitor"]
