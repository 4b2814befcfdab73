"""The optimizer's step, guarded: clip, watch the loss, step unless skipped, post the verdict.

Everything is decided on the device. The host polls the verdict ``lag`` steps later.
"""

import math
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zclip
from heal.buffers import BufferCopies
from heal.config import HealingConfig
from heal.ranks import HAS_FAILED, NO_FACTS, NUM_LANES, HostFacts, Ranks
from heal.record import Flag
from heal.state_checks import MEASURED
from zclip import ClippedOptimizer
from zclip.clippers import Clipper, ClipResult, LossWatch
from zclip.clippers.result import merge_verdicts
from zclip.layout import (
    BAD_STATE,
    BAD_WEIGHT,
    BLOCKED,
    CLIPPED_NORM,
    FLAGS,
    FOREIGN_WRITE,
    HEALTH_FLAGS,
    NORM,
    NUM_LOSS_STATE,
    NUM_STATS,
    NUM_VERDICT,
    WORST,
)
from zclip.optim import FusedOptimizer, Guard, StepResult
from zclip.schemas import wide_dtype
from zclip.unscaling import adopt_unscaling

if TYPE_CHECKING:
    from heal.lab.weight_anchor import Pull

Groups = list[dict[str, Any]]


def _kind(grad: Tensor | None) -> str:
    """Return what keeps a gradient from being measured; empty if nothing does."""
    if grad is None:
        return ""
    if grad.layout is not torch.strided:
        return str(grad.layout).removeprefix("torch.")
    return "" if grad.dtype in MEASURED else str(grad.dtype).removeprefix("torch.")


