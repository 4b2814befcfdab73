"""Learning rate schedules: those that the healer steps, and those that you step yourself.

A rollback returns the first kind with the step count. The second kind follows your loop, which the
healer cannot rewind. Rates are read on the host only: one in device memory is unknown.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau, StepLR

from heal.detectors.robust import SAME
from heal.extra_state import listed, state_of
from heal.training_state import copied
from zclip import ClippedOptimizer

UNKNOWN = float("nan")


class JointRates:
    """The rates of an optimizer that several schedules drive, followed from turn to turn.

    No single schedule knows them: ``_last_lr`` is of its own last turn, and a ReduceLROnPlateau
    beside a warm-up still has the rate of the first step long after. So the groups are read
    whenever a schedule has turned; a change in between is not a schedule's.

    Attributes:
        is_mixed: whether healer and caller each step some, so that a rollback returns only those of
            the healer.
        expected: the rate that the schedules have set for each group; empty if unknown.
        shares: per group, the product of all factors by which own schedules changed its rate.
    """

    def __init__(self, optimizer: Optimizer, stepped: Sequence[Any], own: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._drivers = [*stepped, *own]
        self._is_stepped = bool(stepped)
        self._are_counted = all(hasattr(s, "last_epoch") for s in own)
        self.is_mixed = bool(stepped and own)
        self.shares = [1.0] * len(optimizer.param_groups)
        self.adopt()

    def adopt(self) -> None:
        """Expect the rates that the groups have now."""
        self._turns = _turns(self._drivers)
        held = [copied(group.get("lr")) for group in self._optimizer.param_groups]
        self.expected: list[Any] = held if self._are_counted else []

    def after_turns(self) -> None:
        """Follow the schedules that the healer has stepped."""
        if self._is_stepped or not self.expected or _turns(self._drivers) != self._turns:
            self.adopt()

    def before_step(self) -> None:
        """Follow own schedules that were stepped. If only one was, its ``_last_lr`` is exact."""
        turns = _turns(self._drivers)
        if turns == self._turns:
            return
        pairs = zip(self._drivers, turns, self._turns, strict=True)
        turned = [s for s, now, before in pairs if now != before]
        before, last_lr = self.expected, list(getattr(turned[0], "_last_lr", ()))
        self.adopt()
        now = last_lr if len(turned) == 1 and last_lr else self.expected
        for i, (lr, old) in enumerate(zip(now, before, strict=False)):
            if i < len(self.shares):
                self.shares[i] *= _ratio(lr, old)
        self.expected = copied(last_lr) if len(turned) == 1 and self._are_counted else []

    def take_shares(self, shares: Sequence[float]) -> None:
        """Replace own schedules' share of each rate; the rest stays as it is."""
        groups = self._optimizer.param_groups
        for group, now, share in zip(groups, self.shares, shares, strict=False):
            if now > 0.0 and now != share and group.get("lr") is not None:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(share / now)
                else:
                    group["lr"] *= share / now
        self.shares = list(shares)
        self.adopt()


def _turns(schedulers: Sequence[Any]) -> list[Any]:
    """Return how often each was stepped; None if it does not count."""
    return [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]


def number_of(lr: Any) -> float:
    """Return a rate as a number; NaN if there is none, or if reading it would wait for a device."""
    if isinstance(lr, Tensor) and (lr.device.type != "cpu" or lr.numel() != 1):
        return UNKNOWN
    return UNKNOWN if lr is None else float(lr)


def _distance(lr: float, scheduled: float) -> float:
    """Return by what factor a rate is off its schedule, in either direction; 0 if it is unknown."""
    if lr != lr or scheduled != scheduled:
        return 0.0
    ratio = lr / scheduled if scheduled else math.inf
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf


def _ratio(now: Any, before: Any) -> float:
    """Return the factor between two rates; 1 if it is unknown."""
    old, new = number_of(before), number_of(now)
    return new / old if old > 0.0 and new > 0.0 else 1.0


