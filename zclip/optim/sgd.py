"""SGD, with momentum and Nesterov, fused with clipping."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zclip import layout
from zclip.clippers import Clipper
from zclip.layout import MAXIMIZE, NESTEROV, STOCHASTIC
from zclip.optim.adam import moments_like
from zclip.optim.fused import FusedOptimizer


class SGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with clipping inside the step; see :class:`AdamW` for the rest.

    The momentum of a parameter is created by the first step that has its gradient.
    """

    algorithm: ClassVar[int] = layout.SGD
    keys: ClassVar[tuple[str, ...]] = ("momentum_buffer", "no_second_moment", "no_maximum")
    decisive: ClassVar[str | None] = "momentum"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        clipper: str | Clipper | None = None,
        skip_nonfinite: bool = True,
        telemetry: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **clip_settings: Any,
    ) -> None:
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_up(clipper, skip_nonfinite, telemetry, stochastic_rounding, seed, clip_settings)

    def settings_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return the settings of a group; the betas are momentum and dampening."""
        flags = MAXIMIZE * bool(group["maximize"]) + NESTEROV * bool(group["nesterov"])
        flags += STOCHASTIC * self.stochastic_rounding
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return [0.0, momentum, dampening, 0.0, float(group["weight_decay"]), float(flags)]

    def new_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """Return the momentum, if there is one, and a count for stochastic rounding."""
        momentum = moments_like(param) if group["momentum"] else None
        state: dict[str, Any] = {"momentum_buffer": momentum}
        if self.stochastic_rounding:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        return state
