"""The operators of the clipping step for CPU tensors without compiled kernels.

Made of torch's batched operators, so that an install without a compiler costs about what torch's
own :func:`torch.nn.utils.clip_grad_norm_` costs. The contract is the reference's: finite sums of
squares within 1e-6, counts of NaN and Inf, gradients untouched where the coefficient is 1, the
same bits for any number of threads. Where it holds less:

- A coefficient is rounded to float32 before it multiplies, so the last bit of a clipped gradient
  may differ from that of the kernels.
- A tensor with NaN or Inf, or one whose squares leave the range of float32, is measured by the
  reference, ten times slower. Such steps are rare.
- With float16 and bfloat16 it takes up to twice as long as torch's own clipping, which rounds norm
  and coefficient to the dtype of the gradients, an error of up to 0.8 %; here they are exact.

Values are read here, which waits for nothing because they are in host memory. Other devices
without kernels are served by :mod:`zclip.reference`, which reads nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zclip import reference
from zclip.checks import DTYPES, check_one_device, check_tensors, check_writable
from zclip.layout import INF, KEEP, NAN, NUM_STATS, PROPAGATE, REFUSE, SUMSQ, ZERO
from zclip.reference.rules import find_rule
from zclip.schemas import norm_dtype

ROW = 128
"""Elements whose squares are added in float32: 16 additions in each lane of 8, then in float64."""

GATHERED = 1 << 16
"""Smaller tensors are copied together first: a call of torch costs more than the copy."""

BLOCK = 1 << 18
"""Elements gathered or widened at a time, so that the copy stays in the cache."""

SUMMED_BY_ONE_THREAD = 1 << 15
"""Threads share a longer sum, and its bits then depend on their number."""

SMALLEST_SQUARE = 1e-30
"""A mean square below this may have lost digits to underflow in float32."""

SMALLEST_COEF = 1e-36
"""A coefficient below this is not a normal number in float32."""


def grad_stats(grads: list[Tensor]) -> Tensor:
    """As :func:`zclip.reference.grad_stats`."""
    _check(grads)
    return _measure(grads)


def scale_(grads: list[Tensor], coefs: Tensor) -> None:
    """As :func:`zclip.reference.scale_`."""
    _check([*grads, coefs])
    _check_writable(grads)
    _multiply_(grads, coefs)


def zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    """As :func:`zclip.reference.zero_nonfinite_`."""
    bad = (stats[:, NAN] + stats[:, INF]).tolist()
    reference.zero_nonfinite_(
        [grad for grad, count in zip(grads, bad, strict=True) if count], stats
    )


def implementations(ops: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the operators of ``ops`` that this file serves, by name."""
    ours: dict[str, Callable[..., Any]] = {
        "grad_stats": grad_stats,
        "scale_": scale_,
        "zero_nonfinite_": zero_nonfinite_,
        "clip_by_": clip_by_,
        "decide_by_": decide_by_,
    }
    return {name: ours[name] for name in ops if name in ours}


def clip_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`zclip.reference.clip_by_`: measure, choose and scale."""
    _check_writable(grads)
    norm, stats, coefs, verdict = decide_by_(grads, state, rule, settings, loss)
    if find_rule(rule).typed(settings).get("nonfinite", PROPAGATE) == ZERO:
        zero_nonfinite_(grads, stats)
    _multiply_(grads, coefs)
    return norm, stats, coefs, verdict


def decide_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`zclip.reference.decide_by_`: measure and choose; the gradients are only read."""
    _check(grads)
    stats = _measure(grads)
    coefs, verdict = reference.rule_(state, stats, rule, settings, loss)
    nonfinite = find_rule(rule).typed(settings).get("nonfinite", PROPAGATE)
    norm = reference.reported_norm(stats, nonfinite).to(norm_dtype(grads))
    return norm, stats, coefs, verdict


def _measure(grads: list[Tensor]) -> Tensor:
    sizes = [grad.numel() for grad in grads]
    dtypes = [grad.dtype for grad in grads]
    squares = torch.zeros(len(grads), dtype=torch.float64)
    for dtype in set(dtypes):
        members = [i for i, own in enumerate(dtypes) if own == dtype]
        large = [i for i in members if sizes[i] >= GATHERED]
        if large:
            sums = torch.stack([_sum_of_squares(grads[i].reshape(-1)) for i in large])
            squares.index_copy_(0, torch.tensor(large), sums)
        _add_small(squares, grads, sizes, [i for i in members if sizes[i] < GATHERED])
    stats = torch.zeros((len(grads), NUM_STATS), dtype=torch.float64)
    stats[:, SUMSQ] = squares
    for i, total in enumerate(squares.tolist()):
        is_sound = sizes[i] * SMALLEST_SQUARE <= total < math.inf
        if not is_sound and not _is_zero(grads[i]):
            stats[i] = reference.grad_stats([grads[i]])[0]
    return stats


