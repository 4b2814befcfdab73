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
SPIKE, LOSS_NAN, LOSS_SPIKE, LOSS_RISING, DESYNC = 16, 32, 64, 128, 256
NUM_FLAGS = 9
"""Bits of ``verdict[FLAGS]``. OVERFLOW: every element is finite and the float32 norm is not.

SPIKE: the rule found the norm out of the ordinary. LOSS_NAN: the loss is NaN or Inf. DESYNC: ranks
that should be at the same step are not.
"""

STEPS, CLIP_COUNT, SKIP_COUNT = range(3)
"""First columns of every rule's float64 state: steps seen, steps clipped, steps skipped.

A state of zeros is a fresh one, for every rule.
"""

NUM_COUNTERS = 3

MEAN_COLUMN, VAR_COLUMN, SEEN_COLUMN, BUFFER_COLUMN = range(3, 7)
"""Columns of the state of ``zclip_``, float64 [6 + max(1, warmup_steps)].

Warm-up is over once SEEN_COLUMN has reached max(1, warmup_steps); until then the norms seen so far
stand from BUFFER_COLUMN on.
"""

GAMMA_COLUMN = 3
"""First of the gammas in the state of ``adagc_``, float64 [3 + num_tensors]; 0 or less is unset."""

NORMS_SEEN_COLUMN, LOSSES_SEEN_COLUMN, WINDOW_COLUMN = range(3, 6)
"""Columns of the state of ``spike_skip_``, float64 [5 + 2 * window].

How many norms and losses were ever accepted; then the last norms, then the last losses. The value
number ``k``, counted from 0, stands at place ``k % window`` of its window.
"""

HISTORY_SEEN_COLUMN, HISTORY_COLUMN = range(3, 5)
"""Columns of the state of ``auto_clip_``, float64 [4 + history]: norms ever seen, the last ones."""

(
    LOSS_MEAN_COLUMN,
    LOSS_DEVIATION_COLUMN,
    LOSSES_ABSORBED_COLUMN,
    LAST_LOSS_COLUMN,
    RISING_COLUMN,
) = range(3, 8)
"""Columns of the state of ``watch_loss_``. Its CLIP_COUNT counts spikes, its SKIP_COUNT NaNs."""

NUM_LOSS_STATE = 8

TAG, TAG_SQUARED, RANKS, LOSS_SUM, LOSS_COUNT = range(5)
"""First lanes of the packed vector that ranks add up, float64 [5 + extra + 4 * num_tensors].

The step that a rank believes to be at, and its square; 1; its loss, and 1 if it has one. Then come
the extra lanes of the caller, then one row per tensor: the columns of stats, and COPIES.
"""

NUM_RECORD = 5

COPIES = NUM_STATS
"""Last column of a row of the packed vector: how many times the tensor was counted."""

NUM_ROW = NUM_STATS + 1

TAG_MODULUS = 4096
"""Tags are counted modulo this, so that what is done with their squares is exact in float64 for up
to 16,384 ranks."""

KEEP, REFUSE = 1.0, -1.0
"""Coefficients with a meaning of their own: leave bitwise untouched, and write zeros."""

PROPAGATE, SKIP, ZERO, ERROR = range(4)
NONFINITE = {"propagate": PROPAGATE, "skip": SKIP, "zero": ZERO, "error": ERROR}
"""What to do with a step whose gradients hold NaN or Inf; see :func:`zclip.clip_grad_norm_`."""

ON_NONFINITE = {"skip": 0, "official": 1}
"""What an adaptive rule does with NaN or Inf. "skip": skip the step, learn nothing from it;
finite gradients whose float32 norm overflows are skipped alike. "official": what the published
code does, also where that poisons its statistics for good."""

ZCLIP_MODES = {"adaptive_scaling": 0, "mean": 1, "percentile": 2}
"""Mode of ``zclip_``: the clip option of mode "zscore", or mode "percentile", which has none."""

ADAGC_SEEDS = {"min_clipped": 0, "min_raw": 1, "first": 2}
"""Where a gamma of ``adagc_`` starts: the least norm of the warm-up, after or before the global
clip, or the first norm, averaged from then on."""

ADAM, SGD, LION = range(3)
"""Algorithms of ``optim_update_``."""

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, OPTIM_FLAGS = range(6)
"""Settings of one parameter group; for SGD the betas are momentum and dampening."""

NUM_OPTIM_SETTINGS = 6

MAXIMIZE, DECOUPLED, AMSGRAD, NESTEROV, STOCHASTIC, DROP_NON_FINITE = 1, 2, 4, 8, 16, 32
"""Bits of ``settings[OPTIM_FLAGS]``.

DECOUPLED: weight decay acts on the weights, not through the gradient. STOCHASTIC: round bfloat16
parameters stochastically. DROP_NON_FINITE: read NaN and Inf in a gradient as zero.
"""

WEIGHT_SUM_SQ, UPDATE_SUM_SQ, WEIGHT_BAD, FIRST_BAD, SECOND_BAD, FOREIGN = range(6)
"""Columns of the telemetry of an update, float64 [num_tensors, 6], all of values after it.

Sums of squares of the finite weights and of what was subtracted from them; how many elements of
the weights, of the first moment (or momentum) and of the second moment are NaN or Inf; bits that
say which memory did not hold what the last update had stored there.
"""

NUM_TELEMETRY = 6

FOREIGN_WEIGHT, FOREIGN_FIRST, FOREIGN_SECOND = 1, 2, 4
"""Bits of ``telemetry[:, FOREIGN]``."""

TAKEN, HEALTH_FLAGS, FIRST_BAD_TENSOR, FIRST_FOREIGN, WEIGHT_NORM, UPDATE_NORM = range(6)
"""Elements of the summary of an update, float32 [6].

TAKEN is exactly 1, or 0 if the step was skipped; then no flag is set. The next are bits, the index
of the first tensor with a NaN or Inf and of the first with a foreign write (-1 if none), and norms
over all tensors.
"""

NUM_SUMMARY = 6

BAD_WEIGHT, BAD_STATE, FOREIGN_WRITE = 1, 2, 4
"""Bits of ``summary[HEALTH_FLAGS]``."""

STORED_WEIGHT, STORED_FIRST, STORED_SECOND, IS_KNOWN, UPDATES = range(5)
"""Columns of the ledger, int64 [num_tensors, 5]: sums of the rotated bits that the last update
stored (modulo 2^32, for float64 modulo 2^64), whether they are known, and updates taken."""

NUM_LEDGER = 5
