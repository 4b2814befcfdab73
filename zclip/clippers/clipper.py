"""The part that all clippers share: finding gradients, keeping state, one crossing per step.

A subclass names its rule, and says which settings that takes and what its state looks like. All
arithmetic is in two operators, so that it runs on the device and nothing waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from zclip import ops
from zclip.clippers.loss_watch import LossWatch
from zclip.clippers.peers import Peers, RankGroups
from zclip.clippers.result import ClipResult, merge_verdicts, noted, share_alarm
from zclip.clippers.state import ClipState
from zclip.during_backward import Attachment
from zclip.layout import (
    NORM,
    NUM_COUNTERS,
    ON_NONFINITE,
    PROPAGATE,
    REFUSE,
    STEPS,
    SUMSQ,
    WORST,
)
from zclip.parallel import Record
from zclip.reading import Reader, native
from zclip.reference import IDS, RULES, reported_norm
from zclip.schemas import norm_dtype, wide_dtype
from zclip.targets import Target, TargetCache, Targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CLIP_BY = torch.ops.zclip.clip_by_.default
_CLIP_READ = torch.ops.zclip.clip_read_.default

RuleOp = Callable[..., tuple[Tensor, Tensor]]
ClipOp = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
Self = TypeVar("Self", bound="Clipper")


class RuleCall(NamedTuple):
    """What an operator needs besides gradients to apply a rule."""

    state: Tensor
    rule: int
    settings: tuple[float, ...]
    loss: Tensor | None


class Clipper(ABC):
    """Measures gradients, decides on the device what to do with them, and scales them in place.

    Attributes:
        result: the last step, as :class:`ClipResult`; None before the first.
        per_group: whether every parameter group has statistics and limits of its own.
        on_nonfinite: "skip" skips a step with NaN or Inf and keeps it out of the statistics;
            "official" does what the published algorithm does.
    """

    rule: ClassVar[str] = ""
    """The name of the rule in :data:`zclip.reference.RULES`."""

    watches_loss: ClassVar[bool] = False
    """Whether the rule looks at the loss."""

    folds_scale: ClassVar[bool] = True
    """Whether the coefficients can carry the division by the scale of a GradScaler as well."""

    is_global: ClassVar[bool] = True
    """Whether one coefficient serves all gradients of a group."""

    is_per_tensor: ClassVar[bool] = False
    """Whether the state has an entry for every parameter, with a gradient or without."""

    is_by_norm: ClassVar[bool] = True
    """Whether nothing but the statistics of whole tensors decides."""

    fields: ClassVar[Mapping[str, int | slice]] = {}
    """Where in the state each named quantity lives, after the three counters."""

    limit_key: ClassVar[str | None] = None
    """The setting that a parameter group may override."""

    replaceable: ClassVar[str] = ""
    """A method of which callers may put their own version into an instance."""

    _simple: tuple[Targets, ClipOp, int, tuple[float, ...]] | None = None
    """Of a step that took one call: its parameters, the operator, its rule and settings."""

    _call: tuple[RuleCall, Targets, torch.device] | None = None
    """What :meth:`rule_call` returned last, and for what."""

    _is_aligned = False
    _attachment: Attachment | None = None

    def __init__(self, *, per_group: bool = False, on_nonfinite: str = "skip") -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(
                f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}"
            )
        self.per_group = per_group
        self.on_nonfinite = on_nonfinite
        self.result: ClipResult | None = None
        self._state = ClipState(self)
        self._cache = TargetCache()
        self._present: list[int] | None = None
        self._peers = Peers()
        self._reader = Reader()

    def distribute(
        self: Self,
        process_group: "ProcessGroup | None" = None,
        pipeline_group: "ProcessGroup | None" = None,
        record_group: "ProcessGroup | None" = None,
    ) -> Self:
        """Set the ranks to add up with, where the parameters do not show them; return self.

        DTensors (FSDP2, HSDP, tensor parallelism) know theirs and need none of this; nor does plain
        DDP, where all gradients are equal already. ``docs/parallel.md`` has a recipe for each.

        Args:
            process_group: every rank in it holds other elements of the same plain tensors.
            pipeline_group: every rank in it holds other tensors: one rank of each stage. With
                ``per_group`` all stages have as many groups, with the same limits.
            record_group: where gradients need no message, add up losses and extra lanes over it,
                at the price of one small all-reduce. Where they do, these travel along.
        """
        self._peers = Peers(process_group, pipeline_group, record_group, self.per_group)
        self._simple = self._call = None
        return self

    def attach(
        self, *targets: Target, comm_hook: tuple[Any, Callable[..., Any]] | None = None
    ) -> Attachment:
        """Measure gradients during backward, as each becomes final; :meth:`step` only finishes.

        Results are the same, bit by bit. A gradient that changes after it was measured, by another
        backward pass, by the user or by ``GradScaler.unscale_``, is measured again in the step;
        changes that autograd does not count need :meth:`Attachment.drop`. It serves one process,
        DistributedDataParallel (after the all-reduce of each bucket) and ``fully_shard`` (after the
        reduce-scatter). ``docs/during-backward.md`` says where it pays.

        Args:
            targets: the models, as wrapped; or for one process and ``fully_shard`` whatever
                :meth:`step` takes.
            comm_hook: state and hook, for a DistributedDataParallel model that compresses: give
                them here and not to ``register_comm_hook``, because torch takes one hook only.

        Returns:
            A handle; ``detach()``, or leaving its ``with`` block, takes the hooks off again.

        Raises:
            ValueError: this clipper is attached already, or there are other ranks and the
                gradients are not known to become final in backward.
            NotImplementedError: the clipper needs more than norms of tensors, or the model is a
                FullyShardedDataParallel.

        Example:
            >>> clipper = zclip.ZClip()
            >>> with clipper.attach(model):
            ...     loss.backward()  # measures
            ...     clipper.step(model)  # decides and scales
        """
        if not self.is_by_norm:
            raise NotImplementedError(
                "attach: expected a clipper by norms of tensors, such as ZClip, AdaGC or "
                f"GlobalNorm, got {type(self).__name__}; clip after backward"
            )
        if self._attachment is not None and self._attachment.is_attached:
            raise ValueError(
                "attach: expected a clipper that is not attached, got one that is; call detach() "
                "first, or give all models in one call"
            )
        self._attachment = Attachment(targets, comm_hook)
        return self._attachment

    @abstractmethod
    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the settings of the rule for one parameter group, in the rule's order.

        Args:
            group: what ``param_groups`` says of the group besides its parameters.
        """

    def state_size(self, num_tensors: int) -> int:
        """Return the length of the state of one group; the first three columns are counters."""
        return NUM_COUNTERS

    def size_hint(self) -> str:
        """Return which setting the length of the state depends on, for an error message."""
        return "call reset() after changing it"

    def adapt_state(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a saved state of one group, made to fit where settings have changed."""
        return saved

    def rule_id(self) -> int:
        """Return the number of the rule that the operators get."""
        return IDS[self.rule]

    def operators(self) -> tuple[RuleOp, ClipOp]:
        """Return the operator that decides from stats, and the one that does everything."""
        return torch.ops.zclip.rule_.default, _CLIP_BY

    def judge(
        self, state: Tensor, stats: Tensor, group: Mapping[str, Any], loss: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the rule to measured gradients; return coefs and verdict, and move the state."""
        seen = self._seen_loss(loss, state)
        return self.operators()[0](state, stats, self.rule_id(), self.settings(group), seen)

    def _seen_loss(self, loss: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the loss where the rule can read it; None if it does not look."""
        if loss is None or not self.watches_loss:
            return None
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected a Tensor of one element, got {type(loss).__name__}")
        return loss.detach().to(like.device, non_blocking=True)

    def step(
        self,
        *targets: Target,
        loss: Tensor | None = None,
        grad_scale: Tensor | None = None,
        extra: Tensor | None = None,
        watch: LossWatch | None = None,
    ) -> Tensor:
        """Clip the gradients in place; call it after ``backward`` and before ``optimizer.step``.

        Nothing waits for the device. A parameter without a gradient is left out; if none has one,
        nothing happens and nothing is counted. Call it once per step: give several models in one
        call, not in several. Among the parameters may be DTensors, of several meshes and beside
        plain tensors: then every rank has to call this, with gradients or without, and all come to
        the same result, bit by bit, by one all-reduce. (If no rank has a gradient, that is then a
        step of norm 0, because none can know it of the others.)

        Args:
            targets: a model, several of them, parameters (a list, a generator or
                ``named_parameters()``), or groups as in ``optimizer.param_groups``.
            loss: 0-dim, of this step, for clippers that look at it. Where ranks add up it becomes
                the mean of those that gave one; one with no elements stands for "not here".
            grad_scale: 0-dim; the gradients are so many times too large, as under a GradScaler,
                and are divided by it first.
            extra: float64 [E], numbers that only this rank knows (say 1 if it was asked to stop, or
                is short of memory), added up over all ranks in the same all-reduce; the sums are
                in ``result.extra``.
            watch: judges the loss as well, into ``result.verdict``, on a CPU in the same call.

        Returns:
            The norm of all gradients before clipping, 0-dim, on the device of the first; float64
            if a gradient is, else float32.

        Raises:
            TypeError: a gradient is sparse, complex or ``Partial``, or a target not a parameter.
        """
        with_graph = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as no_grad() does, in a tenth of its time
        try:
            if self._simple is not None and grad_scale is extra is None:
                result = self._clip_simply(targets, None if loss is None else watch, loss)
                if result is not None:
                    self.result = result
                    return result.total_norm
            norm, loss = self._step(targets, loss, grad_scale, extra)
            if watch is not None and loss is not None and self.result is not None:
                watch.judge(loss, self.result.verdict)
            return norm
        finally:
            torch._C._set_grad_enabled(with_graph)

    def _step(
        self,
        targets: tuple[Target, ...],
        loss: Tensor | None,
        grad_scale: Tensor | None,
        extra: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norm, and the loss of all ranks."""
        found, grads = self._gather(targets)
        peers = self._peers
        record = peers.send(loss, extra, self._tag, found) if peers.shares_records else None
        if not grads and peers.reduction is None:
            return self._nothing(found), loss
        if record is not None:
            loss = record.loss
        can_fold = self.folds_scale and self.replaceable not in self.__dict__
        if grad_scale is not None and grads and not can_fold:
            ops.scale_(grads, _inverse(grad_scale, grads[0].device).repeat(len(grads)))
            grad_scale = None
        result = None
        if peers.reduction is None and len(self._state.states) == 1 and grad_scale is None:
            if not self._finishes(grads) or self.replaceable in self.__dict__:
                result = self._clip_at_once(found, grads, loss)
            else:
                result = self.finish(self._measured(found, grads), found.settings[0], loss)
                self._scale(grads, result.coefs)
        if result is None:
            result, record = self._decide(found, grads, loss, grad_scale, extra, record)
            self._scale(grads, _unscaled(result.coefs[peers.own], grad_scale))
        self.result = noted(result, record, extra)
        return result.total_norm, loss if record is None else record.loss

    @torch.no_grad()
    def decide(
        self,
        *targets: Target,
        loss: Tensor | None = None,
        grad_scale: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> ClipResult | None:
        """Do all of :meth:`step` but scale: for those who apply the coefficients elsewhere.

        Returns:
            The result, also kept in ``result``; None if no parameter has a gradient.
        """
        found, grads = self._gather(targets)
        record = self._peers.send(loss, extra, self._tag, found)
        if not grads and self._peers.reduction is None:
            self._nothing(found)
            return None
        if record is not None:
            loss = record.loss
        result, record = self._decide(found, grads, loss, grad_scale, extra, record)
        self.result = noted(result, record, extra)
        return self.result

    def rule_call(
        self, groups: list[dict[str, Any]], device: torch.device, loss: Tensor | None = None
    ) -> RuleCall | None:
        """Return what one operator needs to clip all gradients; None where a step takes more.

        For optimizers that measure, decide and update in one call. They have one row for every
        parameter of ``groups``, with a gradient or without, and hand what came out to
        :meth:`accept`. Several ranks, groups with limits of their own and rules without compiled
        code take :meth:`decide`.
        """
        found = self._cache.known_groups((groups,)) or self._cache.find((groups,))
        settings, state = self.settings(found.settings[0]), self._state
        if self._call is not None and state.fitted is found and not self.watches_loss:
            call, known, place = self._call
            is_same = known is found and place == device and call.settings == settings
            if is_same and call.state is state.states[0]:
                return call
        if found is not self._peers.found:
            self._peers.find(found)
        if self._peers.reduction is not None or self._peers.shares_records or not self.rule:
            return None
        rule = self.rule_id()
        if rule >= len(RULES) or self.operators()[1] is not _CLIP_BY:
            return None
        size = self.state_size(len(found.params))
        if not (state.fitted is found and state.place == (device, size)):
            state.fit(found, device)
        if len(state.states) != 1:
            return None
        seen = self._seen_loss(loss, state.states[0])
        self._call = RuleCall(state.states[0], rule, settings, seen), found, device
        return self._call[0]

    def early_stats(self, grads: list[Tensor]) -> Tensor | None:
        """Return the stats of ``grads``, measuring those that were not during backward.

        For optimizers, after :meth:`rule_call`.

        Args:
            grads: one for every parameter, empty where there is none.

        Returns:
            float64 [N, 3]; None if the clipper is not attached, or a gradient is float64.
        """
        found = self._peers.found
        if self._attachment is None or found is None or not self._finishes(grads):
            return None
        return self._measured(found, grads)

    def finish(
        self, stats: Tensor, group: Mapping[str, Any], loss: Tensor | None = None
    ) -> ClipResult:
        """Decide about one group of gradients from what :meth:`early_stats` returned."""
        coefs, verdict = self.judge(self._state.states[0], stats, group, loss)
        return ClipResult(verdict[NORM].clone(), stats, coefs, verdict)

    def accept(self, result: ClipResult) -> None:
        """Take over what an operator found after :meth:`rule_call`."""
        self._present = None
        self.result = result

    def align(self) -> None:
        """Give every parameter a row in results, also those without a gradient."""
        self._is_aligned = True

    @property
    def own_rows(self) -> slice:
        """Which rows of a result are those of parameters of this rank."""
        return self._peers.own

    def bind(self, *targets: Target) -> None:
        """Learn the parameters before the first step, so that a loaded state is checked at once."""
        found = self._cache.find(targets)
        device = found.params[0].device if found.params else torch.device("cpu")
        self._state.fit(self._peers.find(found), device)

    @property
    def names(self) -> list[str]:
        """The names of the gradients of the last step, in the order of the rows of its stats."""
        if self._peers.reduction is not None:
            return self._peers.reduction.names
        targets = self._cache.targets
        if targets is None:
            return []
        return targets.names if self._present is None else [targets.names[i] for i in self._present]

    @property
    def groups(self) -> RankGroups:
        """The ranks that :meth:`distribute` was given."""
        return self._peers.groups

    def learn_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Learn what parameters are called, where the targets do not say."""
        self._cache.give_names(list(named_parameters))

    def norms_by_name(self) -> dict[str, Tensor]:
        """Return the norm of every gradient of the last step, 0-dim tensors on the device."""
        if self.result is None:
            return {}
        return dict(zip(self.names, self.result.norms.unbind(), strict=True))

    def worst(self) -> str | None:
        """Return the name of the first tensor with NaN or Inf, else of the largest. This waits."""
        if self.result is None:
            return None
        return self.names[int(self.result.verdict[WORST])]

    def reset(self) -> None:
        """Forget all statistics and counts, as if newly made."""
        self._state.reset()
        self.result = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all statistics and counts, as tensors on the device; nothing waits."""
        return self._state.save()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; settings stay as they are.

        Raises:
            ValueError: the state does not fit this clipper or its parameters; names what differs.
                If no parameters are known yet, theirs are compared in the first step.

        Where ranks add up and the parameters are known, every rank has to load, and all get what
        the first one loaded.
        """
        self._state.load(state_dict)
        self.result = None
        if self._peers.reduction is not None:
            self._peers.reduction.broadcast(self._state.tensors())

    def _gather(self, targets: tuple[Target, ...]) -> tuple[Targets, list[Tensor]]:
        found = self._cache.find(targets)
        if found is not self._peers.found:
            self._peers.find(found)
        reduction = self._peers.reduction
        if reduction is not None:
            self._present = None
            self._state.fit(self._peers.find(found), reduction.device)
            return found, reduction.local_parts([p.grad for p in found.params])
        aligned = self.is_per_tensor or self._is_aligned
        grads, self._present = found.gradients(aligned=aligned)
        if grads:
            self._state.fit(found, grads[0].device)
        return found, grads

    def _attached(self) -> Attachment | None:
        attachment = self._attachment
        return attachment if attachment is not None and attachment.is_watching else None

    def _finishes(self, grads: list[Tensor]) -> bool:
        """Whether a step can start from stats. The norm is then the verdict's, a float32."""
        return self._attached() is not None and norm_dtype(grads) == torch.float32

    def _measured(self, found: Targets, grads: list[Tensor]) -> Tensor:
        """Return the stats of gradients, as far as possible those taken during backward."""
        attachment = self._attached()
        if attachment is None:
            return ops.grad_stats(grads)
        params = found.params
        if self._present is not None:
            params = [params[i] for i in self._present]
        return attachment.complete(params, grads)

    def _tag(self) -> Tensor | None:
        """Return the number of the step, by which ranks notice that they are apart."""
        if not self._state.states:
            return None
        counters = self._state.counters
        return (self._state.states[0] if counters is None else counters)[STEPS]

    def _nothing(self, found: Targets) -> Tensor:
        self.result = None
        return torch.zeros((), device=found.params[0].device if found.params else None)

    def _clip_at_once(
        self, found: Targets, grads: list[Tensor], loss: Tensor | None
    ) -> ClipResult | None:
        """One group, one device, one call; None if there are several devices."""
        state, clip = self._state.states[0], self.operators()[1]
        arguments = self.rule_id(), self.settings(found.settings[0]), self._seen_loss(loss, state)
        served = ops.serve(clip, grads, state, *arguments, name=self._name)
        if not served:
            return None
        is_simple = self._present is None and not self._peers.shares_records
        if is_simple and not self.watches_loss:
            self._simple = found, clip, arguments[0], arguments[1]
        return ClipResult(*served[0])

    def _clip_simply(
        self, targets: tuple[Target, ...], watch: LossWatch | None, loss: Tensor | None
    ) -> ClipResult | None:
        """Clip as in the step before, if only the numbers differ; else None, and nothing is done.

        Most steps are such. After a backward pass our code has left the caches of the processor,
        and to bring back a function that is called takes most of a microsecond: this calls a few.
        """
        assert self._simple is not None
        last, clip, rule, known = self._simple
        self._simple, state = None, self._state
        if self._attachment is not None or self.replaceable in self.__dict__:
            return None
        found = self._cache.known_groups(targets) or self._cache.find(targets)
        settings = self.settings(found.settings[0])
        if found is not last or state.fitted is not found:
            return None
        if settings != known and len(state.states[0]) != self.state_size(len(found.params)):
            return None
        grads = native.gradients(found.params)
        number = self._reader.number
        reading = native.read_to_write(number, grads, False) if clip is _CLIP_BY else 0
        try:
            if reading:
                watching = () if watch is None else (None, watch.state, loss, watch.settings)
                results = _CLIP_READ(reading, state.states[0], rule, settings, *watching)
            else:
                grads, present = found.unique(grads)
                if present is not None or state.states[0].device != grads[0].device:
                    return None
                results = clip(grads, state.states[0], rule, settings)
        except (RuntimeError, TypeError, ValueError):  # nothing was written yet
            return None
        result = ClipResult(*results)
        if watch is not None and loss is not None and not reading:
            watch.judge(loss, result.verdict)
        self._simple, self._present = (found, clip, rule, settings), None
        return result

    def _decide(
        self,
        found: Targets,
        grads: list[Tensor],
        loss: Tensor | None,
        grad_scale: Tensor | None,
        extra: Tensor | None,
        record: Record | None,
    ) -> tuple[ClipResult, Record | None]:
        """Any number of groups, devices and ranks: the same operators, one at a time."""
        stats = self._measured(found, grads)
        if grad_scale is not None:
            stats[:, SUMSQ] *= _inverse(grad_scale, stats.device).square()
        stats, record = self._peers.add_up(stats, loss, extra, self._tag, record)
        if record is not None:
            loss = record.loss
        states = self._state.states
        sizes = self._peers.sizes_of(found, self._present) if len(states) > 1 else [len(stats)]
        coefs, verdicts = [], []
        parts = torch.split(self._peers.by_group(stats), sizes)
        if self.on_nonfinite == "skip":
            parts = share_alarm(parts)
        for group, rows in enumerate(parts):
            if not len(rows):
                continue
            coef, verdict = self.judge(states[group], rows, found.settings[group], loss)
            coefs.append(coef)
            verdicts.append(verdict)
        if self._state.counters is not None:
            verdict = merge_verdicts(verdicts, stats, self._state.counters)
        norm = reported_norm(stats, PROPAGATE).to(norm_dtype(grads))
        return ClipResult(norm, stats, self._peers.by_stage(torch.cat(coefs)), verdict), record

    def _scale(self, grads: list[Tensor], coefs: Tensor) -> None:
        """Apply what was decided to the gradients of this rank."""
        ops.scale_(grads, coefs)

    def _name(self, i: int) -> str:
        return f"the gradient of {self.names[i]}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the parameters and the last result: they belong to the run, not to us."""
        kept = {**self.__dict__, "_cache": TargetCache()}
        of_the_run = ("_present", "result", "_simple", "_call", "_attachment")
        return {**kept, **dict.fromkeys(of_the_run)}


def _unscaled(coefs: Tensor, grad_scale: Tensor | None) -> Tensor:
    """Return the coefficients that also divide by the scale, so that one pass does both."""
    if grad_scale is None:
        return coefs
    return torch.where(coefs == REFUSE, coefs, coefs * _inverse(grad_scale, coefs.device))


def _inverse(grad_scale: Tensor, device: torch.device) -> Tensor:
    return grad_scale.to(device, wide_dtype(device), non_blocking=True).reciprocal()
