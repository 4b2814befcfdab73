"""Tells of runs that go nowhere: a plateau, a gap to evaluation. Alerts only."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window
from heal.verdict import Record


class Plateau:
    """Tells once that the loss has stopped improving; never acts.

    A plateau at the loss of pure chance (DPO: ln 2) is told after half the steps and named so.
    Every such run starts there, so the first half window is not judged.
    """

    BLOCKS = 10
    CHANCE_MARGIN = 0.01
    STANDARD_ERRORS = 4.0  # of a block's median: a gain within them is none

    def __init__(self, config: HealingConfig) -> None:
        self.steps = config.plateau_steps
        self.size = max(self.steps // self.BLOCKS, 1)
        self.improvement = config.plateau_improvement
        self.chance = config.chance_loss
        self.losses = Window(self.size)
        self.medians: list[float] = []
        self.told = False

    def observe(self, record: Record) -> Finding | None:
        if not self.steps or not record.has_finite_loss or record.lr == 0.0:
            return None
        self.losses.push(record.loss)
        if len(self.losses) < self.size:
            return None
        self.medians.append(self.losses.median)
        spread = self.losses.spread
        self.losses.clear()
        del self.medians[: -self.BLOCKS]
        if len(self.medians) < self.BLOCKS:
            return None
        half = self.medians[self.BLOCKS // 2 :]
        earlier = min(self.medians[: self.BLOCKS // 2])
        gained = earlier - min(half)
        level = max(abs(earlier), spread)
        at_chance = self.chance > 0.0 and all(
            abs(level - self.chance) < self.CHANCE_MARGIN for level in half
        )
        noise = self.STANDARD_ERRORS * spread / math.sqrt(self.size)
        is_flat = gained <= self.improvement * level + noise
        if not is_flat and not at_chance:
            self.told = False
            return None
        if self.told:
            return None
        self.told = True
        return Finding(
            cause=Cause.PLATEAU,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={
                "loss": half[-1],
                "gained": gained,
                "at_chance": at_chance,
                "advice": "check labels and data; a higher learning rate may help"
                if at_chance
                else "if this loss measures progress: try another learning rate, or end the run",
            },
        )

    def state(self) -> dict[str, Any]:
        return {"losses": self.losses.values(), "medians": list(self.medians), "told": self.told}

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(self.size, state["losses"])
        self.medians, self.told = list(state["medians"]), state["told"]


class NotLearning:
    """Suspects, once, that nothing is learned: gradients are zero, or the loss is no lower.

    A loss that is no lower than at the start may be that of harder data, or say nothing about
    learning at all (critics, RL): the experiment compares today's weights with the first ones.
    """

    STEPS = 100  # after which something should have been learned
    ZEROS = 50  # gradients of zero in a row

    def __init__(self, config: HealingConfig) -> None:
        self.first: list[float] = []
        self.losses = Window(self.STEPS // 4)
        self.zeros = self.seen = 0
        self.was_asked = False

    def observe(self, record: Record) -> Finding | None:
        if self.was_asked or not record.has_finite_loss:
            return None
        self.seen += 1
        if len(self.first) < 3:
            self.first.append(record.loss)
        self.losses.push(record.loss)
        self.zeros = self.zeros + 1 if record.norm == 0.0 and record.loss != 0.0 else 0
        if self.zeros >= self.ZEROS:
            return self._found(record, "all gradients are zero: the network may be dead")
        if self.seen == self.STEPS and self.losses.median >= min(self.first):
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
                "lr": record.lr,
                "advice": advice,
            },
            wants_proof=self.zeros < self.ZEROS,
        )

    def state(self) -> dict[str, Any]:
        names = ("zeros", "seen", "was_asked")
        windows = {"first": list(self.first), "losses": self.losses.values()}
        return {**windows, **{name: getattr(self, name) for name in names}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.first, self.losses = list(state["first"]), Window(self.STEPS // 4, state["losses"])
        for name in ("zeros", "seen", "was_asked"):
            setattr(self, name, state[name])


class OverfittingGap:
    """Tells, once per crossing, that evaluation is far worse than training; never acts.

    Like is compared with like: unless the caller gives the training loss measured in evaluation
    mode, the median of the last training losses stands for it.
    """

    LOSSES = 100
    REARM = 0.8  # share of the gap below which the next crossing is told again

    def __init__(self, config: HealingConfig) -> None:
        self.limit = config.eval_gap
        self.losses = Window(self.LOSSES)
        self.told = False
        self.gap = math.nan

    def observe(self, record: Record) -> Finding | None:
        if record.has_finite_loss:
            self.losses.push(record.loss)
        return None

    def observe_eval(
        self, step: int, eval_loss: float, train_loss: float | None = None
    ) -> Finding | None:
        """Hear of an evaluation."""
        trained = self.losses.median if train_loss is None else train_loss
        self.gap = eval_loss - trained
        if self.gap < self.REARM * self.limit:
            self.told = False
        if not self.gap > self.limit or self.told:
            return None
        self.told = True
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
        return {"losses": self.losses.values(), "told": self.told, "gap": gap}

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(self.LOSSES, state["losses"])
        self.told = state["told"]
        self.gap = math.nan if state["gap"] is None else state["gap"]
