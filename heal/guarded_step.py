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
from heal.buffer_copies import BufferCopies
from heal.calm import TOGETHER
from heal.config import HealingConfig
from heal.ranks import HAS_FAILED, NUM_LANES, HostFacts, Ranks
from zclip.clippers import Clipper, ClipResult
from zclip.layout import BLOCKED, FLAGS, HAS_INF, HAS_NAN, NUM_LOSS_STATE, NUM_VERDICT
from zclip.schemas import wide_dtype

LOSS_DECAY = 0.99  # the running mean of the loss remembers about a hundred steps
LOSS_WARMUP_STEPS = 25  # losses to absorb before any is called a spike, as many as ZClip's norms

NO_LOSS_SCALE = 0.0  # no scaler has it: what is sent where there is none


class WatchedOptimizer(zclip.ClippedOptimizer):
    """A clipped optimizer that also refuses a step whose loss is NaN or Inf."""

    watch: "LossWatch | None" = None
    ranks: Ranks | None = None  # set where there are others to agree with

    def clip(self, loss: Tensor | None, extra: Tensor | None) -> ClipResult | None:
        """Clip and judge, without the step; None if there are no gradients."""
        return self._clip(loss, None, extra)

    def step_if_allowed(self, result: ClipResult) -> None:
        """Step unless the result says that it is refused.

        A verdict in host memory is simply read: that is no wait, and cheaper than to have the
        optimizer look at it.
        """
        if result.verdict.is_cpu and self.apply == "inplace":
            if not self._is_refused(result.verdict.tolist()):
                self._step_inner()
            return
        refused = self._refused(result, None)
        if not self.guards_on_device:
            self._waiting_step(refused)
        elif not self._must_wait() or not bool(refused):
            self._guarded_step(result, refused, None)

    def _is_refused(self, row: list[float]) -> bool:
        """Answer as :meth:`_refused` does, from a verdict on the host."""
        heeds_flags = self.skip_nonfinite and self.clipper.on_nonfinite != "skip"
        return row[BLOCKED] > 0 or (heeds_flags and bool(int(row[FLAGS]) & (HAS_NAN | HAS_INF)))

    def _is_refused_there(self, verdict: Tensor) -> Tensor:
        """Answer as :meth:`_is_refused` does, without reading the device."""
        refused = verdict[BLOCKED]
        if self.skip_nonfinite and self.clipper.on_nonfinite != "skip":
            flags = verdict[FLAGS].int() & (HAS_NAN | HAS_INF)
            refused = torch.maximum(refused, (flags > 0).to(refused))
        return refused

    def _step_inner(self) -> None:
        if self.lr_scale == 1.0:
            self.inner.step()
            return
        with self._scaled_lr():
            self.inner.step()

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
        if result is not None and self.watch is not None:
            if self.ranks is not None and result.extra is not None:
                self.watch.judge_together(self.ranks, result.extra, result.verdict)
            elif loss is not None:
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
        if loss.dim() and loss.numel() != 1:
            loss = loss.mean()
        if loss.device != self.state.device:
            loss = loss.to(self.state.device, non_blocking=True)
        torch.ops.zclip.watch_loss_(
            self.state, loss, verdict, self.factor, 0, LOSS_DECAY, LOSS_WARMUP_STEPS
        )

    def judge_together(self, ranks: Ranks, summed: Tensor, verdict: Tensor) -> None:
        """As :meth:`judge`, by the mean over all ranks; refuse too if one of them failed."""
        self.judge(ranks.mean_loss(summed, self.state), verdict)
        verdict[BLOCKED].clamp_(min=summed[HAS_FAILED].clamp(max=1.0).to(verdict.dtype))


