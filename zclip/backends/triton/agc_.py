"""Triton backend of zclip::agc_: four launches (two more per further pair of dtypes).

Rows are measured, one program each, in float64; tensors are added up; one program judges; rows that
are too large are scaled. A row is never split: one of very many elements keeps a single program
busy, which is slow for tensors of one dimension far larger than any bias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.agc_rows import agc_rows, agc_scale
from zclip.backends.triton.chunk import FORMAT_OF, LANES
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.number import is_nan
from zclip.backends.triton.report import (
    KEEP,
    OFFICIAL,
    REFUSE,
    RULE_BLOCK,
    check_state,
    empty_results,
    health_of,
    norm_of,
    write_report,
)
from zclip.backends.triton.row_table import RowList
from zclip.layout import NUM_COUNTERS, NUM_STATS

NUM_SLOTS = 4  # of a row: sum of squares, NaN count, Inf count, coefficient


@triton.jit(do_not_specialize=["num_rows"])
def agc_tensors(
    slots,  # float64 [4, num_rows]
    first_rows,  # int64 [num_tensors + 1]
    owners,  # int64 [num_tensors]: the tensor's place in the list that the caller gave
    stats,  # float64 [num_tensors, 3]: written, as all below, one row per program
    coefs,  # float64 [num_tensors]: the least of the tensor
    squares,  # float64 [num_tensors]: squared norm once its rows are scaled
    num_rows,
    BLOCK: tl.constexpr,
):
    """One program per tensor, rows in a fixed order."""
    member = tl.program_id(0)
    begin = tl.load(first_rows + member)
    end = tl.load(first_rows + member + 1)
    sumsqs = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    left = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], KEEP, tl.float64)
    nan_coefs = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        here = row < end
        sumsq = tl.load(slots + row, mask=here, other=0.0)
        nan = tl.load(slots + num_rows + row, mask=here, other=0.0)
        inf = tl.load(slots + 2 * num_rows + row, mask=here, other=0.0)
        coef = tl.load(slots + 3 * num_rows + row, mask=here, other=KEEP)
        remains = norm_of(sumsq, nan, inf) * coef
        sumsqs += sumsq
        nans += nan
        infs += inf
        left += remains * remains
        least = tl.where(coef < least, coef, least)
        nan_coefs += is_nan(coef).to(tl.int32)
    owner = tl.load(owners + member)
    tl.store(stats + owner * 3, tl.sum(sumsqs, axis=0))
    tl.store(stats + owner * 3 + 1, tl.sum(nans, axis=0))
    tl.store(stats + owner * 3 + 2, tl.sum(infs, axis=0))
    # A NaN is the least of all, so that it is seen.
    any_nan = tl.sum(nan_coefs, axis=0) > 0
    tl.store(coefs + owner, tl.where(any_nan, float("nan"), tl.min(least, axis=0)))
    tl.store(squares + owner, tl.sum(left, axis=0))


@triton.jit(do_not_specialize=["num_tensors", "on_nonfinite"])
def agc(
    stats,  # float64 [num_tensors, 3]
    squares,  # float64 [num_tensors]
    state,  # float64 [3]: moved on
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]: read, too
    verdict,  # float32 [14]
    num_tensors,
    on_nonfinite,
    BLOCK: tl.constexpr,
):
    """One program."""
    total, flags, worst = health_of(stats, num_tensors, BLOCK)
    refused = (flags != 0) & (on_nonfinite != OFFICIAL)
    left = tl.zeros([BLOCK], tl.float64)
    clipped = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        left += tl.load(squares + i, mask=i < num_tensors, other=0.0)
        coef = tl.load(coefs + i, mask=i < num_tensors, other=KEEP)
        clipped = tl.where(coef >= 1.0, clipped, 1)
        tl.store(coefs + i, tl.where(refused, REFUSE, coef), mask=i < num_tensors)
    write_report(
        state,
        verdict,
        total,
        worst,
        flags,
        refused,
        (tl.max(clipped, axis=0) > 0) & (refused == 0),
        tl.where(refused, 0.0, tl.sqrt(tl.sum(left, axis=0))),
    )
    tl.store(norm, total)


def check_shapes(grads: list[Tensor], params: list[Tensor]) -> None:
    """Raise RuntimeError unless each gradient has a parameter of its shape."""
    if len(grads) != len(params):
        raise RuntimeError(
            f"zclip::agc_: expected one parameter per gradient ({len(grads)}), got {len(params)}"
        )
    for i, (grad, param) in enumerate(zip(grads, params, strict=True)):
        if grad.shape != param.shape:
            raise RuntimeError(
                f"zclip::agc_: params[{i}]: expected the shape of grads[{i}], "
                f"{tuple(grad.shape)}, got {tuple(param.shape)}"
            )


def agc_(
    grads: list[Tensor],
    params: list[Tensor],
    state: Tensor,
    clip: float,
    eps: float,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`zclip.reference.agc_`."""
    check_shapes(grads, params)
    check_state(state, NUM_COUNTERS, "agc_")
    rows = RowList(grads, params)
    table = rows.table
    count, num_rows = table.num_tensors, table.num_rows
    shape = {"LANES": LANES, "BLOCK": RULE_BLOCK, **OPTIONS}
    with on_device(table.device):
        slots = state.new_empty((NUM_SLOTS, num_rows))
        stats = state.new_empty((count, NUM_STATS))
        squares = state.new_empty(count)
        norm, coefs, verdict = empty_results(
            stats, torch.float64 if table.has_float64 else torch.float32
        )
        for group in table.groups:
            agc_rows[(group.num_rows,)](
                table.grads,
                table.weights,
                table.lengths,
                table.first_rows,
                slots,
                group.first_row,
                num_rows,
                count,
                bits_of(clip),
                bits_of(eps),
                DTYPE=FORMAT_OF[group.grad_dtype],
                WEIGHT_DTYPE=FORMAT_OF[group.weight_dtype],
                **shape,
            )
        agc_tensors[(count,)](
            slots,
            table.first_rows,
            table.owners,
            stats,
            coefs,
            squares,
            num_rows,
            BLOCK=RULE_BLOCK,
            **OPTIONS,
        )
        agc[(1,)](
            stats,
            squares,
            state,
            norm,
            coefs,
            verdict,
            count,
            on_nonfinite,
            BLOCK=RULE_BLOCK,
            **OPTIONS,
        )
        for group in table.groups:
            agc_scale[(group.num_rows,)](
                table.grads,
                table.lengths,
                table.first_rows,
                slots,
                verdict,
                group.first_row,
                num_rows,
                count,
                DTYPE=FORMAT_OF[group.grad_dtype],
                **shape,
            )
        rows.write_back()
    return norm, stats, coefs, verdict
