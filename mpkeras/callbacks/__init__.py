"""Callbacks for `model.fit`."""

from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.tools.advise.resource_monitor import ResourceMonitor
from mpkeras.tools.blackbox.black_box import BlackBox
from mpkeras.tools.numerics.float32_fallback import Float32Fallback
from mpkeras.tools.numerics.numerics_monitor import NumericsMonitor

__all__ = ["BlackBox", "Float32Fallback", "MixedPrecision", "NumericsMonitor", "ResourceMonitor"]
