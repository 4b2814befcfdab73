"""How a chunk of a gradient is laid over the threads of a program.

A full chunk is 16-byte aligned, which the table guarantees, and read without masks: only then does
Triton emit 128-bit accesses. Everything else (tails, unaligned heads) takes the masked loop.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from zclip.backends.triton.launch import OPTIONS
from zclip.backends.triton.number import narrow, pointer_to, widen
from zclip.backends.triton.table import CHUNK

LANES = 2048
"""Elements in a row. 256 threads hold 16 bytes of a 16-bit format each; others take more loads."""

FORMAT_OF = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}

ROWS_OF = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8, torch.float64: 2}
"""Rows in flight at once: 128 bytes per thread, enough to hide memory and few enough registers."""


@triton.jit
def full_tile(ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return the offsets of ROWS rows, int32 [ROWS, LANES]."""
    return tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def aligned_pointer(address, DTYPE: tl.constexpr):
    """Return the pointer to a full chunk. A masked chunk must not have this hint: it may be wrong.

    The hint must stand where the pointer is made; on what a function returned it would be lost.
    """
    if DTYPE == tl.bfloat16:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    else:
        pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    return pointer


@triton.jit
def load_row(address, start, length, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Return up to LANES elements from ``start`` on, widened; zeros beyond the end."""
    offset = start + tl.arange(0, LANES)
    return widen(tl.load(pointer_to(address, DTYPE) + offset, mask=offset < length, other=0), DTYPE)


@triton.jit
def store_row(address, start, length, value, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Write back what :func:`load_row` read."""
    offset = start + tl.arange(0, LANES)
    pointer = pointer_to(address, DTYPE) + offset
    tl.store(pointer, narrow(value, DTYPE), mask=offset < length)


@triton.jit
def rewrite(
    address,
    length,
    setting,
    APPLY: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Replace every element x of a chunk by APPLY(x, setting)."""
    if length == CHUNK:
        pointer = aligned_pointer(address, DTYPE) + full_tile(ROWS, LANES)
        for start in tl.static_range(0, CHUNK, ROWS * LANES):
            x = widen(tl.load(pointer + start), DTYPE)
            tl.store(pointer + start, narrow(APPLY(x, setting), DTYPE))
    else:
        for start in range(0, length, LANES):
            x = load_row(address, start, length, DTYPE, LANES)
            store_row(address, start, length, APPLY(x, setting), DTYPE, LANES)


def shape_for(dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel over chunks of this dtype."""
    return {
        "DTYPE": FORMAT_OF[dtype],
        "CHUNK": CHUNK,
        "LANES": LANES,
        "ROWS": ROWS_OF[dtype],
        **OPTIONS,
    }
