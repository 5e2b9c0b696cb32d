"""The errors that users' mistakes raise."""

from __future__ import annotations


class MixedArraysError(TypeError, RuntimeError):
    """Arrays of two frameworks or of two devices in one call. Also a RuntimeError, as torch's own is."""


class UnsupportedDtypeError(TypeError, NotImplementedError):
    """A dtype that the framework's own product refuses too. Also a NotImplementedError, as torch's own is."""


class NoBackendError(ValueError):
    """The backend that was asked for by name cannot run the problem, or does not exist."""


class NotLockedError(LookupError):
    """Policy [tuning] mode = "locked", and the store holds no decision for the problem."""
