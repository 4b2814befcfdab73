"""Every operator's schema and fake implementation: the one place where an op is declared.

Nothing here computes. ``csrc/`` fills the CPU key, and :mod:`zclip.reference` answers for every
device that no backend serves.
"""

from zclip.schemas import grads, optim, rules
from zclip.schemas.library import library
from zclip.schemas.shapes import norm_dtype, wide_dtype

__all__ = ["grads", "library", "norm_dtype", "optim", "rules", "wide_dtype"]
