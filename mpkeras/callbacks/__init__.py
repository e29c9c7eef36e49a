"""Callbacks for `model.fit`."""

from typing import TYPE_CHECKING

from mpkeras._when_asked import importing_when_asked
from mpkeras.callbacks.mixed_precision import MixedPrecision

if TYPE_CHECKING:
    from mpkeras.tools.advise.resource_monitor import ResourceMonitor
    from mpkeras.tools.blackbox.black_box import BlackBox
    from mpkeras.tools.numerics.float32_fallback import Float32Fallback
    from mpkeras.tools.numerics.numerics_monitor import NumericsMonitor

__all__ = ["BlackBox", "Float32Fallback", "MixedPrecision", "NumericsMonitor", "ResourceMonitor"]

_TOOLS = {
    "BlackBox": "mpkeras.tools.blackbox.black_box",
    "Float32Fallback": "mpkeras.tools.numerics.float32_fallback",
    "NumericsMonitor": "mpkeras.tools.numerics.numerics_monitor",
    "ResourceMonitor": "mpkeras.tools.advise.resource_monitor",
}
__getattr__, __dir__ = importing_when_asked(__name__, _TOOLS)
