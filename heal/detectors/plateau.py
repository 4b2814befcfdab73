"""Reports runs that go nowhere: a plateau, no progress, a gap to evaluation. Alerts only."""

import math
from collections.abc import Sequence
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FIRST, RECENT, SAME, STANDARD_ERRORS, Window
from heal.record import Record


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
    """Suspects, once, that nothing is learned: gradients are zero, or the loss is no lower.

    A loss that is lower than at the start by less than its noise may be that of harder data, or say
    nothing about learning at all (critics, RL): the experiment compares today's weights with the
    first ones.
    """

    STEPS = 100
    """Steps after which something should have been learned, be it within a warm-up."""

    def __init__(self, config: HealingConfig) -> None:
        self.first: list[float] = []
        self.losses = Window(BLOCK)
        self.zeros = self.seen = 0
        self.was_asked = False

    def observe(self, record: Record) -> Finding | None:
        if self.was_asked or not record.has_finite_loss:
            return None
        self.seen += 1
        if len(self.first) < FIRST:
            self.first.append(record.loss)
        self.losses.push(record.loss)
        self.zeros = self.zeros + 1 if record.norm == 0.0 and record.loss != 0.0 else 0
        if self.zeros >= BLOCK:
            return self._found(record, "all gradients are zero: the network may be dead")
        if self.seen != self.STEPS:
            return None
        level, spread = self.losses.median_and_spread()
        if level >= min(self.first) - spread:
            return self._found(record, "the learning rate may be too high, or too low")
        return None

    def _found(self, record: Record, advice: str) -> Finding:
        self.was_asked = True
        return Finding(
            cause=Cause.NOT_LEARNING,
            step=record.step,
            bad_step=0,
            severity=Severity.WARN,
            evidence={
                "loss": self.losses.median,
                "first_loss": min(self.first),
                "noise": self.losses.spread,
                "lr": record.lr,
                "advice": advice,
            },
            wants_proof=self.zeros < BLOCK,
        )

    def state(self) -> dict[str, Any]:
        names = ("zeros", "seen", "was_asked")
        windows = {"first": list(self.first), "losses": self.losses.values()}
        return {**windows, **{name: getattr(self, name) for name in names}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        self.losses = Window(BLOCK, state["losses"])
        for name in ("zeros", "seen", "was_asked"):
            setattr(self, name, state[name])

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
