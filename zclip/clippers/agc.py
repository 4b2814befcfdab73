"""AGC of NFNets: each row of a gradient is bounded by the norm of the same row of its weight."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from zclip import ops
from zclip.checks import check_limit
from zclip.clippers.clipper import Clipper
from zclip.clippers.result import ClipResult
from zclip.layout import ON_NONFINITE
from zclip.parallel import Record, Reduction
from zclip.parallel.units import Split, UnitRows
from zclip.reference.report import health_of, report
from zclip.reference.scale import scaled
from zclip.schemas import norm_dtype
from zclip.targets import Targets


class AGC(Clipper):
    """Scale each row whose gradient exceeds ``clip`` times its weight (arXiv 2102.06171).

    The paper leaves the last linear layer out: give ``step`` the parameters without it. The
    coefficients of the result are per tensor and only to look at: the smallest of its rows, or -1
    if the step was skipped. Rows of DTensors may be split over ranks: sums of their squares then
    travel with the statistics, and the coefficients of the result are those of this rank's rows.

    Args:
        clip: largest ratio of the norm of a gradient row to that of its weight row.
        eps: weight rows with a smaller norm count as this.
        on_nonfinite: "skip" skips a step with NaN or Inf; "official" does not look.
        split_dim: for ``distribute(process_group=...)`` only, which says that ranks hold parts of
            plain tensors: along which dimension these are cut. 0 means that every rank has rows of
            its own, anything else that every rank has a piece of each row. A tensor of one
            dimension is one row, however it is cut.
    """

    is_global: ClassVar[bool] = False
    is_by_norm: ClassVar[bool] = False
    folds_scale: ClassVar[bool] = False  # rows are compared with weights, at their true size

    def __init__(
        self,
        clip: float = 0.01,
        eps: float = 1e-3,
        *,
        on_nonfinite: str = "skip",
        split_dim: int = 0,
    ) -> None:
        super().__init__(on_nonfinite=on_nonfinite)
        self.clip = check_limit("clip", clip)
        self.eps = check_limit("eps", eps)
        self.split_dim = split_dim
        self._row_coefs: list[Tensor] = []
        self._split: tuple[Reduction, Split] | None = None

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return self.clip, self.eps, ON_NONFINITE[self.on_nonfinite]

    def _decide(
        self,
        found: Targets,
        grads: list[Tensor],
        loss: Tensor | None,
        grad_scale: Tensor | None,
        extra: Tensor | None,
        record: Record | None,
    ) -> tuple[ClipResult, Record | None]:
        reduction = self._peers.reduction
        if reduction is None:
            return super()._decide(found, grads, loss, grad_scale, extra, record)
        if grad_scale is not None:
            raise NotImplementedError(
                "AGC: expected apply='inplace', because it scales rows, got 'grad_scale'"
            )
        split = self._split[1] if self._split is not None and self._split[0] is reduction else None
        rows = UnitRows(reduction, found.params, grads, self.clip, self.eps, self.split_dim, split)
        self._split = (reduction, rows.split)
        own_lanes = rows.lanes()
        lanes = own_lanes if extra is None or record else torch.cat([own_lanes, extra.double()])
        reduced = reduction.reduce(
            ops.grad_stats(grads), None if record else loss, lanes, self._tag()
        )
        health = health_of(reduced.stats)
        refused = health.refused(ON_NONFINITE[self.on_nonfinite])
        judged = rows.judge(reduced.record.extra, reduced.copies, refused)
        self._row_coefs = judged.coefs
        verdict = report(
            self._state.states[0],
            reduced.stats,
            health,
            blocked=refused,
            clipped=~refused & judged.is_clipped,
            clipped_norm=torch.where(refused, 0.0, judged.clipped_norm),
        )
        carried = reduced.record
        if record is None:
            record = replace(carried, extra=carried.extra[len(own_lanes) :])
        else:
            record = replace(record, desynced=record.desynced | carried.desynced)
        norm = health.norm.to(norm_dtype(grads))
        return ClipResult(norm, reduced.stats, judged.least, verdict), record

    def _scale(self, grads: list[Tensor], coefs: Tensor) -> None:
        for grad, rows in zip(grads, self._row_coefs, strict=True):
            if grad.numel():
                shape = (-1, *[1] * (grad.dim() - 1)) if grad.dim() > 1 else ()
                grad.copy_(scaled(grad, rows.reshape(shape)))
        self._row_coefs = []

    def _clip_at_once(
        self, found: Targets, grads: list[Tensor], loss: Tensor | None
    ) -> ClipResult | None:
        params = found.params
        if self._present is not None:
            params = [params[i] for i in self._present]
        state = self._state.states[0]
        arguments = (params, state, *self.settings({}))
        served = ops.serve(torch.ops.zclip.agc_.default, grads, *arguments, name=self._name)
        if served is None:
            devices = ", ".join(str(device) for device in ops.by_device(grads))
            raise ValueError(
                f"AGC: expected parameters on one device, got {devices}; make a clipper for each"
            )
        return ClipResult(*served[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_split": None}
