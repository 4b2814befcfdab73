"""Moved to :mod:`heal.lab.probes`; this name goes with the next release."""

import warnings

from heal.lab.probes import *  # noqa: F403
from heal.lab.probes import __all__ as __all__

warnings.warn("heal.probes has moved: import heal.lab.probes", DeprecationWarning, stacklevel=2)
