"""Rows of weights and gradients that may be split over ranks, for rules that look at rows.

A unit is a row: all elements with the same first index, or a whole tensor of one dimension. FSDP2
keeps rows whole and splits vectors; tensor parallelism splits rows too. Units that one rank holds
are judged there; of the others, the sums of squares travel with the statistics, in extra lanes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zclip.layout import KEEP, REFUSE
from zclip.parallel.placement import is_dtensor
from zclip.parallel.reduction import Reduction
from zclip.schemas import wide_dtype

SMALLEST_GRAD_NORM = 1e-6  # timm divides by no less


class _Units(NamedTuple):
    """The rows of one tensor, as this rank sees them."""

    grads: Tensor  # [r]: sums of squares of the elements held here
    weights: Tensor  # [r]
    number: int  # of units in the whole tensor
    start: int  # the first of those held here
    is_split: bool


class Judged(NamedTuple):
    """What became of the rows."""

    coefs: list[Tensor]  # for each tensor, one per row held here
    least: Tensor  # [N]: the smallest of them
    is_clipped: Tensor  # 0-dim: any row on any rank
    clipped_norm: Tensor  # 0-dim: of the whole model


class UnitRows:
    """Measures rows before the ranks meet, and judges them after.

    Args:
        reduction: how the ranks meet; not along a pipeline, whose stages have other rows.
        params: the weights.
        grads: the local part of each gradient.
        clip: largest ratio of the norm of a gradient row to that of its weight row.
        eps: weight rows with a smaller norm count as this.

    Raises:
        ValueError: plain tensors were said to be parts of a whole, or there is a pipeline: then
            nothing tells which elements make a row.
    """

    def __init__(
        self,
        reduction: Reduction,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        clip: float,
        eps: float,
    ) -> None:
        if reduction.explicit:
            raise ValueError(
                "AGC looks at rows, and process_group= or pipeline_group= do not say which "
                "elements make one; wanted DTensors, or another clipper"
            )
        self._reduction = reduction
        self._clip, self._eps = clip, eps
        weights = reduction.local_parts(params)
        self._units = [
            _units_of(param, weight, grad)
            for param, weight, grad in zip(params, weights, grads, strict=True)
        ]

    def lanes(self) -> Tensor:
        """Return what has to be added up over ranks.

        For every tensor the squares that are left after clipping and the number of rows clipped,
        of units that are whole here; then for every split tensor two numbers per unit.
        """
        left, clipped, split = [], [], []
        for units, counted in zip(self._units, self._reduction.counted, strict=True):
            zero = units.grads.new_zeros(())
            if units.is_split:
                both = units.grads.new_zeros(2, units.number)
                if counted and len(units.grads):
                    stop = units.start + len(units.grads)
                    both[:, units.start : stop] = torch.stack([units.grads, units.weights])
                split.append(both.reshape(-1))
            coefs = self._coefs(units.grads, units.weights)
            counts = counted and not units.is_split
            left.append((units.grads * coefs.square()).sum() if counts else zero)
            clipped.append((coefs < KEEP).sum() if counts else zero)
        wide = [torch.stack(left), torch.stack(clipped), *split]
        return torch.cat([t.double() for t in wide])

    def judge(self, lanes: Tensor, copies: Tensor, refused: Tensor) -> Judged:
        """Return the coefficients, from the summed lanes."""
        number = len(self._units)
        left, clipped = lanes[:number] / copies, lanes[number : 2 * number].sum() > 0
        squares, at = left.sum(), 2 * number
        coefs, least = [], []
        unscaled = torch.full_like(squares, KEEP)
        for i, units in enumerate(self._units):
            rows = self._coefs(units.grads, units.weights)
            if units.is_split:
                both = lanes[at : at + 2 * units.number].view(2, -1) / copies[i]
                at += 2 * units.number
                whole = self._coefs(both[0], both[1])
                squares = squares + (both[0] * whole.square()).sum()
                clipped = clipped | (whole < KEEP).any()
                rows = whole[units.start : units.start + len(rows)]
            rows = torch.where(refused, REFUSE, rows)
            coefs.append(rows)
            least.append(rows.amin() if len(rows) else torch.where(refused, REFUSE, unscaled))
        return Judged(coefs, torch.stack(least), clipped, squares.sqrt())

    def _coefs(self, grads: Tensor, weights: Tensor) -> Tensor:
        norms = grads.sqrt()
        limit = self._clip * weights.sqrt().clamp(min=self._eps)
        return torch.where(norms <= limit, KEEP, limit / norms.clamp(min=SMALLEST_GRAD_NORM))


def _units_of(param: Any, weight: Tensor, grad: Tensor) -> _Units:
    if param.dim() <= 1:
        split = is_dtensor(param) and any(not p.is_replicate() for p in param.placements)
        return _Units(_squares(grad, 1), _squares(weight, 1), 1, 0, split)
    split = is_dtensor(param) and any(not p.is_replicate() and p.dim > 0 for p in param.placements)
    start = _first_row(param) if split else 0
    rows = weight.shape[0] if weight.dim() == param.dim() else 0  # not in the mesh: none
    return _Units(_squares(grad, rows), _squares(weight, rows), param.shape[0], start, split)


def _first_row(param: Any) -> int:
    """Return the first row that this rank holds: sharding cuts as ``torch.chunk`` does.

    Raises:
        ValueError: the rows are cut in another way, and their columns too.
    """
    from torch.distributed.tensor import Shard

    mesh, start, size = param.device_mesh, 0, param.shape[0]
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for dim, placement in enumerate(param.placements):
        if placement.is_replicate() or placement.dim > 0:
            continue
        if not isinstance(placement, Shard):
            raise ValueError(f"AGC knows no rows of {param.placements}; wanted Shard or Replicate")
        chunk = -(-size // mesh.size(dim))
        skipped = min(size, chunk * coordinate[dim])
        start, size = start + skipped, min(chunk, size - skipped)
    return start


def _squares(part: Tensor, rows: int) -> Tensor:
    """Return the sum of squares of each row, without NaN and Inf: a refused step needs no more."""
    wide = part.detach().to(wide_dtype(part.device)).reshape(rows, -1 if part.numel() else 0)
    return torch.where(wide.isfinite(), wide, 0.0).square().sum(dim=1)
