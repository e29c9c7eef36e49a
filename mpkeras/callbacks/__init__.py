"""Callbacks for `model.fit`."""

from mpkeras.callbacks.mixed_precision import MixedPrecision

__all__ = ["MixedPrecision"]
