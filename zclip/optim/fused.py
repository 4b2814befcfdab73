"""What all fused optimizers share: plans, clipping inside the step, telemetry, checkpoints."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from zclip.clippers import AGC, Clipper, ClipResult, LossWatch, make_clipper
from zclip.layout import (
    FIRST_BAD_TENSOR,
    FIRST_FOREIGN,
    HAS_INF,
    HAS_NAN,
    HEALTH_FLAGS,
    LR,
    NUM_TELEMETRY,
    TAKEN,
    UPDATE_NORM,
    WEIGHT_NORM,
)
from zclip.ops import by_device, serve
from zclip.optim.plan import Plan
from zclip.optim.result import StepResult
from zclip.optim.watched_state import WatchedState
from zclip.reading import native
from zclip.schemas import wide_dtype

CLIP_KEY = "zclip"
"""Where the state of the clipper stands in ``state_dict``; a bare optimizer does not look there."""

_NO_RULE = -1
_NARROW = (torch.bfloat16, torch.float16)


class Guard(NamedTuple):
    """What a caller adds to one step: its own clipper, and a watch of the loss.

    Attributes:
        clipper: clips in place of the optimizer's own.
        watch: float64 [8], the state of the operator ``watch_loss_``. A step whose loss is NaN or
            Inf is skipped, and what is found is in the verdict of the clipper.
        settings: factor, rising_steps, decay and warmup_steps of that operator.
    """

    clipper: Clipper
    watch: Tensor
    settings: tuple[float, int, float, int]

    def judge(self, loss: Tensor, verdict: Tensor) -> None:
        """Add what the loss shows to a verdict; nothing waits."""
        LossWatch(self.watch, self.settings).judge(loss, verdict)


class FusedOptimizer(Optimizer):
    """Norm, clip rule and update in one native call, with a health check of weights and state.

    The base of :class:`AdamW`, :class:`Adam`, :class:`SGD` and :class:`Lion`. The gradients are
    read, never written: the coefficient of the clip rule is applied as they are loaded. A skipped
    step writes nothing at all, and nothing waits for the device. 16-bit parameters have float32
    moments.

    Attributes:
        clipper: what clips, or None.
        result: the last step, as :class:`StepResult`; None before the first, and if there was no
            gradient.
        lr_scale: multiplies the learning rate of every group during the step and is not seen
            outside of it, so that no scheduler undoes it; not part of ``state_dict``.
        telemetry: whether steps measure weights, updates and state.
    """

    algorithm: ClassVar[int]
    """ADAM, SGD or LION of :mod:`zclip.layout`."""

    keys: ClassVar[tuple[str, ...]]
    """Of the first moment, the second and its maximum in the state of a parameter."""

    decisive: ClassVar[str | None] = None
    """The setting of a group that decides which state its parameters need, if there is one."""

    lr_scale: float = 1.0
    result: StepResult | None = None
    state: Any  # a WatchedState, so that a step need not look at every entry
    _plans: list[tuple[Plan, list[int]]] | None = None
    _kept: list[tuple[dict[str, Any], list[Tensor], bool]] | None = None
    _made_for: tuple[bool, bool] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what the torch class takes, and what :meth:`_set_up` takes."""
        raise TypeError(f"{type(self).__name__} is a base class; use AdamW, Adam, SGD or Lion")

    def _set_up(
        self,
        clipper: str | Clipper | None,
        skip_nonfinite: bool,
        telemetry: bool,
        stochastic_rounding: bool,
        seed: int,
        clip_settings: Mapping[str, Any],
    ) -> None:
        if clipper is not None:
            clipper = make_clipper(clipper, clip_settings)
        elif clip_settings:
            raise TypeError(
                f"{type(self).__name__}: expected its arguments, or a clipper by "
                f"its name and settings of it, got {', '.join(clip_settings)}"
            )
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}")
        self.clipper = clipper
        self.skip_nonfinite = skip_nonfinite
        self.telemetry = telemetry
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        self._step_supports_amp_scaling = True
        self.state = WatchedState(self.state)
        if clipper is not None:
            clipper.align()
            clipper.bind(self.param_groups)

    # For subclasses

    def settings_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return the six settings of a group, in the order of :mod:`zclip.layout`."""
        raise NotImplementedError

    def new_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what is known of the others stays.

        Raises:
            ValueError: ``differentiable`` of the group is True.
        """
        if {**self.defaults, **param_group}.get("differentiable"):
            raise ValueError(
                f"differentiable of param_groups[{len(self.param_groups)}]: expected False, "
                "because a fused step has no graph, got True"
            )
        super().add_param_group(param_group)
        self._kept = None

    @property
    def names(self) -> list[str]:
        """Of all parameters, in the order of groups: as given to the constructor, or by place."""
        names: list[str] = []
        for group in self.param_groups:
            given = group.get("param_names")
            names += given or [f"parameters[{len(names) + i}]" for i in range(len(group["params"]))]
        return names

    @_disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
        guard: Guard | None = None,
    ) -> Any:
        """Measure, clip and update, unless the clip rule or a GradScaler skips the step.

        Args:
            closure: computes the loss and the gradients; called once, first.
            loss: 0-dim, for clippers that watch it; that of the closure if there is one.
            extra: what only this rank knows; see :meth:`zclip.Clipper.step`.
            guard: clips this step in place of the clipper, and watches the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            TypeError: a gradient is sparse, complex or ``Partial``; names its parameter.
        """
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            loss = returned if isinstance(returned, Tensor) else loss
        plans = self._plans
        if plans is None or not self._is_current():
            plans = self._make_plans()
        if len(plans) == 1 and plans[0][0].is_native and extra is None:
            self.result = self._step_natively(loss, guard)
        else:
            self.result = self._step_apart(loss, extra, guard)
        return returned

    def _step_natively(self, loss: Tensor | None, guard: Guard | None) -> StepResult | None:
        """One device, one rank, one call."""
        plan, grads = self._gradients()
        reading = 0 if grads is None else plan.read(grads)
        if grads is not None and not reading:
            return self._step_apart(loss, None, guard)
        clipper, call, stats = self.clipper if guard is None else guard.clipper, None, None
        if grads is None and clipper is None:
            return None
        watch: tuple[Any, ...] = ()
        if guard is not None and loss is not None:
            watch = guard.watch, loss, guard.settings
        if clipper is not None:
            call = clipper.rule_call(self.param_groups, plan.device, loss)
            if call is None or grads is None:
                return self._step_apart(loss, None, guard)
            stats = clipper.early_stats(grads)
        scaler = self.__dict__
        grad_scale, found_inf = scaler.get("grad_scale"), scaler.get("found_inf")
        rule = (plan.ledger, _NO_RULE, (), None) if call is None else call
        results = plan.step(
            grads or [],
            *rule,
            self._settings(),
            1.0 if grad_scale is None else float(grad_scale),
            found_inf is not None and bool(found_inf),
            self.skip_nonfinite,
            self.seed,
            stats,
            *watch,
        )
        if results is None:  # a tensor has moved
            self._make_plans()
            return self._step_natively(loss, guard)
        clip = None
        if clipper is not None:
            clip = ClipResult(*results[:4])
            clipper.accept(clip)
        return StepResult(results[4], results[5], clip, plan.names)

    def _gradients(self) -> tuple[Plan, list[Tensor] | None]:
        plan = self._plans[0][0]  # type: ignore[index]
        try:
            return plan, plan.gradients()
        except LookupError:
            plan = self._make_plans()[0][0]
            return plan, plan.gradients()

    def _step_apart(
        self, loss: Tensor | None, extra: Tensor | None, guard: Guard | None
    ) -> StepResult | None:
        """Any number of devices, groups and ranks: decide, then update."""
        scaler = self.__dict__
        grad_scale, found_inf = scaler.get("grad_scale"), scaler.get("found_inf")
        clip = coefs = None
        if any(plan.is_converted for plan, _ in self._plans or []):
            self._make_plans()
        clipper = self.clipper if guard is None else guard.clipper
        if clipper is not None:
            clip, coefs, grad_scale = self._clip(clipper, loss, extra, grad_scale)
        if guard is not None and clip is not None and loss is not None:
            guard.judge(loss, clip.verdict)
        found: list[tuple[Plan, list[int], Tensor, Tensor]] = []
        for place in range(len(self._plans or [])):
            plan, members = self._plans[place]  # type: ignore[index]
            try:
                grads = plan.gradients()
            except LookupError:
                plan, members = self._make_plans()[place]
                grads = plan.gradients()
            if grads is None:
                continue
            numbers = self._numbers(plan, members, clip, coefs, grad_scale, found_inf)
            rows, summary = plan.update(grads, *numbers)
            found.append((plan, members, rows, summary))
        if not found:
            return None
        if len(found) == 1 and len(self._plans or []) == 1:
            return StepResult(found[0][2], found[0][3], clip, found[0][0].names)
        return self._joined(found, clip)

    def _clip(
        self,
        clipper: Clipper,
        loss: Tensor | None,
        extra: Tensor | None,
        grad_scale: Tensor | None,
    ) -> tuple[ClipResult | None, Tensor | None, Tensor | None]:
        """Return the result, the coefficients to apply on load and the scale still to divide by."""
        groups = self.param_groups
        if isinstance(clipper, AGC):  # a coefficient for every row: it scales the gradients itself
            clipper.step(groups, loss=loss, grad_scale=grad_scale, extra=extra)
            return clipper.result, None, None
        clip = self._decide_at_once(clipper, loss) if grad_scale is extra is None else None
        if clip is None:
            clip = clipper.decide(groups, loss=loss, grad_scale=grad_scale, extra=extra)
        return clip, None if clip is None else clip.coefs[clipper.own_rows], grad_scale

    def _decide_at_once(self, clipper: Clipper, loss: Tensor | None) -> ClipResult | None:
        """Measure and decide by one operator, one launch on a GPU; None where that takes more."""
        if len(self._plans or []) != 1:
            return None
        plan, grads = self._gradients()
        call = None if grads is None else clipper.rule_call(self.param_groups, plan.device, loss)
        if call is None or grads is None:
            return None
        stats = clipper.early_stats(grads)
        clip: ClipResult | None
        if stats is not None:
            clip = clipper.finish(stats, self.param_groups[0], loss)
        else:
            served = serve(torch.ops.zclip.decide_by_.default, grads, *call, name=plan.name)
            clip = ClipResult(*served[0]) if served else None
        if clip is not None:
            clipper.accept(clip)
        return clip

    def _numbers(
        self,
        plan: Plan,
        members: list[int],
        clip: ClipResult | None,
        coefs: Tensor | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> tuple[Any, ...]:
        """Return the arguments of ``optim_update_`` that change from step to step."""
        device, wide = plan.device, wide_dtype(plan.device)
        nothing = torch.empty(0, dtype=wide, device=device)
        if coefs is None:
            own = nothing
        elif len(members) == len(coefs):
            own = coefs.to(device, non_blocking=True)
        else:
            rows = coefs.unbind()
            own = torch.stack([rows[i] for i in members]).to(device, non_blocking=True)
        blocked = torch.empty(0, device=device) if clip is None else clip.verdict
        skip_flags = (HAS_NAN | HAS_INF) if self.skip_nonfinite else 0
        if found_inf is not None:
            seen = (found_inf.to(blocked.device, non_blocking=True) > 0).float().reshape(1)
            if clip is None:
                blocked = seen
            else:
                blocked = torch.cat([torch.maximum(blocked[:1], seen), blocked[1:]])
        scale = nothing
        if grad_scale is not None:
            scale = grad_scale.to(device, wide, non_blocking=True)
        rates = nothing
        if device.type != "cpu" and any(isinstance(g["lr"], Tensor) for g in self.param_groups):
            rates = torch.stack(
                [torch.as_tensor(g["lr"]).to(device, wide).reshape(()) for g in self.param_groups]
            )
            rates = rates * self.lr_scale
        settings = self._settings(read_rates=not rates.numel())
        blocked = blocked.to(device, non_blocking=True)
        return own, blocked, scale, rates, settings, self.seed, skip_flags

    def _joined(
        self, found: list[tuple[Plan, list[int], Tensor, Tensor]], clip: ClipResult | None
    ) -> StepResult:
        """Return one result for parameters on several devices, on the device of the first."""
        device = found[0][0].device
        wide = wide_dtype(device)
        names = self.names
        table = torch.zeros(len(names), NUM_TELEMETRY, dtype=wide, device=device)
        rows = list(table.unbind())
        summaries = []
        for _, members, part, summary in found:
            summaries.append(_renumbered(summary.to(device, non_blocking=True), members))
            for i, row in zip(
                members, part.to(device, wide, non_blocking=True).unbind(), strict=False
            ):
                rows[i] = row
        return StepResult(
            torch.stack(rows) if self.telemetry else table[:0], _merged(summaries), clip, names
        )

    def _settings(self, read_rates: bool = True) -> list[float]:
        numbers: list[float] = []
        for group in self.param_groups:
            own = self.settings_of(group)
            own[LR] = float(group["lr"]) * self.lr_scale if read_rates else 0.0
            numbers += own
        return numbers

    def _is_current(self) -> bool:
        """Return whether the plans are of these groups, these parameters and this state."""
        kept, groups, state = self._kept, self.param_groups, self.state
        if kept is None or type(state) is not WatchedState or state.changed:
            return False
        if len(groups) != len(kept) or (self.telemetry, self.stochastic_rounding) != self._made_for:
            return False
        key = self.decisive
        for group, (known, params, needs) in zip(groups, kept, strict=True):
            if group is not known or not native.are_same(group["params"], params):
                return False
            if key is not None and (group[key] != 0) != needs:
                return False
        return True

    def _make_plans(self) -> list[tuple[Plan, list[int]]]:
        old = self._plans or []
        if type(self.state) is not WatchedState:  # something has replaced it
            self.state = WatchedState(self.state)
        begun = self._give_state()
        params = [p for group in self.param_groups for p in group["params"]]
        group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        names = self.names
        plans = []
        for members in by_device(params).values():
            sizes = [0] * len(self.param_groups)
            for i in members:
                sizes[group_of[i]] += 1
            plan = Plan(
                self.algorithm,
                self.keys,
                [params[i] for i in members],
                sizes,
                self.state,
                [names[i] for i in members],
                self.telemetry,
            )
            plan.inherit((known for known, _ in old), begun)
            plans.append((plan, members))
        self._plans = plans
        key = self.decisive
        self._kept = [
            (group, list(group["params"]), key is not None and group[key] != 0)
            for group in self.param_groups
        ]
        self._made_for = self.telemetry, self.stochastic_rounding
        self.state.changed = False
        return plans

    def _give_state(self) -> set[Tensor]:
        """Make state where it is missing; return the parameters that had a first moment before."""
        begun = set()
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p):
                    if isinstance(self.state[p].get(self.keys[0]), Tensor):
                        begun.add(p)
                    self._complete(group, p)
                elif p.grad is not None:
                    self.state[p] = self.new_state(group, p)
        return begun

    def _complete(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Bring state that torch made, or another setting, into the form that a step needs."""
        state = self.state[param]
        for key, fresh in self.new_state(group, param).items():
            value = state.get(key)
            if fresh is None:
                continue
            if value is None:
                state[key] = fresh
            elif not isinstance(value, (Tensor, int, float)):
                raise TypeError(
                    f"state[{self._name_of(param)}][{key!r}]: expected a tensor or a number, got "
                    f"{type(value).__name__}"
                )
            elif isinstance(value, Tensor) and not _fits(value, fresh):
                raise ValueError(
                    f"state[{self._name_of(param)}][{key!r}]: expected shape {tuple(fresh.shape)}, "
                    f"got {tuple(value.shape)}; is this the state of another model?"
                )
            elif not isinstance(value, Tensor):
                state[key] = torch.full_like(fresh, float(value))
            elif value.dtype != fresh.dtype or value.device != fresh.device:
                state[key] = value.to(fresh.device, fresh.dtype)
            elif key != "step" and value.stride() != fresh.stride():
                state[key] = fresh.copy_(value)

    def _name_of(self, param: Tensor) -> str:
        params = [p for group in self.param_groups for p in group["params"]]
        return self.names[[p is param for p in params].index(True)]

    def for_one_tensor(
        self, group: Mapping[str, Any], param: Tensor, number: int, clipper: Clipper | None
    ) -> "FusedOptimizer":
        """Return an optimizer of one parameter, whose state is the one that it has here.

        Args:
            group: the group that the parameter is in.
            param: the parameter; it has a gradient.
            number: of the parameter in all groups.
            clipper: what clips it.
        """
        if self.state.get(param):
            self._complete(group, param)
        alone = copy(self)
        alone.param_groups = [{**group, "params": [param], "param_names": [self.names[number]]}]
        own = {param: dict(self.state[param])} if param in self.state else {}
        alone.state = WatchedState(own)
        alone.seed = self.seed + number  # or all tensors would round by the same numbers
        alone.clipper = clipper
        if clipper is not None:
            clipper.align()
            clipper.bind(alone.param_groups)
        alone._make_plans()
        self.state[param] = dict(alone.state[param])
        return alone

    # Checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """Return what the torch class would, and the state of the clipper under "zclip"."""
        state = super().state_dict()
        state["state"] = {
            key: dict(entry)
            for key, entry in state["state"].items()
            if any(value is not None for value in entry.values())  # as torch's SGD without momentum
        }
        if self.clipper is not None:
            state[CLIP_KEY] = self.clipper.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this or of the torch class returned.

        The learned statistics of the clipper stay if the state has none. What memory holds is not
        compared with what was stored before: the next step begins a new comparison.
        """
        state_dict = dict(state_dict)
        clip_state = state_dict.pop(CLIP_KEY, None)
        super().load_state_dict(state_dict)
        self._widen(state_dict)
        self._plans = self._kept = None
        if clip_state is not None and self.clipper is not None:
            self.clipper.load_state_dict(clip_state)

    def _widen(self, state_dict: Mapping[str, Any]) -> None:
        """Take the moments of 16-bit parameters as they were saved: torch rounds them."""
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id)
            if param.dtype in _NARROW and saved:
                for key in self.keys:
                    if isinstance(saved.get(key), Tensor):
                        wide = saved[key].to(param.device, torch.float32, copy=True)
                        self.state[param][key] = wide

    def __getstate__(self) -> dict[str, Any]:
        """Leave out plans and the last result: they belong to this process."""
        own = ("clipper", "skip_nonfinite", "telemetry", "stochastic_rounding", "seed", "lr_scale")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch the state that came."""
        super().__setstate__(state)
        self.state = WatchedState(self.state)
        self._step_supports_amp_scaling = True
        self._plans = self._kept = None


def _fits(value: Tensor, fresh: Tensor) -> bool:
    """Return whether a loaded entry can stand for a new one; one number may have any shape."""
    return value.shape == fresh.shape or value.numel() == fresh.numel() == 1


def _renumbered(summary: Tensor, members: list[int]) -> Tensor:
    """Return a summary whose indices are those of the whole list."""
    table = torch.tensor([-1.0, *map(float, members)]).to(summary.device, non_blocking=True)
    columns = list(summary.unbind())
    for column in (FIRST_BAD_TENSOR, FIRST_FOREIGN):
        columns[column] = table[(columns[column] + 1).long()]
    return torch.stack(columns)


def _merged(summaries: list[Tensor]) -> Tensor:
    table = torch.stack(summaries)
    flags = torch.zeros((), dtype=torch.int32, device=table.device)
    for value in table[:, HEALTH_FLAGS].int().unbind():
        flags = flags | value
    indices = (table[:, column] for column in (FIRST_BAD_TENSOR, FIRST_FOREIGN))
    first = [torch.where(index < 0, torch.inf, index).amin() for index in indices]
    first = [torch.where(index.isinf(), -1.0, index) for index in first]
    norms = [table[:, column].square().sum().sqrt() for column in (WEIGHT_NORM, UPDATE_NORM)]
    return torch.stack([table[:, TAKEN].amax(), flags.float(), *first, *norms])
