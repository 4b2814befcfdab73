"""Reinforcement that lost its signal or ran away: rewards of groups, distance to the reference.

Reads the trainer's log. Alerts only: an experiment shows whether the weights are damaged.
"""

from collections.abc import Mapping
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import (
    BLOCK,
    FAR,
    FEWEST,
    MOST,
    NEGLIGIBLE,
    RECENT,
    SAME,
    SPREADS,
    UpperRange,
    Window,
)

REWARD = "reward"


class RewardCollapse:
    """Reports once that groups of answers get one and the same reward, or that rewards fell.

    Advantages within a group are then zero and the gradient is noise. Some such groups are usual.
    """

    WINDOWS = ("zero", "std", "reward", "earlier", "steps")

    def __init__(self, config: HealingConfig) -> None:
        self.zero = Window(BLOCK)
        self.std = Window(BLOCK)
        self.reward = Window(BLOCK)
        self.steps = Window(BLOCK)
        self.earlier = Window(RECENT)  # rewards before those: easy and hard prompts come and go
        self.best: float | None = None
        self.noise = 0.0  # the largest spread of rewards while they were well
        self.was_reported = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        if REWARD not in logs:
            return None
        if len(self.reward) == BLOCK:
            self.earlier.push(self.reward.oldest)
        self.reward.push(float(logs[REWARD]))
        self.steps.push(step)
        for window, key in ((self.zero, "frac_reward_zero_std"), (self.std, "reward_std")):
            if key in logs:
                window.push(float(logs[key]))
        if len(self.reward) < BLOCK:
            return None
        how = self._how()
        if not how or self.was_reported:
            # Reported again only after rewards were well: the fall itself widens the noise.
            self.was_reported = self.was_reported and not self._is_well()
            return None
        self.was_reported = True
        return Finding(
            cause=Cause.REWARD_COLLAPSE,
            step=step,
            bad_step=int(self.steps.oldest),  # medians of all these lines have changed
            severity=Severity.WARN,
            evidence={
                "how": how,
                "reward": self.reward.median,
                "best_reward": self.best,
                "zero_std_groups": self.zero.median,
                "advice": "use harder or easier prompts, a finer reward, or a higher temperature"
                if how == "no spread"
                else "look at the answers: the reward may be gamed, or the LR too high",
            },
        )

    def _how(self) -> str:
        median = self.reward.median
        self.best = median if self.best is None else max(self.best, median)
        if len(self.zero) == BLOCK and self.zero.median >= MOST:
            return "no spread"
        if len(self.std) == BLOCK and self.std.median <= NEGLIGIBLE * abs(median):
            return "no spread"
        if len(self.earlier) < RECENT:
            return ""
        if not self.was_reported:  # a fall widens the noise of its own lines, not of those before
            self.noise = max(self.noise, self.earlier.spread, SAME * abs(self.best))
        return "fell" if self._is_below(SPREADS) else ""

    def _is_below(self, spreads: float) -> bool:
        return self.best is not None and self.reward.median < self.best - spreads * self.noise

    def _is_well(self) -> bool:
        return not self._is_below(1.0) and not self.zero.median >= MOST / 2

    def state(self) -> dict[str, Any]:
        windows = {name: getattr(self, name).values() for name in self.WINDOWS}
        return {**windows, "best": self.best, "noise": self.noise, "told": self.was_reported}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in self.WINDOWS:
            size = getattr(self, name).size
            setattr(self, name, Window(size, state.get(name, ())))
        self.best, self.noise, self.was_reported = state["best"], state["noise"], state["told"]


class KlBlowUp:
    """Reports that the divergence from the reference left its upper range and stays away.

    A policy that learns moves; what counts is ``FAR`` times the recent range, ``FEWEST`` lines in a
    row. It is reported again if it leaves the new level too.
    """

    KEYS = ("kl", "objective/kl")
    NEAR = 1.0
    """Nats; below it a policy has hardly moved."""

    def __init__(self, config: HealingConfig) -> None:
        self.values = UpperRange(FAR, FEWEST, floor=self.NEAR)

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        key = next((k for k in self.KEYS if k in logs), None)
        if key is None:
            return None
        value, usual = abs(float(logs[key])), self.values.level()
        if self.values.push(value) != FEWEST:
            return None
        return Finding(
            cause=Cause.KL_BLOWUP,
            step=step,
            bad_step=step,
            severity=Severity.WARN,
            evidence={
                "kl": value,
                "usual": usual,
                "advice": "raise beta, lower the LR, or take more prompts per step",
            },
        )

    def state(self) -> dict[str, Any]:
        return {"values": self.values.values.values(), "streak": self.values.streak}

    def load_state(self, state: dict[str, Any]) -> None:
        if "values" in state:  # else of version 0.1: learned again
            self.values.load(state["values"], state["streak"])
