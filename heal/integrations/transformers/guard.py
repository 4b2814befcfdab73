"""Clip and step of a trainer, guarded. The trainer asks for both apart; the verdict joins them."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from heal.guarded_step import GuardedStep
from zclip.clippers import ClipResult
from zclip.layout import BLOCKED


class TrainerGuard:
    """Measures gradients before they are clipped, refuses bad steps on the device.

    Without ZClip the trainer's own clip follows the measurement, so that a healthy run stays bit
    by bit what it was. Nothing here reads the device.

    Args:
        guarded: the optimizers, as the healer wrapped them.
        clips: whether our clipper takes the place of the trainer's.
        own_clip: ``accelerator.clip_grad_norm_`` as it was.
        unscale: brings gradients to their true size where a GradScaler made them larger.

    Attributes:
        loss: the sum of what the micro-batches of this step returned; None before the first.
    """

    def __init__(
        self,
        guarded: GuardedStep,
        clips: bool,
        own_clip: Callable[..., Any],
        unscale: Callable[[], None],
    ) -> None:
        self.loss: Tensor | None = None
        self._guarded = guarded
        self._clips = clips
        self._own_clip = own_clip
        self._unscale = unscale
        self._results: list[ClipResult | None] | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Hear of a micro-batch; its share of the step's mean loss, on the device."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """Take the place of the accelerator's: returns the norm before clipping, on the device."""
        parameters = list(parameters)
        self._unscale()
        found = self._judge()
        if not self._clips or not found:
            norm = self._own_clip(parameters, max_norm, norm_type)
            if not found or not isinstance(norm, Tensor):
                return norm
            # Refused gradients are zero by now; the log should tell their norm as it was.
            told = found[0].total_norm.to(norm)
            return torch.where(found[0].blocked > 0, told, norm)
        return found[0].total_norm.float()

    @torch.no_grad()
    def step(self, step: int) -> bool:
        """Step unless refused, and mail the verdict; False if there were no gradients."""
        guarded = self._guarded
        if self._results is None:  # a trainer that does not clip
            self._judge()
        results, self._results, self.loss = self._results or [], None, None
        for optimizer, judged in zip(guarded.optimizers, results, strict=True):
            if judged is None:
                optimizer.inner.step()  # what it makes of no gradients is its own affair
            else:
                optimizer.step_if_allowed(judged)
        found = next((r for r in results if r is not None), None)
        if found is None:
            return False
        guarded.mailbox.post(step, torch.cat([found.verdict, guarded._no_scale]))
        return True

    def forget(self) -> None:
        """Drop what a step that was given up left behind."""
        self._results = self.loss = None

    def _judge(self) -> list[ClipResult]:
        """Measure, clip if that is ours, and judge the loss; all groups or none are refused."""
        if self._results is None:
            optimizers = self._guarded.optimizers
            self._results = [
                o.clip(self.loss if i == 0 else None) for i, o in enumerate(optimizers)
            ]
        found = [r for r in self._results if r is not None]
        if len(found) > 1:
            device = found[0].verdict.device
            blocked = torch.stack([r.blocked.to(device, non_blocking=True) for r in found]).amax()
            for result in found:
                result.verdict[BLOCKED] = blocked.to(result.verdict.device, non_blocking=True)
        return found


def clip_limit(own: float, configured: float) -> float:
    """Return the limit for our clipper: the trainer's where it has one."""
    return float(own) if own and own > 0 and math.isfinite(own) else configured
