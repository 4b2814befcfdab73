"""Clip and step of a trainer, guarded. The trainer asks for both apart; the verdict joins them."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from heal.step.guarded_step import GuardedStep, Judged
from heal.step.ranks import HostFacts
from heal.step.watched_optimizer import WatchedOptimizer
from zclip.clippers import ClipResult


class TrainerGuard:
    """Measures gradients before they are clipped, refuses bad steps on the device.

    Without ZClip the trainer's own clip follows the measurement, so that a healthy run stays bit
    by bit what it was. Nothing here reads the device.

    Args:
        guarded: the optimizers, as the healer wrapped them.
        clips: whether our clipper takes the place of the trainer's.
        own_clip: ``accelerator.clip_grad_norm_`` as it was.
        facts: tells what the host knows of the step that is about to be taken.
        scaled: what steps where a GradScaler is in use; None without one.

    Attributes:
        loss: the sum of what the micro-batches of this step returned; None before the first.
        facts: what was told in the last step.
        has_loss: whether that step had a loss.
    """

    def __init__(
        self,
        guarded: GuardedStep,
        clips: bool,
        own_clip: Callable[..., Any],
        facts: Callable[[], HostFacts],
        scaled: "ScaledStep | None" = None,
    ) -> None:
        self.loss: Tensor | None = None
        self.facts = HostFacts()
        self.has_loss = False
        self._guarded = guarded
        self._clips = clips
        self._own_clip = own_clip
        self._ask_facts = facts
        self._scaled = scaled
        self._results: list[ClipResult | None] | None = None
        self._judged: Judged | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Hear of a micro-batch; its share of the step's mean loss, on the device."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """Take the place of the accelerator's: returns the norm before clipping, on the device."""
        parameters = list(parameters)
        if self._scaled is not None:
            self._scaled.unscale()
        found = self._judge()
        if not self._clips or not found:
            own = self._own_clip if self._scaled is None else torch.nn.utils.clip_grad_norm_
            norm = own(parameters, max_norm, norm_type)
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
        results, self._results = self._results or [], None
        self.has_loss, self.loss = self.loss is not None, None
        judged, self._judged = self._judged, None
        try:
            for optimizer, result in zip(guarded.optimizers, results, strict=True):
                if result is None:
                    optimizer.inner.step()  # what it makes of no gradients is its own affair
                elif self._scaled is not None:
                    self._scaled.step(optimizer, result)
                else:
                    optimizer.step_if_allowed(result)
        finally:  # also if the optimizer fails: ranks must count their mail alike
            if judged is not None:
                guarded.post(step, judged)
            else:
                guarded.buffers.settle(False)
        return judged is not None

    def forget(self) -> None:
        """Drop what a step that was given up left behind."""
        self._results = self._judged = self.loss = None

    def _judge(self) -> list[ClipResult]:
        """Measure, clip if that is ours, and judge the loss; all groups or none are refused."""
        if self._results is None:
            ranks = self._guarded.ranks
            self.facts = self._ask_facts()
            lanes = ranks.lanes(self.facts, self.loss) if ranks.has_others else None
            self._results = self._guarded.clip(self.loss, lanes)
            self._judged = self._guarded.judge(self._results, self.loss, lanes)
        return [result for result in self._results if result is not None]


class ScaledStep:
    """The step of an optimizer whose gradients a GradScaler made larger.

    The scaler steps, as without us; a step that we refuse looks to it like one that overflowed, so
    that nothing but its own way of refusing is used.

    Args:
        accelerated: the optimizer as accelerate wrapped it.
        unscale: brings gradients to their true size; once per step.
    """

    def __init__(self, accelerated: Any, unscale: Callable[[], None]) -> None:
        self.unscale = unscale
        self._scaler = accelerated.scaler
        self._own_step = accelerated.step

    def step(self, optimizer: WatchedOptimizer, result: ClipResult) -> None:
        """Step unless refused or overflowed, and update the scale."""
        refused = optimizer.skips(result.verdict)
        state = self._scaler._per_optimizer_states[id(optimizer.inner)]
        for found in state["found_inf_per_device"].values():
            found.clamp_(min=refused.to(found, non_blocking=True))
        with optimizer.scaled_lr():
            self._own_step()


def clip_limit(own: float, configured: float) -> float:
    """Return the limit for our clipper: the trainer's where it has one."""
    return float(own) if own and own > 0 and math.isfinite(own) else configured
