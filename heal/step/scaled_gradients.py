"""What a GradScaler knows of gradients: how much too large they are, and whether they overflowed.

``GradScaler.step`` refuses each optimizer by itself, which for several may be half a step. So the
scaler is asked here for all that it does before and after, and the step between is ours.
"""

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState

from zclip import ClippedOptimizer
from zclip.unscaling import adopt_unscaling


class ScaledGradients:
    """The gradients of one step, before they are clipped.

    Args:
        scaler: a GradScaler that is enabled.
        optimizers: as they are stepped.

    Attributes:
        scales: for each optimizer by what its gradients are yet to be divided; None if by nothing.
        overflows: 0-dim float32, on any device: not 0 where the scaler found NaN or Inf.

    Raises:
        RuntimeError: the scaler has stepped one of them already in this iteration.
    """

    def __init__(self, scaler: Any, optimizers: list[Any]) -> None:
        self._scaler = scaler
        self.scales: list[Tensor | None] = []
        self.overflows: list[Tensor] = []
        for optimizer in optimizers:
            self.scales.append(self._prepare(optimizer))
            self.overflows += self._state_of(optimizer)["found_inf_per_device"].values()

    def update(self) -> None:
        """Have the scale grow, or back off where the scaler found something."""
        states = self._scaler._per_optimizer_states.values()
        if any(state["found_inf_per_device"] for state in states):  # else update() would raise
            self._scaler.update()

    def forget(self) -> None:
        """Let the scaler begin anew: the next gradients are scaled, also if this step failed."""
        self._scaler._per_optimizer_states.clear()

    def _prepare(self, optimizer: ClippedOptimizer) -> Tensor | None:
        adopt_unscaling(self._scaler, optimizer, optimizer.inner)
        stage = self._state_of(optimizer)["stage"]
        if stage is OptState.STEPPED:
            raise RuntimeError(
                f"{type(optimizer.inner).__name__} was stepped by the GradScaler already; wanted "
                "healer.step to do it, once"
            )
        if stage is OptState.UNSCALED:
            return None
        if optimizer.guards_on_device:  # as the scaler does: float16 parameters are allowed here
            self._scaler._check_inf_per_device(optimizer)
            scale: Tensor = self._scaler._get_scale_async()
            return scale
        self._scaler.unscale_(optimizer)
        return None

    def _state_of(self, optimizer: ClippedOptimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler._per_optimizer_states[id(optimizer)]
        return state