class WatchedOptimizer(zclip.ClippedOptimizer):
    """A clipped optimizer that clips now and steps later, once all are judged together.

    Sparse and complex gradients cannot be measured. Their parameters are stepped unguarded: not
    clipped, and NaN in them is seen only in the weights or in the loss. A step that is skipped is
    skipped for them too.

    Attributes:
        pull: added to the gradients before clipping, see :meth:`hold`; None for nothing.
        has_clipped: whether it clipped for a step that the inner optimizer has not begun yet.
    """

    _note: Callable[[str], None] = staticmethod(lambda text: None)  # that of a copy
    pull: "Pull | None" = None
    has_clipped = False
    _reported: StepResult | None = None
    _unguarded: tuple[Tensor, ...] = ()  # a copy finds out by itself
    _measured: tuple[list[tuple[int, int]], Groups] = [], []  # of which groups, and what remains

    def __init__(
        self, inner: Optimizer, clipper: Clipper, note: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__(inner, clipper, **options)
        self._note = note

    def hold(self, pull: "Pull") -> None:
        """Add a pull to the gradients of every step until :meth:`release`."""
        self.pull = pull

    def release(self) -> None:
        """Pull no longer."""
        self.pull = None

    def clip(
        self,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
        grad_scale: Tensor | None = None,
        watch: LossWatch | None = None,
    ) -> ClipResult | None:
        """Clip without the step and without posting; None if there are no gradients.

        With a watch the loss is judged too.
        """
        self.has_clipped = True
        if self.pull is not None:
            self.pull.add_to_gradients(grad_scale)
        groups = self._measured_groups() if self._unguarded else self.inner.param_groups
        try:
            result = self.measure(groups, loss, grad_scale, extra, watch)
        except (TypeError, RuntimeError):
            if not self._leave_out():
                raise
            result = self.measure(self._measured_groups(), loss, grad_scale, extra, watch)
        self.steps += 1
        if result is None and self._unguarded:
            result = self._stand_in()
            if result is not None and watch is not None and loss is not None:
                watch.judge(loss, result.verdict)
        return result

    def _leave_out(self) -> bool:
        """Leave out what cannot be measured from now on; False if there is nothing new."""
        known = {id(param) for param in self._unguarded}
        params = [p for group in self.param_groups for p in group["params"] if id(p) not in known]
        found = [(param, kind) for param in params if (kind := _kind(param.grad))]
        self._unguarded += tuple(param for param, _ in found)
        self._measured = [], []
        names = {id(param): name for name, param in self.named_parameters}
        for param, kind in found:
            name = names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
            self._note(
                f"the gradient of {name} is {kind}, which cannot be measured: it is stepped "
                "unguarded, not clipped and not watched for NaN"
            )
        return bool(found)

    def _measured_groups(self) -> Groups:
        """Return the groups without unguarded ones; the same lists until one joins or leaves."""
        groups = self.inner.param_groups
        seen = [(id(group), len(group["params"])) for group in groups]
        if seen != self._measured[0]:
            known = {id(param) for param in self._unguarded}
            rest = [[p for p in group["params"] if id(p) not in known] for group in groups]
            self._measured = seen, [{"params": params} for params in rest]
        for measured, group in zip(self._measured[1], groups, strict=True):
            measured.update({**group, "params": measured["params"]})
        return self._measured[1]

    def _stand_in(self) -> ClipResult | None:
        """Return a result that allows the step and has NaN for norms; None without gradients."""
        device = next((p.device for p in self._unguarded if p.grad is not None), None)
        if device is None:
            return None
        verdict = torch.zeros(NUM_VERDICT, device=device)
        for column, value in ((NORM, math.nan), (CLIPPED_NORM, math.nan), (WORST, -1.0)):
            verdict[column].fill_(value)
        stats = torch.zeros(0, NUM_STATS, dtype=wide_dtype(device), device=device)
        return ClipResult(verdict[NORM], stats, stats[:, 0], verdict)

    def step_if_allowed(
        self,
        result: ClipResult,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        row: list[float] | None = None,
    ) -> None:
        """Step unless the result skips it; a verdict in host memory is read, which is no wait.

        As that of :class:`zclip.ClippedOptimizer`; ``row`` is the verdict, if it was read already.
        """
        is_read = row is not None or result.verdict.is_cpu
        if self.apply != "inplace" or found_inf is not None or not is_read:
            super().step_if_allowed(result, grad_scale, found_inf)
        elif not self.was_skipped(result.verdict.tolist() if row is None else row):
            if self.lr_scale == 1.0:
                self.inner.step()
            else:
                with self.scaled_lr():
                    self.inner.step()

    def step_at_once(self, loss: Tensor | None, watch: LossWatch) -> Tensor | list[float] | None:
        """Clip, judge the loss and step, for one process with this optimizer only.

        Returns:
            The verdict, as a list if it is in host memory; None if there are no gradients.
        """
        inner = self.inner
        if not isinstance(inner, FusedOptimizer):
            result = self.clip(loss, watch=watch)
            if result is None:
                return None
            row: list[float] = result.verdict.tolist()
            if self.lr_scale != 1.0:
                self.step_if_allowed(result, row=row)
            elif not self.was_skipped(row):
                inner.step()
            return row
        self.steps += 1
        self.has_clipped = True
        if self.pull is not None:
            self.pull.add_to_gradients(None)
        guard = Guard(self.clipper, watch.state, watch.settings)
        if self.lr_scale == 1.0:
            inner.step(loss=loss, guard=guard)
        else:
            with self.scaled_lr():
                inner.step(loss=loss, guard=guard)
        done = inner.result
        if done is None or done.clip is None:
            return None
        if not done.clip.verdict.is_cpu:
            return done.clip.verdict
        self._reported = done
        row = done.clip.verdict.tolist()
        row[FLAGS] += HEALTH[int(done.summary.tolist()[HEALTH_FLAGS])]
        return row

    def take_health(self) -> Tensor | None:
        """Return the flags of a fused optimizer's last update, once; None if it has not stepped."""
        done = self.inner.result if isinstance(self.inner, FusedOptimizer) else None
        if done is None or done is self._reported:
            return None
        self._reported = done
        return done.summary[HEALTH_FLAGS]


def watched(
    optimizer: Optimizer,
    config: HealingConfig,
    names: list[tuple[str, Tensor]],
    note: Callable[[str], None],
) -> WatchedOptimizer:
    """Wrap an optimizer; one that is clipped already keeps its clipper, as the wrapper's."""
    apply = "inplace"
    if isinstance(optimizer, zclip.ClippedOptimizer):
        clipper, apply, optimizer = optimizer.clipper, optimizer.apply, optimizer.inner
    elif isinstance(optimizer, FusedOptimizer) and optimizer.clipper is not None:
        clipper, optimizer.clipper = optimizer.clipper, None  # else gradients are clipped twice
    else:
        clipper = make_clipper(config)
    if isinstance(optimizer, FusedOptimizer):
        clipper.align()
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    is_complete = own <= {id(p) for _, p in names}
    return WatchedOptimizer(
        optimizer,
        clipper,
        note,
        apply=apply,
        named_parameters=names if is_complete else None,  # all: others may join it later
        lag=config.lag,
    )


def make_clipper(config: HealingConfig) -> Clipper:
    """Return the clipper that the settings ask for; without one, norms are still measured."""
    if not config.zclip_enabled:
        return zclip.GlobalNorm(math.inf)
    limit = config.max_grad_norm or None  # a script that did not clip must not begin to
    return zclip.ZClip(z_thresh=config.zclip_z_threshold, max_grad_norm=limit)


LOSS_DECAY = 0.99  # the running mean of the loss covers about a hundred steps
LOSS_WARMUP_STEPS = 25  # losses to absorb before any is called a spike, as many as ZClip's norms

JUDGED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
"""Dtypes of a loss that can be judged as they are."""


def judgeable(loss: Any, note: Callable[[str], None]) -> Tensor | None:
    """Return a loss as one number that can be judged; None, with a note, if it cannot be.

    Raises:
        TypeError: it is neither a number nor a tensor.
    """
    number: Tensor = loss if isinstance(loss, Tensor) else _as_tensor(loss)
    if number.dtype in JUDGED and not number.dim():
        return number
    if number.numel() and not number.dtype.is_complex:
        number = number.detach()
        number = number if number.dtype in JUDGED else number.float()
        return number.mean() if number.numel() > 1 else number
    what = str(number.dtype).removeprefix("torch.") if number.numel() else "an empty tensor"
    note(f"loss: expected one real number, got {what}; this loss is not watched")
    return None


def _as_tensor(loss: Any) -> Tensor:
    for make in (float, torch.as_tensor):
        try:
            return torch.as_tensor(make(loss))
        except (TypeError, ValueError, RuntimeError):
            continue
    raise TypeError(f"loss: expected a tensor, a number or None, got {type(loss).__name__}")


def scale_of(scaler: Any, optimizer: ClippedOptimizer) -> Tensor | None:
    """Return by what the gradients of an optimizer are yet to be divided; None if by nothing.

    ``GradScaler.step`` skips each optimizer by itself, which for several may be half a step. So
    everything that it does before and after is done here, and the step between is ours.

    Raises:
        RuntimeError: the scaler has stepped it already in this iteration.
    """
    adopt_unscaling(scaler, optimizer, optimizer.inner)
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is OptState.STEPPED:
        raise RuntimeError(
            f"{type(optimizer.inner).__name__}: expected healer.step to take the step, got one "
            "that the GradScaler has taken already; leave out scaler.step(optimizer)"
        )
    if stage is OptState.UNSCALED:
        return None
    if optimizer.guards_on_device:  # as the scaler does: float16 parameters are allowed here
        scaler._check_inf_per_device(optimizer)
        scale: Tensor = scaler._get_scale_async()
        return scale
    scaler.unscale_(optimizer)
    return None


def overflows_of(scaler: Any, optimizers: Iterable[Optimizer] | None = None) -> list[Tensor]:
    """Return 0-dim tensors, on any device, that are not 0 where the scaler found NaN or Inf."""
    states = scaler._per_optimizer_states
    own = states.values() if optimizers is None else [states[id(o)] for o in optimizers]
    return [found for state in own for found in state["found_inf_per_device"].values()]


TOGETHER = 25
"""Records that may wait in the mailbox to be polled at once, if nothing comes up before. After a
forward and a backward pass the detectors have left the caches, and what it takes to bring them back
is several times what they do for a record."""

NO_LOSS_SCALE = 0.0  # no scaler has it: what is posted where there is none


Judged = tuple[Tensor, Tensor | None]
"""What is posted: the verdict about a step, and what all ranks reported, if there are others."""


STATE_NONFINITE, FOREIGN = int(Flag.STATE_NONFINITE), int(Flag.FOREIGN_WRITE)
HEALTH = [
    STATE_NONFINITE * bool(bits & (BAD_WEIGHT | BAD_STATE)) + FOREIGN * bool(bits & FOREIGN_WRITE)
    for bits in range(2 * FOREIGN_WRITE)
]
"""The flags of a record for those that a fused optimizer has after an update."""


class GuardedStep:
    """One or more optimizers that step together or not at all.

    Args:
        optimizers: bare ones are wrapped; of those already clipped the clipper is kept.
        scaler: a GradScaler. Its scale backs off where it found NaN or Inf, and only there.
        process_group: the ranks that act alike; all if None.
        buffers: what forward writes beside the gradients; put back where the step is skipped.

    Raises:
        TypeError: an optimizer calls a closure by itself, as LBFGS does.

    Attributes:
        optimizers: the wrapped ones.
        names: of the parameters, by identity.
        mailbox: carries the verdict of each step, the loss scale after it, and reports of ranks.
        posted: what went into it last, if that was in host memory.
        watch: the statistics of the loss.
        ranks: all of them judge loss, host flags and failures by the sum of their reports.
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
        self.optimizers = [watched(o, config, named, note) for o in optimizers]
        for optimizer in self.optimizers:
            if optimizer.needs_closure:
                raise TypeError(
                    "optimizer: expected one whose step can be skipped or repeated whole, got "
                    f"{type(optimizer.inner).__name__}, which calls a closure several times within "
                    "one step; use another, such as AdamW"
                )
        self.buffers = BufferCopies(torch.nn.Module()) if buffers is None else buffers
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        params = (p for o in self.optimizers for g in o.param_groups for p in g["params"])
        device = next((p.device for p in params), torch.device("cpu"))
        self.ranks = Ranks(device, process_group)
        width = NUM_VERDICT + 1 + (NUM_LANES if self.ranks.has_others else 0)
        self.mailbox = zclip.Mailbox(config.lag, width=width, room=TOGETHER)
        self.posted: list[float] | None = None
        # NaN and Inf skip the step, rises are left to the host.
        limits = config.loss_spike_factor, 0, LOSS_DECAY, LOSS_WARMUP_STEPS
        state = torch.zeros(NUM_LOSS_STATE, dtype=wide_dtype(device), device=device)
        self.watch = LossWatch(state, limits)
        self._blamed = [o.clipper for o in self.optimizers]
        if self.ranks.has_others and self.optimizers:
            # The first carries what ranks report; each judges gradients that all ranks share. It
            # reaches all of them, also where gradients need no message.
            clipper, groups = self.optimizers[0].clipper, self.optimizers[0].clipper.groups
            if groups.record is None:
                clipper.distribute(groups.process, groups.pipeline, self.ranks.record_group)
        first = self.optimizers[0]
        self._steps_at_once = (
            len(self.optimizers) == 1
            and not self.ranks.has_others
            and self.scaler is None
            and first.apply == "inplace"
            and (device.type == "cpu" or isinstance(first.inner, FusedOptimizer))
        )
        self._no_scale = torch.full((1,), NO_LOSS_SCALE, device=device)

    @contextmanager
    def records_set_aside(self) -> Iterator[None]:
        """Let the body take steps that are none of the run's: their records are dropped."""
        kept = self.mailbox, self.posted
        steps = [optimizer.steps for optimizer in self.optimizers]
        self.mailbox = zclip.Mailbox(kept[0].lag, width=kept[0].width, room=kept[0].room)
        try:
            yield
        finally:
            self.mailbox, self.posted = kept
            for optimizer, count in zip(self.optimizers, steps, strict=True):
                optimizer.steps = count

    def step(self, step: int, loss: Tensor | None, facts: HostFacts | None = None) -> bool:
        """Take the step, or skip it on the device; False if there were no gradients at all.

        Loss and facts are those of this rank; all ranks get them in the record.
        """
        if self._steps_at_once and not self.buffers.are_there:
            verdict = self.optimizers[0].step_at_once(loss, self.watch)  # by one call, if it can
            if verdict is None:
                return False
            if isinstance(verdict, Tensor):
                self.post(step, (verdict, None))
                return True
            verdict.append(NO_LOSS_SCALE)
            self.posted = verdict
            self.mailbox.post_row(step, verdict)
            return True
        lanes = None
        if self.ranks.has_others:
            lanes = self.ranks.lanes(facts or NO_FACTS, loss, self._new_health())
        scales: list[Tensor | None] = []
        overflows: list[Tensor] = []
        if self.scaler is not None:
            scales = [scale_of(self.scaler, optimizer) for optimizer in self.optimizers]
            overflows = overflows_of(self.scaler, self.optimizers)
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
            if self.scaler is not None and overflows_of(self.scaler):  # else update() would raise
                self.scaler.update()
        finally:  # also if the optimizer fails: all ranks must post as many records
            if judged is not None:
                self.post(step, judged, row)
            else:
                self.buffers.settle(False)
            if self.scaler is not None:
                self.forget_scaling()
        return judged is not None

    def clip(
        self,
        loss: Tensor | None,
        lanes: Tensor | None,
        scales: Sequence[Tensor | None] = (),
    ) -> list[ClipResult | None]:
        """Measure and clip all; None stands for an optimizer without gradients.

        ``lanes`` are what this rank reports to the others, ``scales`` what :func:`scale_of`
        returned for each optimizer.
        """
        results = []
        for o, optimizer in enumerate(self.optimizers):
            results.append(optimizer.clip(loss, lanes, scales[o] if scales else None))
            lanes = None  # reported once
        return results

    def judge(
        self,
        results: Sequence[ClipResult | None],
        loss: Tensor | None,
        lanes: Tensor | None,
        overflows: Sequence[Tensor] = (),
    ) -> Judged | None:
        """Come to one verdict about all optimizers and the loss; None if there are no gradients.

        A step that one skips is skipped by all: half a step is a state no run ever had. It is
        written into their own verdicts too. Arguments are those of :meth:`clip`, what it returned,
        and what :func:`overflows_of` did.
        """
        found = [result for result in results if result is not None]
        if not found:
            return None
        reported = None
        if lanes is not None:
            extra = None if results[0] is None else results[0].extra
            reported = self.ranks.reduce(lanes) if extra is None else extra
        is_alone = len(results) == 1
        verdict = found[0].verdict if is_alone else self._merged(results)
        blocked = verdict[BLOCKED]
        for overflow in overflows:
            blocked.clamp_(min=_moved(overflow, blocked.device).clamp(max=1.0))
        if reported is not None:
            self.watch.judge(self.ranks.mean_loss(reported, self.watch.state), verdict)
            blocked.clamp_(min=reported[HAS_FAILED].clamp(max=1.0).to(verdict.dtype))
        else:
            if self.buffers.are_there:  # ranks have statistics of their own: checks find theirs
                for fault in self.buffers.faults():
                    fault = _moved(fault, blocked.device)
                    blocked.clamp_(min=fault)
                    verdict[FLAGS].add_(fault, alpha=int(Flag.STATISTICS_BAD))
            if loss is not None:
                self.watch.judge(loss, verdict)
        if not is_alone:
            for result in found:
                result.verdict[BLOCKED] = _moved(blocked, result.verdict.device)
        return verdict, reported

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
        skipped = [_moved(o.skips(result.verdict), device) for o, result in judged]
        merged[BLOCKED] = torch.stack(skipped).amax()
        return merged

    def post(self, step: int, judged: Judged, row: list[float] | None = None) -> None:
        """Post what was judged; ``row`` is the verdict, if it is in host memory and was read."""
        verdict, reported = judged
        scale = None if self.scaler is None else getattr(self.scaler, "_scale", None)
        if verdict.is_cpu and (scale is None or scale.is_cpu):
            row = verdict.tolist() if row is None else row
        else:
            row = None
        # Each rank measures its own part: what others must know goes with the next record.
        for bits in [] if self.ranks.has_others else self._new_health():
            if row is not None and bits.is_cpu:
                row[FLAGS] += HEALTH[int(bits)]
            elif row is None:
                bits = _moved(bits, verdict.device)
                is_bad = bits.remainder(FOREIGN_WRITE) > 0
                verdict[FLAGS].add_(STATE_NONFINITE * is_bad + FOREIGN * (bits >= FOREIGN_WRITE))
        if row is not None:
            row.append(NO_LOSS_SCALE if scale is None else float(scale))
            self.posted = row if reported is None else row + reported.tolist()
            self.mailbox.post_row(step, self.posted)
            if self.buffers.are_there:
                self.buffers.settle(self.optimizers[0].was_skipped(row), scale is not None)
            return
        self.posted = None
        tail = self._no_scale if scale is None else scale.reshape(1).to(verdict)
        parts = [verdict, tail] if reported is None else [verdict, tail, reported]
        self.mailbox.post(step, torch.cat(parts))
        self.buffers.settle(self.optimizers[0].skips(verdict), scale is not None)

    def _new_health(self) -> list[Tensor]:
        """Return the bits of every fused optimizer that has stepped since the last call."""
        found = [optimizer.take_health() for optimizer in self.optimizers]
        return [bits for bits in found if bits is not None]

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold different tensors, so that weights cannot be measured together."""
        return any(o.clipper.groups.pipeline is not None for o in self.optimizers)

    def forget_scaling(self) -> None:
        """Let the GradScaler start over: the gradients that it unscaled are gone."""
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()

    def learn_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Learn the names again, because parameters have joined."""
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


class OtherSteps:
    """Notices steps that the healer does not take, by torch's own global hook.

    One of its own optimizers that other code steps is noted; a loop may step others beside them.

    Args:
        own: the optimizers that the healer steps.
        note: called once for each of them that other code steps too.

    Attributes:
        have_stepped: whether another one did.
    """

    _watchers: ClassVar[list["weakref.ref[OtherSteps]"]] = []  # that have seen none yet
    _handle: ClassVar[Any] = None  # one hook serves all: torch walks through them in every step

    def __init__(self, own: Sequence[WatchedOptimizer], note: Callable[[str], None]) -> None:
        self.have_stepped = False
        self._own = {id(optimizer.inner): optimizer for optimizer in own}
        self._note = note

    def watch(self) -> None:
        """Begin to watch, unless another one has stepped already."""
        if not self.have_stepped and all(ref() is not self for ref in self._watchers):
            self._watchers.append(weakref.ref(self))
            if OtherSteps._handle is None:
                OtherSteps._handle = register_optimizer_step_pre_hook(self._notice)

    @classmethod
    def _notice(cls, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for ref in cls._watchers:
            watcher = ref()
            if watcher is None:
                cls._watchers = [other for other in cls._watchers if other is not ref]
            elif (own := watcher._own.get(id(optimizer))) is None:
                watcher.have_stepped = True
                cls._watchers = [other for other in cls._watchers if other is not ref]
            elif own.has_clipped:
                own.has_clipped = False
            else:
                name = type(optimizer).__name__
                watcher._note(
                    f"{name}: expected healer.step to take the step, got one that other code has "
                    "taken, without clipping; leave out optimizer.step() and scaler.step(optimizer)"
                )

    def close(self) -> None:
        """Stop watching."""
        watchers = [ref for ref in self._watchers if ref() not in (self, None)]
        OtherSteps._watchers = watchers
        if not watchers and OtherSteps._handle is not None:
            OtherSteps._handle.remove()
            OtherSteps._handle = None


RECENT_NORMS = 101  # gradient norms whose median is the baseline
WATCHED = 200  # steps over which clipped ones are counted
NEARLY_ALL = 0.95  # share of them from which a limit is too low
FAR_BELOW = 2.0  # times the norm after clipping that the norm before it is
NAMES = ("max_grad_norm", "max_norm")  # what clippers call their limit


class ClipLimits:
    """The limits of all clippers: tightened for ``steps`` steps, then put back as they were.

    Attributes:
        steps_left: for how many steps they stay tightened.
    """

    def __init__(
        self, optimizers: Sequence[ClippedOptimizer], steps: int, note: Callable[[str], None]
    ) -> None:
        self._optimizers = optimizers
        self._steps = steps
        self._note = note
        self.steps_left = 0
        self._first: dict[int, tuple[Any, str, Any]] = {}  # clipper, attribute, first value
        self._norms: deque[float] = deque(maxlen=RECENT_NORMS)
        self._ratios: list[float] = []
        self._has_warned = False

    def note_norm(self, norm: float, clipped_norm: float = math.nan) -> None:
        """Take note of the norm of a step that was taken, before and after clipping."""
        if not math.isfinite(norm):
            return
        self._norms.append(norm)
        if not self._has_warned and not self.steps_left:
            self._ratios.append(norm / clipped_norm if clipped_norm > 0.0 else 1.0)
            if len(self._ratios) == WATCHED:
                self._warn_of_a_low_limit(clipped_norm)
                self._ratios.clear()

    def _warn_of_a_low_limit(self, clipped_norm: float) -> None:
        """Warn once that nearly all steps are clipped by much, as if the limit set the rate."""
        num_cut = sum(ratio > FAR_BELOW for ratio in self._ratios)
        if num_cut >= NEARLY_ALL * WATCHED:
            self._has_warned = True
            self._note(
                f"{num_cut} of the last {WATCHED} steps were clipped to less than half of their "
                f"gradient norm: a limit of about {clipped_norm:.3g} is far below the usual norm "
                f"of {statistics.median(self._norms):.3g} and scales every step; raise "
                "max_grad_norm, or lower the learning rate instead"
            )

    def tighten(self, factor: float) -> None:
        """Multiply the limit of every clipper; one without starts from the median norm."""
        for optimizer in self._optimizers:
            clipper = optimizer.clipper
            name = next((n for n in NAMES if hasattr(clipper, n)), None)
            if name is None:
                self._note(f"{type(clipper).__name__} has no limit that could be tightened")
                continue
            limit = getattr(clipper, name)
            if limit is None or not math.isfinite(limit):
                if not self._norms:
                    continue
                limit = statistics.median(self._norms)
            self._first.setdefault(id(clipper), (clipper, name, getattr(clipper, name)))
            setattr(clipper, name, limit * factor)
        self.steps_left = self._steps

    def count_step(self) -> None:
        """Count a step; after the last one the limits are what they were."""
        self.steps_left = max(self.steps_left - 1, 0)
        if not self.steps_left:
            for clipper, name, limit in self._first.values():
                setattr(clipper, name, limit)
            self._first.clear()

    def state(self) -> dict[str, Any]:
        """Return plain values; see :meth:`resume`."""
        clippers = [optimizer.clipper for optimizer in self._optimizers]
        limits = [
            (o, *self._first[id(c)][1:]) for o, c in enumerate(clippers) if id(c) in self._first
        ]
        return {
            "relax_in": self.steps_left,
            "limits": limits,
            "tightened": [(o, name, getattr(clippers[o], name)) for o, name, _ in limits],
            "norms": list(self._norms),
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue with what :meth:`state` returned in another process."""
        self.steps_left = saved["relax_in"]
        self._norms.extend(saved["norms"])
        for o, name, limit in saved["limits"]:
            clipper = self._optimizers[o].clipper
            self._first[id(clipper)] = (clipper, name, limit)
        for o, name, limit in saved["tightened"]:
            setattr(self._optimizers[o].clipper, name, limit)
