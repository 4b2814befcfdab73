"""The right norm on many devices: which piece of which tensor counts, and who adds them up.

Every rank measures the pieces it holds. One packed float64 vector (a row per tensor, loss, step tag
and the caller's own lanes) is then added up, and every rank judges the same sums by the same rule:
all reach the same verdict, bit by bit, with no second message. ``docs/parallel.md`` has recipes.
"""

from zclip.parallel.record import Record, reduce_record
from zclip.parallel.reduction import Reduction, find_reduction

__all__ = ["Record", "Reduction", "find_reduction", "reduce_record"]
