"""Triton backend of zclip::clip_by_global_norm_: three launches (two more per further dtype).

Partials; finish, whose last program to arrive applies the rule; scale. Finish cannot ride on
partials, because its ticket must start at zero and partials is what makes it so: nothing outlives a
call, and two calls on two streams cannot meet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.global_norm_ import check_counters, global_norm_rule
from zclip.backends.triton.grad_stats import finish_row, launch_partials
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.number import float64_of
from zclip.backends.triton.report import TENSOR_BLOCK
from zclip.backends.triton.scale_ import launch_scale
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.layout import NUM_STATS, NUM_VERDICT, ZERO


@triton.jit(do_not_specialize=["num_chunks", "num_tensors", "max_norm_bits", "nonfinite"])
def clip_by_global_norm_finish(
    slots,  # float64 [3, num_chunks]
    tensor_chunks,  # int64 [num_tensors + 1]: where the chunks of each tensor begin
    owners,  # int64 [num_tensors]: the tensor's place in the list that the caller gave
    ticket,  # int32 [1]: zero at the start
    state,  # float64 [3]: moved on; any pointer if not HAS_STATE
    stats,  # float64 [num_tensors, 3]: written, one row per program
    norm,  # float32 or float64 [1]: written, as all below, by the last program to arrive
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_chunks,
    num_tensors,
    max_norm_bits: tl.int64,
    nonfinite,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tensor. Who comes last does not matter: rows are added in index order."""
    finish_row(slots, tensor_chunks, owners, stats, num_chunks, False, BLOCK)
    # One thread stores the row and takes the ticket, so the release covers its stores; after the
    # barrier the acquire covers the loads of the other threads.
    tl.debug_barrier()
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if arrived == num_tensors - 1:
        max_norm = float64_of(max_norm_bits)
        reported = global_norm_rule(
            stats, state, coefs, verdict, num_tensors, max_norm, nonfinite, HAS_STATE, BLOCK
        )
        tl.store(norm, reported)


def clip_by_global_norm_(
    grads: list[Tensor], state: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`zclip.reference.clip_by_global_norm_`."""
    check_counters(state, "clip_by_global_norm_")
    tensors = TensorList(grads, WRITE)
    table = tensors.table
    count = len(grads)
    with on_device(table.device):
        slots, ticket = launch_partials(table)
        stats = slots.new_empty((count, NUM_STATS))
        norm = slots.new_empty((), dtype=torch.float64 if table.has_float64 else torch.float32)
        coefs = slots.new_empty(count)
        verdict = slots.new_empty(NUM_VERDICT, dtype=torch.float32)
        clip_by_global_norm_finish[(count,)](
            slots,
            table.tensor_chunks,
            table.owners,
            ticket,
            state,
            stats,
            norm,
            coefs,
            verdict,
            table.num_chunks,
            count,
            bits_of(max_norm),
            nonfinite,
            HAS_STATE=state.numel() > 0,
            BLOCK=TENSOR_BLOCK,
            **OPTIONS,
        )
        launch_scale(table, coefs, stats if nonfinite == ZERO else None)
        tensors.write_back()
    return norm, stats, coefs, verdict