class GuardedStep:
    """One or more optimizers that step together or not at all.

    Args:
        optimizers: bare ones are wrapped; of those already clipped the clipper is kept.
        config: clipping and the limits of the loss.
        named_parameters: names for what goes wrong.
        scaler: a GradScaler. Each optimizer is then refused by itself, as torch does it.
        process_group: the ranks that act alike; all if None.
        buffers: what forward writes beside the gradients; put back where the step is refused.

    Raises:
        TypeError: an optimizer calls a closure by itself, as LBFGS does.

    Attributes:
        optimizers: the wrapped ones.
        mailbox: carries the verdict of each step, the loss scale after it, and what ranks told.
        posted: what went into it last, if that was in host memory.
        ranks: with whom to agree. Then loss, news and failures are judged by what all told.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        config: HealingConfig,
        named_parameters: Iterable[tuple[str, Tensor]],
        scaler: Any = None,
        process_group: Any = None,
        buffers: BufferCopies | None = None,
    ) -> None:
        names = list(named_parameters)
        self.optimizers = [_watched(o, config, names) for o in optimizers]
        for optimizer in self.optimizers:
            if optimizer._needs_closure():
                raise TypeError(
                    f"{type(optimizer.inner).__name__} calls a closure several times within one "
                    "step, which cannot be refused or repeated as a whole; wanted another optimizer"
                )
        self.buffers = BufferCopies(torch.nn.Module()) if buffers is None else buffers
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        params = (p for o in self.optimizers for g in o.param_groups for p in g["params"])
        device = next((p.device for p in params), torch.device("cpu"))
        self.ranks = Ranks(device, process_group)
        width = NUM_VERDICT + 1 + (NUM_LANES if self.ranks.has_others else 0)
        self.mailbox = zclip.Mailbox(config.lag, width=width, room=TOGETHER)
        self.posted: list[float] | None = None
        self.watch = LossWatch(config.loss_spike_factor, device)
        for optimizer in self.optimizers:
            optimizer.watch = self.watch
        if self.ranks.has_others and self.optimizers:
            # The first carries what ranks tell; each judges gradients that all ranks share.
            self.optimizers[0].ranks = self.ranks
            _add_record_group(self.optimizers[0].clipper, self.ranks)
        self._no_scale = torch.full((1,), NO_LOSS_SCALE, device=device)

    def step(self, step: int, loss: Tensor | None, facts: HostFacts | None = None) -> bool:
        """Take the step, or refuse it on the device; False if there were no gradients at all.

        Args:
            step: its number.
            loss: of this rank.
            facts: what the host of this rank knows; all ranks hear of it in the record.
        """
        lanes = None
        if self.ranks.has_others:
            lanes = self.ranks.lanes(facts or HostFacts(), loss)
        sent = Sent()
        try:
            if self.scaler is not None:
                self._scaled_step(sent, loss, lanes)
            else:
                self._joint_step(sent, loss, lanes)
        finally:  # also if the optimizer fails: ranks that count their mail differently are lost
            if sent.verdict is not None:
                self._post(step, sent.verdict, sent.told)
            else:
                self.buffers.settle(False)
        return sent.verdict is not None

    def _post(self, step: int, verdict: Tensor, told: Tensor | None) -> None:
        scale = getattr(self.scaler, "_scale", None)
        if verdict.is_cpu and (scale is None or scale.is_cpu):
            row: list[float] = verdict.tolist()  # host memory: reading it is no wait
            row.append(NO_LOSS_SCALE if scale is None else float(scale))
            self.posted = row if told is None else row + told.tolist()
            self.mailbox.post_row(step, self.posted)
            self.buffers.settle(self.optimizers[0]._is_refused(row), scale is not None)
            return
        self.posted = None
        tail = self._no_scale if scale is None else scale.reshape(1).to(verdict)
        parts = [verdict, tail] if told is None else [verdict, tail, told]
        self.mailbox.post(step, torch.cat(parts))
        self.buffers.settle(self.optimizers[0]._is_refused_there(verdict), scale is not None)

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold different tensors, so that weights cannot be measured together."""
        return any(o.clipper._peers._groups[1] is not None for o in self.optimizers)

    def name_of(self, worst: int) -> str:
        """Return the name of the tensor that a verdict blames, "" if it is not known."""
        if len(self.optimizers) != 1 or worst < 0:
            return ""
        try:
            return self.optimizers[0].clipper._names()[worst]
        except (IndexError, AssertionError):
            return ""

    def _joint_step(self, sent: "Sent", loss: Tensor | None, lanes: Tensor | None) -> None:
        """Judge all first. Half a step, with one part refused, is a state no run ever had."""
        results = []
        for i, optimizer in enumerate(self.optimizers):
            results.append(optimizer.clip(loss, lanes) if i == 0 else optimizer.clip(None, None))
        found = [result for result in results if result is not None]
        if not found:
            return
        if len(found) > 1:
            device = found[0].verdict.device
            blocked = torch.stack([r.blocked.to(device, non_blocking=True) for r in found]).amax()
            for result in found:
                result.verdict[BLOCKED] = blocked.to(result.verdict.device, non_blocking=True)
        sent.verdict, sent.told = found[0].verdict, found[0].extra
        for optimizer, judged in zip(self.optimizers, results, strict=True):
            if judged is not None:
                optimizer.step_if_allowed(judged)

    def _scaled_step(self, sent: "Sent", loss: Tensor | None, lanes: Tensor | None) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.clipper.result = None  # the scaler may refuse without asking the clipper
            self.scaler.step(optimizer, loss=loss, extra=lanes if i == 0 else None)
        results = [o.result for o in self.optimizers]
        found = next((result for result in results if result is not None), None)
        if found is not None:
            sent.verdict, sent.told = found.verdict, found.extra
        self.scaler.update()
        if lanes is not None and (not results or results[0] is None):
            sent.told = self.ranks.reduce(lanes)
        if found is None:
            # Not fused: the scaler saw Inf on the host, and told nobody.
            sent.verdict = torch.zeros(NUM_VERDICT, device=self._no_scale.device)
            overflowed = torch.tensor(_OVERFLOWED, device=sent.verdict.device)
            sent.verdict[: len(_OVERFLOWED)] = overflowed
            if sent.told is not None:
                self.watch.judge_together(self.ranks, sent.told, sent.verdict)
            elif loss is not None:
                self.watch.judge(loss, sent.verdict)


class Sent:
    """What goes out by mail, known before the optimizer may fail."""

    verdict: Tensor | None = None
    told: Tensor | None = None


_OVERFLOWED = (1.0, float(zclip.layout.HAS_INF), math.inf)  # blocked, flags, norm


def _add_record_group(clipper: Clipper, ranks: Ranks) -> None:
    """Have the record reach all ranks, also where gradients need no message; keep other groups."""
    peers = clipper._peers
    if peers._record_group is None:
        process_group, pipeline_group = peers._groups
        clipper.distribute(process_group, pipeline_group, ranks.record_group)


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