def _multiply_(grads: list[Tensor], coefs: Tensor) -> None:
    if len(coefs) != len(grads):
        raise ValueError(f"coefs: expected one per tensor ({len(grads)}), got {len(coefs)}")
    values = coefs.tolist()
    chosen = [i for i, coef in enumerate(values) if coef != KEEP]
    if not chosen:
        return
    common = values[chosen[0]] if len({values[i] for i in chosen}) == 1 else None
    if common is not None and common != REFUSE and not 0.0 < abs(common) < SMALLEST_COEF:
        for dtype in {grads[i].dtype for i in chosen}:
            # A tensor of the right dtype: by anything else torch multiplies three times slower.
            coef = coefs[chosen[0]].to(torch.float64 if dtype == torch.float64 else torch.float32)
            torch._foreach_mul_([grads[i] for i in chosen if grads[i].dtype == dtype], coef)
        return
    for i in chosen:
        if values[i] == REFUSE:
            grads[i].zero_()
        elif 0.0 < abs(values[i]) < SMALLEST_COEF:
            reference.scale_([grads[i]], coefs[i : i + 1])
        else:
            grads[i].mul_(coefs[i])


def _check(tensors: list[Tensor]) -> None:
    """Raise as the reference does; one look at each tensor if all is well."""
    kinds = {(type(t), t.layout, t.dtype, t.device) for t in tensors}
    if any(
        kind not in (Tensor, torch.nn.Parameter)
        or layout != torch.strided
        or dtype not in DTYPES
        or device.type != "cpu"
        for kind, layout, dtype, device in kinds
    ):
        check_tensors(tensors)
        check_one_device(tensors)


def _check_writable(grads: list[Tensor]) -> None:
    if not all([grad.is_contiguous() for grad in grads]):
        check_writable(grads)


def _sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of a large vector, as a 0-dim tensor of float64."""
    if flat.dtype == torch.float64 and flat.numel() <= SUMMED_BY_ONE_THREAD:
        return flat.square().sum()
    whole = flat.numel() // ROW * ROW
    parts = (flat[:whole],)
    if flat.dtype not in (torch.float32, torch.float64):
        parts = flat[:whole].split(BLOCK)
    norms = [_row_norms(part) for part in parts]
    if whole < flat.numel():
        zeros = _zeros(flat.dtype)[whole + ROW - flat.numel()]
        norms.append(_row_norms(torch.cat([flat[whole:], zeros])))
    return _sum_of_squares(torch.cat(norms) if len(norms) > 1 else norms[0])


def _add_small(
    squares: Tensor, tensors: list[Tensor], sizes: list[int], members: list[int]
) -> None:
    """Add the squares of small tensors of one dtype to their places, many to a call of torch."""
    block: list[int] = []
    filled = 0
    for i in members:
        if filled + sizes[i] > BLOCK:
            _add_block(squares, tensors, sizes, block)
            block, filled = [], 0
        block.append(i)
        filled += sizes[i]
    _add_block(squares, tensors, sizes, block)


def _add_block(
    squares: Tensor, tensors: list[Tensor], sizes: list[int], members: list[int]
) -> None:
    tiny = [i for i in members if sizes[i] < ROW]
    if tiny:
        flat = torch._C._nn.flatten_dense_tensors([tensors[i] for i in tiny])
        _add_runs(squares, tiny, [sizes[i] for i in tiny], flat.double())
    small = [i for i in members if sizes[i] >= ROW]
    if small:
        zeros = _zeros(tensors[small[0]].dtype)
        parts: list[Tensor] = []
        rows: list[int] = []
        for i in small:
            missing = -sizes[i] % ROW
            parts += [tensors[i], zeros[missing]] if missing else [tensors[i]]
            rows.append((sizes[i] + missing) // ROW)
        norms = _row_norms(torch._C._nn.flatten_dense_tensors(parts))
        _add_runs(squares, small, rows, norms)


def _add_runs(squares: Tensor, owners: list[int], lengths: list[int], values: Tensor) -> None:
    """Add the squares of runs of values, one run per owner, one after another."""
    owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor(lengths))
    squares.index_add_(0, owner, values.square())


def _row_norms(flat: Tensor) -> Tensor:
    """Return the norm of each row of ``ROW`` elements, in float64."""
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    norms: Tensor = torch.linalg.vector_norm(wide.view(-1, ROW), dim=1)
    return norms.double()


@functools.cache
def _zeros(dtype: torch.dtype) -> list[Tensor]:
    """Return views of 0, 1, ... ROW - 1 zeros."""
    zeros = torch.zeros(ROW, dtype=dtype)
    return [zeros[:count] for count in range(ROW)]


def _is_zero(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool(torch.linalg.vector_norm(tensor, math.inf) == 0)
