"""Lion (Chen et al., arXiv 2302.06675), fused with clipping. torch has no such class."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zclip import layout
from zclip.checks import check_fraction, check_limit
from zclip.clippers import Clipper
from zclip.layout import DECOUPLED, MAXIMIZE, STOCHASTIC
from zclip.optim.adam import moments_like
from zclip.optim.fused import FusedOptimizer


class Lion(FusedOptimizer):
    """Step by the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        params: as for every torch optimizer.
        lr: learning rate; the authors take a third to a tenth of AdamW's.
        betas: the first weighs the momentum in the direction, the second in the momentum.
        weight_decay: decoupled; the authors take three to ten times AdamW's.
        maximize: ascend.
        foreach: accepted and ignored, as is the next: the step is always fused.
        fused: see there.
        clipper: this and all others: see :class:`AdamW`.
        skip_nonfinite: see there.
        telemetry: see there.
        stochastic_rounding: see there.
        seed: see there.
        clip_settings: see there.
    """

    algorithm: ClassVar[int] = layout.LION
    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "no_second_moment", "no_maximum")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        clipper: str | Clipper | None = None,
        skip_nonfinite: bool = True,
        telemetry: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **clip_settings: Any,
    ) -> None:
        check_limit("lr", lr)
        check_limit("weight_decay", weight_decay)
        for i, beta in enumerate(betas):
            check_fraction(f"betas[{i}]", beta)
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        Optimizer.__init__(self, params, defaults)
        self._set_up(clipper, skip_nonfinite, telemetry, stochastic_rounding, seed, clip_settings)

    def settings_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return the settings of a group."""
        beta1, beta2 = group["betas"]
        flags = DECOUPLED + MAXIMIZE * bool(group["maximize"])
        flags += STOCHASTIC * self.stochastic_rounding
        return [0.0, float(beta1), float(beta2), 0.0, float(group["weight_decay"]), float(flags)]

    def new_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """Return the momentum and a count of updates."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        return {"step": step, "exp_avg": moments_like(param)}