def inner_of(scheduler: Any) -> Any:
    """Return the bare optimizer that a scheduler drives; None if it does not say."""
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, ClippedOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's has it inside
    return optimizer.inner if isinstance(optimizer, ClippedOptimizer) else optimizer


DRIVEN = ("lr", "momentum", "betas")  # what schedulers write into parameter groups
MAX_TURNS = 10_000  # changes of own schedules that are remembered, enough for every snapshot
MOST_SURPRISES = 3
"""Steps in a row before which a schedule had moved; a resume makes it one."""

VANISHED = 1e-9
"""A rate below this share of its start trains nothing: the schedule was made for epochs."""

Rates = list[list[dict[str, Any]]]
"""Per optimizer and parameter group, what schedulers wrote there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of own schedules before a step, noted when it had changed."""

    step: int
    mark: tuple[Any, ...]
    states: list[tuple[Any, Any]]  # scheduler and its state
    rates: Rates  # nothing for optimizers that the healer's schedules drive too
    shares: dict[int, list[float]]  # of these, by identity, see JointRates


class Schedules:
    """Steps the schedules that were given, and keeps those in place that the caller steps.

    After a rollback a schedule of the caller stays as it is, with the rates that it set, because
    the data and the caller's loop go on as well. With ``after_rollback="replay_data"`` it returns
    and repeats its turns at the same steps: the epochs come again, but not the caller's loop over
    them. In ``run`` it returns too, because there the caller gets the same steps again and steps
    it again.

    Args:
        given: one, several or None; stepped once per step. A ReduceLROnPlateau among them counts
            as the caller's, who has its metric.
        own: schedules that the caller steps.
        optimizers: wrapped ones.
        replays: whether a rollback returns to the same data.
        note: called with what is doubtful.

    Attributes:
        all: every schedule that was given, to be saved and loaded.
        are_followed: whether :meth:`before_step` and :meth:`step` have anything to do. False from
            the first step on if there is no schedule.
        was_put_back: whether a rate was put back before this step.

    Raises:
        TypeError: a given schedule has no ``step``, or an own one has no state to save.
        ValueError: a schedule is in both lists.
    """

    def __init__(
        self,
        given: Any,
        own: Any,
        optimizers: Sequence[ClippedOptimizer],
        replays: bool,
        note: Callable[[str], None],
    ) -> None:
        self.given, self.own = listed(given), listed(own)
        for scheduler in self.given:
            if not callable(getattr(scheduler, "step", None)):
                raise TypeError(
                    "scheduler: expected an object with a step method, got "
                    f"{type(scheduler).__name__}"
                )
            driven = inner_of(scheduler)
            if isinstance(driven, Optimizer) and all(driven is not o.inner for o in optimizers):
                note(
                    f"{type(scheduler).__name__} drives another optimizer than the healer's, whose "
                    "learning rate it does not change; make it of the optimizer that you give"
                )
        for i, scheduler in enumerate(self.own):
            if not hasattr(scheduler, "load_state_dict"):
                raise TypeError(
                    f"own_schedulers[{i}]: expected a scheduler with state_dict and "
                    f"load_state_dict, got {type(scheduler).__name__}"
                )
            if any(scheduler is other for other in self.given):
                raise ValueError(
                    f"own_schedulers[{i}]: expected a scheduler that you step yourself, got "
                    f"{type(scheduler).__name__}, which is given as scheduler too and stepped by "
                    "the healer; give it in one place"
                )
        self.stepped = [s for s in self.given if not isinstance(s, ReduceLROnPlateau)]
        plateaus = [s for s in self.given if isinstance(s, ReduceLROnPlateau)]
        self._callers = [*plateaus, *self.own]
        self.all = [*self.given, *self.own]
        self.are_followed = True
        self._caller_repeats = False
        self._replays = replays
        self._optimizers = optimizers
        self._note = note
        self._turns: deque[Turn] = deque(maxlen=MAX_TURNS)
        self._ahead: deque[Turn] = deque()
        self._counts = _turns(self.stepped)
        self._surprises = [0] * len(self.stepped)
        self._has_begun = False
        self._puts_back: bool | None = None  # None: not before the rates are on schedule
        self._is_held = self.was_put_back = False
        self._look_who_drives()

    def follow_caller(self) -> None:
        """Expect the caller to repeat steps that are taken again, with its own schedules."""
        self._caller_repeats = True

    def step(self) -> None:
        """Step those that were given."""
        self.was_put_back = False
        for i, scheduler in enumerate(self.stepped):
            self._surprises[i] += 1
            count = getattr(scheduler, "last_epoch", None)
            if count == self._counts[i] or not isinstance(scheduler, LRScheduler):
                self._surprises[i] = 0
            if self._surprises[i] == MOST_SURPRISES:
                self._note(
                    f"{type(scheduler).__name__} is stepped by the healer and by other code; give "
                    "it as own_schedulers if you step it"
                )
            scheduler.step()
            self._counts[i] = getattr(scheduler, "last_epoch", None)
            if isinstance(scheduler, (StepLR, ExponentialLR)) and _has_vanished(scheduler):
                self._note(
                    f"{type(scheduler).__name__} is stepped at every step and has brought the "
                    f"learning rate below {VANISHED:g} of its start; if it counts epochs, give it "
                    "as own_schedulers and step it yourself"
                )
        for joint in self._joint.values():
            joint.after_turns()

    def rates(self) -> tuple[float, float]:
        """Return the rate and the scheduled rate of the group that is furthest off its schedule.

        NaN stands for an unknown rate; without a schedule it is the first group's.
        """
        found = UNKNOWN, UNKNOWN
        furthest = 0.0
        for optimizer in self._optimizers:
            expected = self._expected(optimizer)
            for i, group in enumerate(optimizer.inner.param_groups):
                lr = group.get("lr")
                if type(lr) is not float:
                    lr = self._number(lr)
                scheduled = self._number(expected[i]) if i < len(expected) else UNKNOWN
                distance = 1.0 if lr == scheduled else _distance(lr, scheduled)
                if distance > furthest or found[0] != found[0]:
                    furthest, found = distance, (lr, scheduled)
        if 0.0 < furthest <= 1.0 + SAME and self._puts_back is None:
            self._puts_back = True
        return found

    def put_back(self) -> None:
        """Return every rate to its schedule, if something else has changed one.

        Once, unless they are held: code that changes it again means it. Nor before the rates were
        on schedule for the first time, because the loop may have a warm-up of its own.
        """
        if not self._puts_back:
            return
        found, scheduled = self.rates()
        if _distance(found, scheduled) <= 1.0 + SAME:
            return
        self._puts_back = self._is_held
        self.was_put_back = True
        for optimizer in self._optimizers:
            groups = optimizer.inner.param_groups
            for group, lr in zip(groups, self._expected(optimizer), strict=False):
                if _distance(number_of(group.get("lr")), number_of(lr)):
                    _write([group], [{"lr": lr}])

    def hold(self, is_held: bool) -> None:
        """Put rates back before every step from now on, or no longer."""
        self._is_held = is_held
        self._puts_back = is_held or None

    def expect_change(self) -> None:
        """Leave rates that are off their schedule now alone until they are on it again."""
        if self._puts_back:
            self._puts_back = None

    def _expected(self, optimizer: ClippedOptimizer) -> Sequence[Any]:
        """Return the scheduled rate of each group; fewer where it is unknown."""
        key = id(optimizer.inner)
        if key in self._joint:
            return self._joint[key].expected
        return getattr(self._alone.get(key), "_last_lr", ())

    def _number(self, lr: Any) -> float:
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            self._note("the learning rate is a tensor on a device, and so not watched")
        return number_of(lr)

    def before_step(self, step: int) -> None:
        """Note where own schedules are; repeat the turns that they took before a rollback."""
        if not self._has_begun:
            self._has_begun = True
            self._look_who_drives()  # again, because a resume may have changed the rates
            self._note_unknown()
            self.are_followed = bool(self.all)
        for joint in self._joint.values():
            joint.before_step()
        if not self._callers:
            return
        while self._ahead and self._ahead[0].step <= step:
            turn = self._ahead.popleft()
            if turn.step == step and turn.mark != self._mark():
                self._install(turn)
        mark = self._mark()
        if not self._turns or self._turns[-1].mark != mark:
            self._turns.append(self._present(step, mark))

    @property
    def are_known(self) -> bool:
        """Whether no optimizer has a torch scheduler that was not given."""
        return not any(self._has_unknown(optimizer) for optimizer in self._optimizers)

    def before_return(self) -> Callable[[int], None]:
        """Call this before a snapshot is written, and what it returns afterwards, with its step."""
        for joint in self._joint.values():
            joint.before_step()
        present = self._present(0, ())
        before = [_driven(o.param_groups) for o in self._optimizers]

        def after_return(step: int) -> None:
            self._counts = _turns(self.stepped)
            self._return_shares(step)
            if self._replays or self._caller_repeats:
                self._go_back_to(step)
            else:
                self._turns = deque((t for t in self._turns if t.step < step), maxlen=MAX_TURNS)
                self._install(present)
            self._leave_unknown(before)
            self._note_raised(before)
            for joint in self._joint.values():
                joint.adopt()

        return after_return

    def _present(self, step: int, mark: tuple[Any, ...]) -> Turn:
        states = [(s, copied(state_of(s))) for s in self._callers]
        shares = {o: list(joint.shares) for o, joint in self._joint.items() if joint.is_mixed}
        return Turn(step, mark, states, self._rates(), shares)

    def _go_back_to(self, step: int) -> None:
        known = [turn for turn in self._turns if turn.step <= step]
        later = [turn for turn in self._turns if turn.step > step]
        self._turns = deque((t for t in self._turns if t.step < step), maxlen=MAX_TURNS)
        to_repeat = [] if self._caller_repeats else [*later, *self._ahead]
        if known:
            # Again before the step itself: until then the caller may step what has just returned.
            to_repeat.insert(0, replace(known[-1], step=step))
            self._install(known[-1])
        self._ahead = deque(to_repeat)

    def _install(self, turn: Turn) -> None:
        for scheduler, state in turn.states:
            scheduler.load_state_dict(copied(state))
        for optimizer, rates in zip(self._optimizers, turn.rates, strict=True):
            _write(optimizer.param_groups, rates)
        for o, shares in turn.shares.items():
            self._joint[o].take_shares(shares)

    def _return_shares(self, step: int) -> None:
        """Set own schedules' shares to those in the rates of the snapshot of ``step``."""
        # A turn that was noted before this very step came after the snapshot.
        earlier = [turn.shares for turn in self._turns if turn.step < step]
        for o, joint in self._joint.items():
            joint.shares = list(earlier[-1].get(o, ())) if earlier else [1.0] * len(joint.shares)

    def _look_who_drives(self) -> None:
        """Find the schedules of each optimizer; one that does not say what it drives may be it."""
        self._alone: dict[int, Any] = {}
        self._joint: dict[int, JointRates] = {}
        for optimizer in self._optimizers:
            inner = optimizer.inner
            if self._has_unknown(optimizer):
                continue  # the expected rate is unknown
            stepped = [s for s in self.stepped if inner_of(s) in (inner, None)]
            own = [s for s in self._callers if inner_of(s) in (inner, None)]
            if len(stepped) + len(own) > 1:
                self._joint[id(inner)] = JointRates(inner, stepped, own)
            else:
                self._alone |= {id(inner): s for s in self._driving(optimizer, self.all)}

    def _driving(self, optimizer: ClippedOptimizer, schedulers: Sequence[Any]) -> list[Any]:
        return [s for s in schedulers if inner_of(s) is optimizer.inner]

    def _rates(self) -> Rates:
        """Return what own schedules have set; nothing for optimizers that they share."""
        found: Rates = []
        for optimizer in self._optimizers:
            drivers = self._driving(optimizer, self._callers)
            joint = self._joint.get(id(optimizer.inner))
            is_mixed = joint is not None and joint.is_mixed
            groups = optimizer.param_groups if drivers and not is_mixed else []
            rates = _driven(groups)
            if len(drivers) == 1 and not self._has_unknown(optimizer):
                # Not as the group has it: a fault may have changed that.
                for rate, lr in zip(rates, getattr(drivers[0], "_last_lr", ()), strict=False):
                    rate["lr"] = copied(lr)
            found.append(rates)
        return found

    def _mark(self) -> tuple[Any, ...]:
        """Return host values that differ once an own schedule was stepped."""
        rates = tuple(
            rate.get("lr")
            for groups in self._rates()
            for rate in groups
            if not isinstance(rate.get("lr"), Tensor)
        )
        return (*_turns(self._callers), *rates)

    def _has_unknown(self, optimizer: ClippedOptimizer) -> bool:
        """Whether a torch scheduler drives an optimizer, and none was given that may be it."""
        if not hasattr(optimizer.inner.step, "_wrapped_by_lr_sched"):  # plateaus leave no mark
            return False
        known = [s for s in self.all if inner_of(s) in (optimizer.inner, None)]
        return all(isinstance(s, ReduceLROnPlateau) for s in known)

    def _note_unknown(self) -> None:
        for optimizer in self._optimizers:
            if self._has_unknown(optimizer):
                self._note(
                    f"a scheduler of {type(optimizer.inner).__name__} was not given to the healer: "
                    "give it as own_schedulers if you step it, or as scheduler if the healer is "
                    "to. Until then rollbacks leave it and the learning rate as they are, "
                    "checkpoints do not hold it, and no body of your loop is repeated for an "
                    "experiment, because that could step it twice"
                )

    def _leave_unknown(self, before: Rates) -> None:
        """Put back the rates of a schedule that was not given, because it goes on."""
        for optimizer, rates in zip(self._optimizers, before, strict=True):
            if self._has_unknown(optimizer):
                _write(optimizer.param_groups, rates)

    def _note_raised(self, before: Rates) -> None:
        for optimizer, groups in zip(self._optimizers, before, strict=True):
            if self._driving(optimizer, self.all):
                continue
            rates = [rate.get("lr") for rate in groups]
            now = [group.get("lr") for group in optimizer.param_groups]
            # Down cures a rate that a fault had raised; up undoes a decay.
            raised = [
                (a, b)
                for a, b in zip(rates, now, strict=False)
                if isinstance(a, float) and isinstance(b, float) and b > a
            ]
            if raised:
                self._note(
                    f"the rollback returned the learning rate from {raised[0][0]!r} to "
                    f"{raised[0][1]!r}, and no scheduler is known; if your code sets it, set it "
                    "again; if a ReduceLROnPlateau does, give it as own_schedulers"
                )


def _driven(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what schedulers may have set of each parameter group."""
    return [{k: copied(g[k]) for k in DRIVEN if g.get(k) is not None} for g in groups]


def _write(groups: Sequence[dict[str, Any]], rates: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(groups, rates, strict=False):
        for name, value in values.items():
            if isinstance(group.get(name), Tensor):
                with torch.no_grad():
                    group[name].copy_(torch.as_tensor(value))
            else:
                group[name] = copied(value)


def _has_vanished(scheduler: Any) -> bool:
    start, now = scheduler.base_lrs[0], scheduler.get_last_lr()[0]
    return not isinstance(now, Tensor) and 0.0 < now < VANISHED * start
