"""The documented place of `Capsule`."""

from mpkeras.tools.blackbox.capsule import Capsule

__all__ = ["Capsule"]
