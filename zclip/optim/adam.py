"""Adam and AdamW, fused with clipping."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zclip.clippers import Clipper
from zclip.layout import ADAM, AMSGRAD, DECOUPLED, MAXIMIZE, STOCHASTIC
from zclip.optim.fused import FusedOptimizer


def moments_like(param: Tensor) -> Tensor:
    """Return zeros for a moment: float32, or float64 for float64 parameters, laid out alike."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


class _AdamStep(FusedOptimizer):
    algorithm: ClassVar[int] = ADAM
    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    decisive: ClassVar[str | None] = "amsgrad"

    def settings_of(self, group: Mapping[str, Any]) -> list[float]:
        beta1, beta2 = group["betas"]
        flags = MAXIMIZE * bool(group["maximize"]) + AMSGRAD * bool(group["amsgrad"])
        flags += DECOUPLED * bool(group["decoupled_weight_decay"])
        flags += STOCHASTIC * self.stochastic_rounding
        decay = group["weight_decay"]
        return [0.0, float(beta1), float(beta2), float(group["eps"]), float(decay), float(flags)]

    def new_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": moments_like(param),
            "exp_avg_sq": moments_like(param),
        }
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = moments_like(param)
        return state


class AdamW(_AdamStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` with clipping inside the step; see :class:`FusedOptimizer`.

    Its ``state_dict`` and that of the torch class can be loaded into each other at any time.

    Args:
        params: this and all arguments up to ``fused``: as for ``torch.optim.AdamW``. The step is
            fused whatever ``foreach`` and ``fused`` say.
        clipper: a :class:`zclip.Clipper`, or the name of one: "zclip", "adagc", "global_norm",
            "spike_skip", "agc", "auto_clip"; None does not clip and does not measure gradients.
        skip_nonfinite: with a clipper, skip a step with NaN or Inf even if the rule would not.
        telemetry: measure weights, updates and state; see :class:`StepResult`.
        stochastic_rounding: round bfloat16 parameters up or down at random, so that updates
            smaller than half a unit in the last place are not lost.
        seed: of the rounding. The same seed gives the same bits.
        clip_settings: settings of a clipper given by name.

    Example:
        >>> optimizer = zclip.optim.AdamW(model.parameters(), lr=3e-4, clipper="zclip")
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.result.weight_norm  # a tensor; nothing has waited
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        clipper: str | Clipper | None = None,
        skip_nonfinite: bool = True,
        telemetry: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **clip_settings: Any,
    ) -> None:
        torch.optim.AdamW.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_up(clipper, skip_nonfinite, telemetry, stochastic_rounding, seed, clip_settings)


class Adam(_AdamStep, torch.optim.Adam):
    """``torch.optim.Adam`` with clipping inside the step; see :class:`AdamW` for the arguments."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        clipper: str | Clipper | None = None,
        skip_nonfinite: bool = True,
        telemetry: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **clip_settings: Any,
    ) -> None:
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._set_up(clipper, skip_nonfinite, telemetry, stochastic_rounding, seed, clip_settings)
