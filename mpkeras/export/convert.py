"""The documented place of `convert`."""

from mpkeras.tools.export.convert import ConversionReport, convert

__all__ = ["ConversionReport", "convert"]
