"""The ops of the fused optimizers: one update of parameters and state, in one call."""

import torch
from torch import Tensor

from zclip.layout import NUM_SUMMARY, NUM_TELEMETRY
from zclip.schemas.library import library
from zclip.schemas.shapes import wide_dtype

# Lists have one entry per parameter or none; an empty tensor stands for what one does not have.
# So do coefs (all 1), blocked (not blocked), grad_scale (1) and rates (those of the settings).
# blocked is one number or a whole verdict, whose flags skip the step too if in skip_flags.
library.define(
    "optim_update_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] firsts, Tensor(c!)[] seconds,"
    " Tensor(d!)[] maxima, Tensor(e!)[] steps, Tensor(f!) ledger, Tensor coefs, Tensor blocked,"
    " Tensor grad_scale, Tensor rates, int algorithm, int[] sizes, float[] settings, int seed,"
    " bool telemetry, int skip_flags) -> (Tensor rows, Tensor summary)"
)
# A step on the CPU in one call. The plan holds parameters and state, and zclip.reading has read the
# gradients; what it writes is therefore not in the schema, and no graph may hold it.
# With a watch, the state of watch_loss_, it judges the loss too, before it decides on the update.
# rule -1 is none; an empty summary says that the plan is stale and that nothing was done.
library.define(
    "make_plan(Tensor[] params, Tensor[] firsts, Tensor[] seconds, Tensor[] maxima, Tensor[] steps,"
    " Tensor ledger, int algorithm, int[] sizes, bool telemetry) -> int"
)
library.define("drop_plan(int plan) -> ()")
library.define(
    "fused_step_(int reading, int plan, Tensor(a!) state, int rule, float[] rule_settings,"
    " Tensor? loss, float[] settings, float grad_scale, bool found_inf, bool skip_nonfinite,"
    " int seed, Tensor? stats=None, Tensor(b!)? watch=None, Tensor? watched=None,"
    " float[] watch_settings=[]) -> (Tensor norm, Tensor stats, Tensor coefs, Tensor verdict,"
    " Tensor rows,"
    " Tensor summary)"
)


@torch.library.register_fake("zclip::optim_update_", lib=library)
def _optim_update_(
    params: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    maxima: list[Tensor],
    steps: list[Tensor],
    ledger: Tensor,
    coefs: Tensor,
    blocked: Tensor,
    grad_scale: Tensor,
    rates: Tensor,
    algorithm: int,
    sizes: list[int],
    settings: list[float],
    seed: int,
    telemetry: bool,
    skip_flags: int,
) -> tuple[Tensor, Tensor]:
    return empty_updated(ledger, len(params) if telemetry else 0)


def empty_updated(ledger: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return telemetry and summary of unknown content."""
    rows = ledger.new_empty((count, NUM_TELEMETRY), dtype=wide_dtype(ledger.device))
    return rows, ledger.new_empty(NUM_SUMMARY, dtype=torch.float32)
