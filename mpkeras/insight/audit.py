"""The documented place of `AuditReport`."""

from mpkeras.tools.audit.audit import AuditReport

__all__ = ["AuditReport"]
