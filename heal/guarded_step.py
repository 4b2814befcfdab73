"""The optimizer's step, guarded: clip, watch the loss, step unless refused, mail the verdict.

Everything is decided on the device. The host hears of it ``lag`` steps later.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import zclip
from heal.config import HealingConfig
from zclip.clippers import Clipper, ClipResult
from zclip.layout import BLOCKED, NUM_LOSS_STATE, NUM_VERDICT
from zclip.schemas import wide_dtype

LOSS_DECAY = 0.99  # the running mean of the loss remembers about a hundred steps
LOSS_WARMUP_STEPS = 25  # losses to absorb before any is called a spike, as many as ZClip's norms

NO_LOSS_SCALE = 0.0  # no scaler has it: what is sent where there is none


class WatchedOptimizer(zclip.ClippedOptimizer):
    """A clipped optimizer that also refuses a step whose loss is NaN or Inf."""

    watch: "LossWatch | None" = None

    def clip(self, loss: Tensor | None) -> ClipResult | None:
        """Clip and judge, without the step; None if there are no gradients."""
        return self._clip(loss, None)

    def step_if_allowed(self, result: ClipResult) -> None:
        """Step unless the result says that it is refused."""
        refused = self._refused(result, None)
        if not self.guards_on_device:
            self._waiting_step(refused)
        elif not self._must_wait() or not bool(refused):
            self._guarded_step(result, refused, None)

    def _clip(
        self, loss: Tensor | None, grad_scale: Tensor | None, extra: Tensor | None = None
    ) -> ClipResult | None:
        """As the parent, but the loss is judged before the verdict counts; mail goes out later."""
        groups = self.param_groups
        if self.apply == "inplace":
            self.clipper.step(groups, loss=loss, grad_scale=grad_scale, extra=extra)
        else:
            self.clipper.decide(groups, loss=loss, grad_scale=grad_scale, extra=extra)
        result = self.clipper.result
        if result is not None and loss is not None and self.watch is not None:
            self.watch.judge(loss, result.verdict)
        self._steps += 1
        return result


class LossWatch:
    """The running statistics of the loss, on the device of the parameters."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.state = torch.zeros(NUM_LOSS_STATE, dtype=wide_dtype(device), device=device)

    def judge(self, loss: Tensor, verdict: Tensor) -> None:
        """Write into the verdict what the loss says. Rises are left to the host, which has time."""
        loss = loss.detach()
        if loss.numel() != 1:
            loss = loss.mean()
        if loss.device != self.state.device:
            loss = loss.to(self.state.device, non_blocking=True)
        torch.ops.zclip.watch_loss_(
            self.state, loss, verdict, self.factor, 0, LOSS_DECAY, LOSS_WARMUP_STEPS
        )


