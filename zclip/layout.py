"""Which column is which. ``csrc/math`` states the same; ``tests/test_layers.py`` compares them."""

SUMSQ, NAN, INF = range(3)
"""Columns of stats, float64 [num_tensors, 3]: sum of squares of the finite elements, counts."""

NUM_STATS = 3

(
    BLOCKED,
    FLAGS,
    NORM,
    CLIPPED_NORM,
    Z,
    THRESHOLD,
    MEAN,
    STD,
    LOSS,
    LOSS_RATIO,
    WORST,
    CLIPS,
    SKIPS,
    STEP,
) = range(14)
"""Elements of the verdict, float32 [14]."""

NUM_VERDICT = 14

HAS_NAN, HAS_INF, OVERFLOW, CLIPPED = 1, 2, 4, 8
"""Bits of ``verdict[FLAGS]``. OVERFLOW: every element is finite and the float32 norm is not."""

STEPS, CLIP_COUNT, SKIP_COUNT = range(3)
"""Columns of the float64 [3] state of ``global_norm_``."""

NUM_COUNTERS = 3

KEEP, REFUSE = 1.0, -1.0
"""Coefficients with a meaning of their own: leave bitwise untouched, and write zeros."""

PROPAGATE, SKIP, ZERO, ERROR = range(4)
NONFINITE = {"propagate": PROPAGATE, "skip": SKIP, "zero": ZERO, "error": ERROR}
"""What to do with a step whose gradients hold NaN or Inf; see :func:`zclip.clip_grad_norm_`."""
