"""Rows of weights and gradients that may be split over ranks, for rules that look at rows.

A unit is a row: all elements with the same first index, or a whole tensor of one dimension. FSDP2
keeps rows whole and splits vectors; tensor parallelism splits rows too. Units that one rank holds
are judged there; of the others, the sums of squares travel with the statistics, in extra lanes.
Along a pipeline every stage has lanes for the split tensors of all.
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


Split = list[tuple[int, int]]


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
        reduction: how the ranks meet.
        params: the weights.
        grads: the local part of each gradient.
        clip: largest ratio of the norm of a gradient row to that of its weight row.
        eps: weight rows with a smaller norm count as this.
        split_dim: along which dimension plain tensors are cut, where ranks hold parts of them.
        split: what the attribute was in an earlier step with the same reduction; None in the first.

    Attributes:
        split: row of the whole and number of units, of every split tensor on any stage.
    """

    def __init__(
        self,
        reduction: Reduction,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        clip: float,
        eps: float,
        split_dim: int,
        split: Split | None,
    ) -> None:
        self._reduction = reduction
        self._clip, self._eps = clip, eps
        weights = reduction.local_parts(params)
        cut = split_dim if reduction.is_parted else None
        self._units = [
            _units_of(param, weight, grad, cut)
            for param, weight, grad in zip(params, weights, grads, strict=True)
        ]
        first = reduction.own.start
        ours = [(first + i, u.number) for i, u in enumerate(self._units) if u.is_split]
        self.split: Split = reduction.along_pipeline(ours) if split is None else split

    def lanes(self) -> Tensor:
        """Return what has to be added up over ranks.

        For every tensor the squares that are left after clipping and the number of rows clipped,
        of units that are whole here; then for every split tensor two numbers per unit.
        """
        own, number = self._reduction.own, len(self._reduction.names)
        lengths = [2 * units for _, units in self.split]
        lanes = torch.zeros(
            2 * number + sum(lengths), dtype=torch.float64, device=self._reduction.device
        )
        left, clipped = lanes[:number], lanes[number : 2 * number]
        split = dict(zip(self._rows(), lanes[2 * number :].split(lengths), strict=True))
        for i, counted in enumerate(self._reduction.counted):
            units = self._units[i]
            if not counted or not len(units.grads):
                continue
            if units.is_split:
                both = split[own.start + i].view(2, -1)
                stop = units.start + len(units.grads)
                both[:, units.start : stop] = torch.stack([units.grads, units.weights])
                continue
            coefs = self._coefs(units.grads, units.weights)
            left[own.start + i].copy_((units.grads * coefs.square()).sum())
            clipped[own.start + i].copy_((coefs < KEEP).sum())
        return lanes

    def judge(self, lanes: Tensor, copies: Tensor, refused: Tensor) -> Judged:
        """Return the coefficients, from the summed lanes."""
        number = len(self._reduction.names)
        left, clipped = lanes[:number] / copies, lanes[number : 2 * number].sum() > 0
        squares, at = left.sum(), 2 * number
        split = {}
        for row, units_there in self.split:
            both = lanes[at : at + 2 * units_there].view(2, -1) / copies[row]
            at += 2 * units_there
            split[row] = self._coefs(both[0], both[1])
            squares = squares + (both[0] * split[row].square()).sum()
            clipped = clipped | (split[row] < KEEP).any()
        coefs, least = [], []
        unscaled = torch.full_like(squares, KEEP)
        for row, units in enumerate(self._units, self._reduction.own.start):
            if units.is_split:
                rows = split[row][units.start : units.start + len(units.grads)]
            else:
                rows = self._coefs(units.grads, units.weights)
            rows = torch.where(refused, REFUSE, rows)
            coefs.append(rows)
            least.append(rows.amin() if len(rows) else torch.where(refused, REFUSE, unscaled))
        return Judged(coefs, torch.stack([*least, unscaled])[:-1], clipped, squares.sqrt())

    def _rows(self) -> list[int]:
        return [row for row, _ in self.split]

    def _coefs(self, grads: Tensor, weights: Tensor) -> Tensor:
        norms = grads.sqrt()
        limit = self._clip * weights.sqrt().clamp(min=self._eps)
        return torch.where(norms <= limit, KEEP, limit / norms.clamp(min=SMALLEST_GRAD_NORM))


def _units_of(param: Any, weight: Tensor, grad: Tensor, cut: int | None) -> _Units:
    if is_dtensor(param):
        cut = None
    if param.dim() <= 1:
        split = is_dtensor(param) and any(not p.is_replicate() for p in param.placements)
        return _Units(_squares(grad, 1), _squares(weight, 1), 1, 0, split or cut is not None)
    if cut is not None:  # each rank has rows of its own, or a piece of every row
        rows = len(weight)
        return _Units(_squares(grad, rows), _squares(weight, rows), rows, 0, cut % param.dim() > 0)
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
            raise ValueError(f"AGC: expected placements Shard or Replicate, got {param.placements}")
        chunk = -(-size // mesh.size(dim))
        skipped = min(size, chunk * coordinate[dim])
        start, size = start + skipped, min(chunk, size - skipped)
    return start


def _squares(part: Tensor, rows: int) -> Tensor:
    """Return the sum of squares of each row, without NaN and Inf: a skipped step needs no more."""
    wide = part.detach().to(wide_dtype(part.device)).reshape(rows, -1 if part.numel() else 0)
    return torch.where(wide.isfinite(), wide, 0.0).square().sum(dim=1)
