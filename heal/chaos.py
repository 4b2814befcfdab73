"""Moved to :mod:`heal.testing`; this name goes with the next release."""

import warnings

from heal.testing import KINDS, Chaos, Fault, Strike

__all__ = ["KINDS", "Chaos", "Fault", "Strike"]

warnings.warn("heal.chaos has moved: import heal.testing", DeprecationWarning, stacklevel=2)
