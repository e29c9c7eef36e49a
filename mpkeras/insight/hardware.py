"""The documented place of `HardwareReport`."""

from mpkeras.tools.advise.hardware import HardwareReport

__all__ = ["HardwareReport"]
