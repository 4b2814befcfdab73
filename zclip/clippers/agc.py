"""AGC of NFNets: each row of a gradient is bounded by the norm of the same row of its weight."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zclip import ops
from zclip.checks import check_limit
from zclip.clippers.clipper import Clipper, FusedRule, Rule
from zclip.clippers.result import ClipResult
from zclip.layout import ON_NONFINITE
from zclip.targets import Targets


class AGC(Clipper):
    """Scale each row whose gradient exceeds ``clip`` times its weight (arXiv 2102.06171).

    The paper leaves the last linear layer out: give ``step`` the parameters without it. The
    coefficients of the result are per tensor and only say whether the step was refused.

    Args:
        clip: largest ratio of the norm of a gradient row to that of its weight row.
        eps: weight rows with a smaller norm count as this.
        on_nonfinite: "skip" refuses a step with NaN or Inf; "official" does not look.
    """

    is_global: ClassVar[bool] = False

    def __init__(
        self, clip: float = 0.01, eps: float = 1e-3, *, on_nonfinite: str = "skip"
    ) -> None:
        super().__init__(on_nonfinite=on_nonfinite)
        self.clip = check_limit("clip", clip)
        self.eps = check_limit("eps", eps)

    def _ops(self) -> tuple[Rule, FusedRule]:
        raise NotImplementedError("AGC reads the weights, so it has no rule on statistics alone")

    def _settings(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return self.clip, self.eps, ON_NONFINITE[self.on_nonfinite]

    def _clip_at_once(
        self, found: Targets, grads: list[Tensor], loss: Tensor | None
    ) -> ClipResult | None:
        params = found.params
        if self._present is not None:
            params = [params[i] for i in self._present]
        state = self._state.states[0]
        arguments = (params, state, *self._settings({}))
        served = ops.serve(torch.ops.zclip.agc_.default, grads, *arguments, name=self._name)
        if served is None:
            devices = ", ".join(str(device) for device in ops.by_device(grads))
            raise ValueError(f"AGC got parameters on {devices}; wanted one device per clipper")
        return ClipResult(*served[0])
