"""The optimizer's step, guarded: clip, watch the loss, step unless refused, mail the verdict.

Everything is decided on the device. The host hears of it ``lag`` steps later.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import zclip
from heal.config import HealingConfig
from heal.state.buffer_copies import BufferCopies
from heal.step.loss_watch import LossWatch
from heal.step.ranks import NUM_LANES, HostFacts, Ranks
from heal.step.scaled_gradients import ScaledGradients
from heal.step.watched_optimizer import watched
from zclip.clippers import Clipper, ClipResult
from zclip.clippers.result import merge_verdicts
from zclip.layout import BLOCKED, NUM_VERDICT

TOGETHER = 25
"""Records that may wait in the mailbox to be heard at once, if nothing comes up before. After a
forward and a backward pass the detectors have left the caches, and what it takes to bring them back
is several times what they do for a record."""

NO_LOSS_SCALE = 0.0  # no scaler has it: what is sent where there is none


Judged = tuple[Tensor, Tensor | None]
"""What goes out by mail: the verdict about a step, and what ranks told, if there are others."""


class GuardedStep:
    """One or more optimizers that step together or not at all.

    Args:
        optimizers: bare ones are wrapped; of those already clipped the clipper is kept.
        config: clipping and the limits of the loss.
        named_parameters: names for what goes wrong.
        scaler: a GradScaler. Its scale backs off where it found NaN or Inf, and only there.
        process_group: the ranks that act alike; all if None.
        note: told of what cannot be guarded.
        buffers: what forward writes beside the gradients; put back where the step is refused.

    Raises:
        TypeError: an optimizer calls a closure by itself, as LBFGS does.

    Attributes:
        optimizers: the wrapped ones.
        names: of the parameters, by identity.
        mailbox: carries the verdict of each step, the loss scale after it, and what ranks told.
        posted: what went into it last, if that was in host memory.
        watch: the statistics of the loss.
        ranks: with whom to agree. Then loss, news and failures are judged by what all told.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        config: HealingConfig,
        named_parameters: Iterable[tuple[str, Tensor]],
        scaler: Any = None,
        process_group: Any = None,
        note: Callable[[str], None] = lambda text: None,
        buffers: BufferCopies | None = None,
    ) -> None:
        named = list(named_parameters)
        self.names = {id(p): name for name, p in named}
        self.optimizers = [watched(o, config, named) for o in optimizers]
        for optimizer in self.optimizers:
            optimizer.note = note
            if optimizer.needs_closure:
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
        self._blamed = [o.clipper for o in self.optimizers]
        if self.ranks.has_others and self.optimizers:
            # The first carries what ranks tell; each judges gradients that all ranks share.
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
        scaled: ScaledGradients | None = None
        scales: Sequence[Tensor | None] = ()
        overflows: Sequence[Tensor] = ()
        if self.scaler is not None:
            scaled = ScaledGradients(self.scaler, self.optimizers)
            scales, overflows = scaled.scales, scaled.overflows
        judged = row = None
        try:
            results = self.clip(loss, lanes, scales)
            judged = self.judge(results, loss, lanes, overflows)
            if judged is not None and judged[0].is_cpu:
                row = judged[0].tolist()  # host memory: reading it is no wait
            for o, result in enumerate(results):
                if result is not None:
                    own = row if len(results) == 1 else None
                    scale = scales[o] if scales else None
                    self.optimizers[o].step_if_allowed(result, scale, row=own)
            if scaled is not None:
                scaled.update()
        finally:  # also if the optimizer fails: ranks that count their mail differently are lost
            if judged is not None:
                self.post(step, judged, row)
            else:
                self.buffers.settle(False)
            if scaled is not None:
                scaled.forget()
        return judged is not None

    def clip(
        self,
        loss: Tensor | None,
        lanes: Tensor | None,
        scales: Sequence[Tensor | None] = (),
    ) -> list[ClipResult | None]:
        """Measure and clip all; None stands for an optimizer without gradients.

        Args:
            loss: of this rank.
            lanes: what this rank tells the others; None if there are none.
            scales: for each optimizer by what its gradients are to be divided first; none if empty.
        """
        results = []
        for o, optimizer in enumerate(self.optimizers):
            results.append(optimizer.clip(loss, lanes, scales[o] if scales else None))
            lanes = None  # told once
        return results

    def judge(
        self,
        results: Sequence[ClipResult | None],
        loss: Tensor | None,
        lanes: Tensor | None,
        overflows: Sequence[Tensor] = (),
    ) -> Judged | None:
        """Come to one verdict about all optimizers and the loss; None if there are no gradients.

        Refused by one is refused by all: half a step is a state no run ever had. Their own
        verdicts hear of it.

        Args:
            results: what :meth:`clip` returned.
            loss: of this rank.
            lanes: as given to :meth:`clip`.
            overflows: 0-dim, on any device; refused if one is not 0.
        """
        found = [result for result in results if result is not None]
        if not found:
            return None
        told = None
        if lanes is not None:
            first = results[0]
            told = self.ranks.reduce(lanes) if first is None or first.extra is None else first.extra
        is_alone = len(results) == 1
        verdict = found[0].verdict if is_alone else self._merged(results)
        for overflow in overflows:
            blocked = verdict[BLOCKED]
            blocked.clamp_(min=_moved(overflow, blocked.device).clamp(max=1.0))
        if told is not None:
            self.watch.judge_together(self.ranks, told, verdict)
        elif loss is not None:
            self.watch.judge(loss, verdict)
        if not is_alone:
            for result in found:
                result.verdict[BLOCKED] = _moved(verdict[BLOCKED], result.verdict.device)
        return verdict, told

    def _merged(self, results: Sequence[ClipResult | None]) -> Tensor:
        """Return one verdict for all; the tensor that it blames is one of all, in their order."""
        pairs = zip(self.optimizers, results, strict=True)
        judged = [(o, result) for o, result in pairs if result is not None]
        measured = [pair for pair in judged if len(pair[1].stats)] or judged[:1]
        self._blamed = [o.clipper for o, _ in measured]
        device = self.watch.state.device
        merged = merge_verdicts(
            [_moved(result.verdict, device) for _, result in measured],
            torch.cat([_moved(result.stats, device) for _, result in measured]),
        )
        refused = [_moved(o.skips(result.verdict), device) for o, result in judged]
        merged[BLOCKED] = torch.stack(refused).amax()
        return merged

    def post(self, step: int, judged: Judged, row: list[float] | None = None) -> None:
        """Mail what was judged; ``row`` is the verdict, if it is in host memory and was read."""
        verdict, told = judged
        scale = None if self.scaler is None else getattr(self.scaler, "_scale", None)
        if verdict.is_cpu and (scale is None or scale.is_cpu):
            row = verdict.tolist() if row is None else row
            row.append(NO_LOSS_SCALE if scale is None else float(scale))
            self.posted = row if told is None else row + told.tolist()
            self.mailbox.post_row(step, self.posted)
            if self.buffers.are_there:
                self.buffers.settle(self.optimizers[0].was_skipped(row), scale is not None)
            return
        self.posted = None
        tail = self._no_scale if scale is None else scale.reshape(1).to(verdict)
        parts = [verdict, tail] if told is None else [verdict, tail, told]
        self.mailbox.post(step, torch.cat(parts))
        self.buffers.settle(self.optimizers[0].skips(verdict), scale is not None)

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold different tensors, so that weights cannot be measured together."""
        return any(o.clipper.groups.pipeline is not None for o in self.optimizers)

    def learn_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Hear the names again, because parameters have joined."""
        named = list(named_parameters)
        self.names.update((id(p), name) for name, p in named)
        for optimizer in self.optimizers:
            optimizer.learn_names(named)

    def name_of(self, worst: int) -> str:
        """Return the name of the tensor that a verdict blames, "" if it is not known."""
        if worst < 0:
            return ""
        names = [name for clipper in self._blamed for name in clipper.names]
        return names[worst] if worst < len(names) else ""


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to another device without a wait; only host memory is read as soon as it is there."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _add_record_group(clipper: Clipper, ranks: Ranks) -> None:
    """Have the record reach all ranks, also where gradients need no message; keep other groups."""
    groups = clipper.groups
    if groups.record is None:
        clipper.distribute(groups.process, groups.pipeline, ranks.record_group)
