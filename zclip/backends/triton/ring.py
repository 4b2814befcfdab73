"""A ring of the last values, kept in columns of a rule's state: csrc/math/ring.h once more."""

import triton
import triton.language as tl


@triton.jit
def filled(seen, size):
    """Return how many places hold a value, int32, if ``seen`` were ever pushed."""
    return tl.minimum(seen, size.to(tl.float64)).to(tl.int32)


@triton.jit
def next_place(seen, size):
    """Return where the next value goes, int64: over the oldest.

    In float64, which is exact up to 2^52 steps: AMD has no 64-bit integer division.
    """
    return seen.to(tl.int64) - (seen / size).to(tl.int64) * size