class GuardedStep:
    """One or more optimizers that step together or not at all.

    Args:
        optimizers: bare ones are wrapped; of those already clipped the clipper is kept.
        config: clipping and the limits of the loss.
        named_parameters: names for what goes wrong.
        scaler: a GradScaler. Each optimizer is then refused by itself, as torch does it.

    Raises:
        TypeError: an optimizer calls a closure by itself, as LBFGS does.

    Attributes:
        optimizers: the wrapped ones.
        mailbox: carries the verdict of each step, and the loss scale after it.
        watches_loss: whether the loss is judged; not where there are several ranks.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        config: HealingConfig,
        named_parameters: Iterable[tuple[str, Tensor]],
        scaler: Any = None,
    ) -> None:
        names = list(named_parameters)
        self.optimizers = [_watched(o, config, names) for o in optimizers]
        for optimizer in self.optimizers:
            if optimizer._needs_closure():
                raise TypeError(
                    f"{type(optimizer.inner).__name__} calls a closure several times within one "
                    "step, which cannot be refused or repeated as a whole; wanted another optimizer"
                )
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self.mailbox = zclip.Mailbox(config.lag, width=NUM_VERDICT + 1)
        params = (p for o in self.optimizers for g in o.param_groups for p in g["params"])
        device = next((p.device for p in params), torch.device("cpu"))
        self.watch = LossWatch(config.loss_spike_factor, device)
        # Each rank has a loss of its own: judged here, one rank would refuse what others take.
        # A NaN that matters is in the gradients, which all ranks share.
        self.watches_loss = not _has_peers()
        for optimizer in self.optimizers:
            optimizer.watch = self.watch if self.watches_loss else None
        self._no_scale = torch.full((1,), NO_LOSS_SCALE, device=device)

    @torch.no_grad()
    def step(self, step: int, loss: Tensor | None) -> bool:
        """Take the step, or refuse it on the device; False if there were no gradients at all."""
        if self.scaler is not None:
            verdict = self._scaled_step(loss)
        else:
            verdict = self._joint_step(loss)
        if verdict is None:
            return False
        scale = getattr(self.scaler, "_scale", None)
        tail = self._no_scale if scale is None else scale.reshape(1).to(verdict)
        self.mailbox.post(step, torch.cat([verdict, tail]))
        return True

    def name_of(self, worst: int) -> str:
        """Return the name of the tensor that a verdict blames, "" if it is not known."""
        if len(self.optimizers) != 1 or worst < 0:
            return ""
        try:
            return self.optimizers[0].clipper._names()[worst]
        except (IndexError, AssertionError):
            return ""

    def _joint_step(self, loss: Tensor | None) -> Tensor | None:
        """Judge all first. Half a step, with one part refused, is a state no run ever had."""
        results = []
        for i, optimizer in enumerate(self.optimizers):
            results.append(optimizer.clip(loss if i == 0 else None))
        found = [result for result in results if result is not None]
        if not found:
            return None
        if len(found) > 1:
            device = found[0].verdict.device
            blocked = torch.stack([r.blocked.to(device, non_blocking=True) for r in found]).amax()
            for result in found:
                result.verdict[BLOCKED] = blocked.to(result.verdict.device, non_blocking=True)
        for optimizer, judged in zip(self.optimizers, results, strict=True):
            if judged is not None:
                optimizer.step_if_allowed(judged)
        return found[0].verdict

    def _scaled_step(self, loss: Tensor | None) -> Tensor | None:
        for optimizer in self.optimizers:
            optimizer.clipper.result = None  # the scaler may refuse without asking the clipper
            self.scaler.step(optimizer, loss=loss)
        self.scaler.update()
        results = [o.result for o in self.optimizers if o.result is not None]
        if results:
            return results[0].verdict
        # Not fused: the scaler saw Inf on the host, and told nobody.
        verdict = torch.zeros(NUM_VERDICT, device=self._no_scale.device)
        verdict[: len(_OVERFLOWED)] = torch.tensor(_OVERFLOWED, device=verdict.device)
        if loss is not None and self.watches_loss:
            self.watch.judge(loss, verdict)
        return verdict


_OVERFLOWED = (1.0, float(zclip.layout.HAS_INF), math.inf)  # blocked, flags, norm


def _has_peers() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _watched(
    optimizer: Optimizer, config: HealingConfig, names: list[tuple[str, Tensor]]
) -> WatchedOptimizer:
    apply = "inplace"
    if isinstance(optimizer, zclip.ClippedOptimizer):
        clipper, apply, optimizer = optimizer.clipper, optimizer.apply, optimizer.inner
    else:
        clipper = make_clipper(config)
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    theirs = [(name, p) for name, p in names if id(p) in own]
    complete = len({id(p) for _, p in theirs}) == len(own)
    return WatchedOptimizer(
        optimizer,
        clipper,
        apply=apply,
        named_parameters=theirs if complete else None,
        lag=config.lag,
    )


def make_clipper(config: HealingConfig) -> Clipper:
    """Return the clipper that the settings ask for; without one, norms are still measured."""
    if not config.zclip_enabled:
        return zclip.GlobalNorm(math.inf)
    return zclip.ZClip(z_thresh=config.zclip_z_threshold, max_grad_norm=config.max_grad_norm)
