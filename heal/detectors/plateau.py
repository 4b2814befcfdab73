"""Reports runs that go nowhere: a plateau, no progress, a gap to evaluation. Alerts only."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FIRST, MOST, RECENT, SAME, SPREADS, STANDARD_ERRORS, Window
from heal.record import HealthRow, Record


class Plateau:
    """Reports once that the loss has stopped improving; never acts.

    The medians of two halves of ``plateau_steps`` are compared. A plateau at the loss of pure
    chance (DPO: ln 2) is named so. Every such run starts there, so the first half is not judged.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.steps = config.plateau_steps
        self.size = max(self.steps // 2, 1)
        self.improvement = config.plateau_improvement
        self.chance = config.chance_loss
        self.losses = Window(self.size)
        self.before = math.nan
        self.was_reported = False

    def ignore_chance(self) -> None:
        """Report no plateau at chance from now on: the caller has better evidence of it."""
        self.chance = 0.0

    def observe(self, record: Record) -> Finding | None:
        if not self.steps or not record.has_finite_loss or record.lr == 0.0:
            return None
        self.losses.push(record.loss)
        if len(self.losses) < self.size:
            return None
        now, spread = self.losses.median, self.losses.spread
        before, self.before = self.before, now
        self.losses.clear()
        if math.isnan(before):
            return None
        at_chance = self.chance > 0.0 and abs(now - self.chance) < SAME
        noise = STANDARD_ERRORS * spread / math.sqrt(self.size)
        is_flat = before - now <= self.improvement * max(abs(before), spread) + noise
        was_before, self.was_reported = self.was_reported, is_flat or at_chance
        if was_before or not self.was_reported:
            return None
        return Finding(
            cause=Cause.PLATEAU,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={
                "loss": now,
                "gained": before - now,
                "at_chance": at_chance,
                "advice": "check labels and data; a higher learning rate may help"
                if at_chance
                else "if this loss measures progress: try another learning rate, or end the run",
            },
        )

    def state(self) -> dict[str, Any]:
        before = None if math.isnan(self.before) else self.before
        return {"losses": self.losses.values(), "before": before, "told": self.was_reported}

    def load_state(self, state: dict[str, Any]) -> None:
        if "before" not in state:
            return  # of version 0.1: learned again
        self.losses = Window(self.size, state["losses"])
        self.before = math.nan if state["before"] is None else state["before"]
        self.was_reported = state["told"]


class NotLearning:
    """Reports gradients of zero, and suspects that nothing is learned if the loss is no lower.

    A loss that is lower than at the start by less than its noise may be that of harder data, or say
    nothing about learning at all (critics, RL): the experiment compares today's weights with the
    first ones. It is suspected once. Where no experiment can be run it is reported only if neither
    loss nor gradient norm has changed since the start, as with a rate that is far too low.

    Gradients of zero are a fact. In a dead network the bias of the last layer goes on learning how
    often each answer comes, and the loss may fall. So checks count the elements of weights whose
    gradients are zero. Where all are, as with a hinge loss of zero, each record is judged instead.
    """

    STEPS = 100
    """Steps after which something should have been learned, be it within a warm-up."""

    WINDOWS = ("losses", "norms", "early_losses", "early_norms")

    def __init__(self, config: HealingConfig) -> None:
        self.first: list[float] = []
        self.losses, self.norms = Window(BLOCK), Window(BLOCK)
        self.early_losses, self.early_norms = Window(BLOCK), Window(BLOCK)
        self.zeros = self.seen = 0
        self.silent_since: int | None = None  # the first check in which they were zero
        self.is_dead = False

    def observe(self, record: Record) -> Finding | None:
        """Judge a record; see :class:`heal.detectors.watch.Detector`."""
        if not record.has_finite_loss:
            return None
        self.seen += 1
        if len(self.first) < FIRST:
            self.first.append(record.loss)
        if self.seen <= BLOCK:
            self.early_losses.push(record.loss)
            self.early_norms.push(record.norm)
        self.losses.push(record.loss)
        self.norms.push(record.norm)
        self.zeros = self.zeros + 1 if record.norm == 0.0 and record.loss != 0.0 else 0
        if self.zeros == BLOCK and not self.is_dead:
            return self._dead(record.step, "all weights")
        if self.seen != self.STEPS or self.is_dead:
            return None
        if not self.has_learned_nothing:
            return None
        advice = "the learning rate may be too high, or too low"
        evidence: dict[str, object] = {"noise": self.losses.spread, "lr": record.lr}
        finding = self._found(record.step, advice, evidence, wants_proof=True)
        return replace(finding, is_kept=self._is_unchanged())

    def _is_unchanged(self) -> bool:
        """Whether loss and norm are what they were at first, and not lost in their noise."""
        for now, early in (self.losses, self.early_losses), (self.norms, self.early_norms):
            spread = min(now.spread, early.spread)
            error = STANDARD_ERRORS * spread / math.sqrt(BLOCK)
            if not (abs(now.median - early.median) <= error and SPREADS * spread < abs(now.median)):
                return False
        return True

    @property
    def has_learned_nothing(self) -> bool:
        """Whether there were steps enough to learn something, and the loss is no lower."""
        if self.is_dead:
            return True
        level, spread = self.losses.median_and_spread()
        return self.seen >= self.STEPS and level >= min(self.first) - spread

    def observe_health(self, row: HealthRow) -> Finding | None:
        """Judge the gradients of a check."""
        pairs = zip(row.gradient_norms, row.sizes, strict=True)
        known = [(norm, size) for norm, size in pairs if norm >= 0.0]
        silent = [size for norm, size in known if norm == 0.0]
        if sum(silent) < MOST * sum(size for _, size in known):
            self.silent_since, self.is_dead = None, False
            return None
        since = self.silent_since = row.step if self.silent_since is None else self.silent_since
        if len(silent) == len(known) or self.is_dead or row.step - since + 1 < BLOCK:
            return None
        return self._dead(row.step, f"{len(silent)} of {len(known)} weights")

    def _dead(self, step: int, which: str) -> Finding:
        self.is_dead = True
        advice = (
            f"the gradients of {which} are zero: the network may be dead; start again with a lower "
            "learning rate, or with other first weights"
        )
        return self._found(step, advice, {}, wants_proof=False)

    def _found(
        self, step: int, advice: str, evidence: dict[str, object], wants_proof: bool
    ) -> Finding:
        losses = {"loss": self.losses.median, "first_loss": min(self.first, default=math.nan)}
        return Finding(
            cause=Cause.NOT_LEARNING,
            step=step,
            bad_step=0,
            severity=Severity.WARN,
            evidence={**losses, **evidence, "advice": advice},
            wants_proof=wants_proof,
        )

    def state(self) -> dict[str, Any]:
        names = ("zeros", "seen", "silent_since", "is_dead")
        windows = {name: getattr(self, name).values() for name in self.WINDOWS}
        windows["first"] = list(self.first)
        return {**windows, **{name: getattr(self, name) for name in names}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        for name in self.WINDOWS:  # the losses only in the first checkpoints
            setattr(self, name, Window(BLOCK, state.get(name, ())))
        self.zeros, self.seen = state["zeros"], state["seen"]
        self.silent_since, self.is_dead = state.get("silent_since"), state.get("is_dead", False)

    def keep_first(self, first: Sequence[float]) -> None:
        """Keep the first losses of the run: a rollback to its first steps does not undo them."""
        self.first = max(self.first, list(first), key=len)


class OverfittingGap:
    """Reports, once per crossing, that evaluation is far worse than training; never acts.

    Like is compared with like: unless the caller gives the training loss measured in evaluation
    mode, the median of the last training losses stands for it. A crossing is reported again after
    half of the gap was closed.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.limit = config.eval_gap
        self.losses = Window(RECENT)
        self.was_reported = False
        self.gap = math.nan

    def observe(self, record: Record) -> Finding | None:
        if record.has_finite_loss:
            self.losses.push(record.loss)
        return None

    def observe_eval(
        self, step: int, eval_loss: float, train_loss: float | None = None
    ) -> Finding | None:
        """Take in an evaluation."""
        trained = self.losses.median if train_loss is None else train_loss
        self.gap = eval_loss - trained
        if self.gap < self.limit / 2:
            self.was_reported = False
        if not self.gap > self.limit or self.was_reported:
            return None
        self.was_reported = True
        return Finding(
            cause=Cause.OVERFITTING,
            step=step,
            bad_step=step,
            severity=Severity.WARN,
            evidence={
                "eval_loss": eval_loss,
                "train_loss": trained,
                "gap": self.gap,
                "advice": "stop early, regularise more, or add data",
            },
        )

    def state(self) -> dict[str, Any]:
        gap = self.gap if math.isfinite(self.gap) else None
        return {"losses": self.losses.values(), "told": self.was_reported, "gap": gap}

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(RECENT, state["losses"])
        self.was_reported = state["told"]
        self.gap = math.nan if state["gap"] is None else state["gap"]
