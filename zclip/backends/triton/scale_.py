"""Triton backend of zclip::scale_: one launch per dtype; a gradient whose factor is 1 is unread."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.chunk import rewrite, shape_for
from zclip.backends.triton.launch import on_device
from zclip.backends.triton.number import is_finite
from zclip.backends.triton.table import Table
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.layout import NUM_STATS

KEEP, REFUSE = tl.constexpr(layout.KEEP), tl.constexpr(layout.REFUSE)
SMALLEST_NORMAL_FLOAT = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def scaled(x, coef):
    """Products of 16-bit numbers are taken in float32 and rounded once."""
    return x * coef.to(x.dtype)


@triton.jit
def scaled_wide(x, coef):
    """For coefficients that float32 would hold badly, because the norm overflowed it."""
    return (x.to(tl.float64) * coef).to(x.dtype)


@triton.jit
def finite_scaled(x, coef):
    """As scaled, with zero for NaN and Inf."""
    return tl.where(is_finite(x), x, 0.0) * coef.to(x.dtype)


@triton.jit
def finite_scaled_wide(x, coef):
    """As scaled_wide, with zero for NaN and Inf."""
    return (tl.where(is_finite(x), x, 0.0).to(tl.float64) * coef).to(x.dtype)


@triton.jit
def nothing(x, coef):
    """Zeros, without multiplying, because 0 * Inf is NaN."""
    return tl.zeros_like(x)


@triton.jit(do_not_specialize=["first_chunk"])
def scale_chunks(
    addresses,  # int64 [num_chunks]: of each chunk's first element
    lengths,  # int64 [num_chunks]
    tensors,  # int64 [num_chunks]: whose chunk it is
    coefs,  # float64 [num_tensors]
    stats,  # float64 [num_tensors, 3]; any pointer if not DROP_NONFINITE
    first_chunk,
    DROP_NONFINITE: tl.constexpr,  # zeros for NaN and Inf, in the tensors that have any
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per chunk of one dtype; it leaves at once if there is nothing to do."""
    chunk = first_chunk + tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    coef = tl.load(coefs + tensor)
    needed = coef != KEEP
    if DROP_NONFINITE:
        row = stats + tensor * 3
        needed = needed | (tl.load(row + 1) + tl.load(row + 2) > 0.0)
    if needed:
        address = tl.load(addresses + chunk)
        length = tl.load(lengths + chunk).to(tl.int32)
        if coef == REFUSE:
            rewrite(address, length, coef, nothing, DTYPE, CHUNK, LANES, ROWS)
        elif (tl.abs(coef) < SMALLEST_NORMAL_FLOAT) & (coef != 0.0):
            if DROP_NONFINITE:
                rewrite(address, length, coef, finite_scaled_wide, DTYPE, 0, LANES, ROWS)
            else:
                rewrite(address, length, coef, scaled_wide, DTYPE, 0, LANES, ROWS)
        else:
            if DROP_NONFINITE:
                rewrite(address, length, coef, finite_scaled, DTYPE, CHUNK, LANES, ROWS)
            else:
                rewrite(address, length, coef, scaled, DTYPE, CHUNK, LANES, ROWS)


def launch_scale(table: Table, coefs: Tensor, stats: Tensor | None = None) -> None:
    """Scale every tensor of the table; with stats, drop what is not finite on the way."""
    for group in table.groups:
        scale_chunks[(group.num_chunks,)](
            table.addresses,
            table.lengths,
            table.tensors,
            coefs,
            coefs if stats is None else stats,
            group.first_chunk,
            DROP_NONFINITE=stats is not None,
            **shape_for(group.dtype),
        )


def check_per_tensor(values: Tensor, shape: tuple[int, ...], op: str, argument: str) -> Tensor:
    """Return ``values``, contiguous, if they are float64 of this shape; else RuntimeError."""
    if values.dtype != torch.float64 or values.shape != shape:
        raise RuntimeError(
            f"zclip::{op}: {argument}: expected a float64 tensor of shape {list(shape)}, got "
            f"{values.dtype} of shape {list(values.shape)}"
        )
    return values.contiguous()


def scale_(grads: list[Tensor], coefs: Tensor) -> None:
    """See :func:`zclip.ops.scale_`."""
    coefs = check_per_tensor(coefs, (len(grads),), "scale_", "coefs")
    tensors = TensorList(grads, WRITE)
    with on_device(tensors.table.device):
        launch_scale(tensors.table, coefs)
        tensors.write_back()


def zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    """See :func:`zclip.ops.zero_nonfinite_`; the same kernel, with every factor 1."""
    stats = check_per_tensor(stats, (len(grads), NUM_STATS), "zero_nonfinite_", "stats")
    tensors = TensorList(grads, WRITE)
    with on_device(tensors.table.device):
        launch_scale(tensors.table, stats.new_full((len(grads),), layout.KEEP), stats)
        tensors.write_back()
