"""Reinforcement that lost its signal, or its bearings: rewards of groups, distance to the policy.

Fed from the trainer's log. Alerts only.
"""

from collections.abc import Mapping
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window

REWARD = "reward"


class RewardCollapse:
    """Tells once that groups of answers get one and the same reward, or that rewards fell.

    Advantages within a group are then zero and the gradient is noise. Some such groups are usual.
    """

    LINES, LONG = 20, 100
    ZERO_SHARE = 0.9  # of the groups without any difference, in the median line
    NO_SPREAD = 1e-6
    WINDOWS = ("zero", "std", "reward", "wander")
    SPREADS = 1.9
    """Spreads of single rewards by which their median must fall below the best: seven deviations of
    its own. 400 runs of 1,000 lines with correlated noise had no false alarm at 1.6, one at 1.5."""

    def __init__(self, config: HealingConfig) -> None:
        self.zero = Window(self.LINES)
        self.std = Window(self.LINES)
        self.reward = Window(self.LINES)
        self.wander = Window(self.LONG)  # rewards too; those of easy and hard prompts come and go
        self.best: float | None = None
        self.noise = 0.0  # the largest spread of rewards while they were well
        self.told = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        if REWARD not in logs:
            return None
        self.reward.push(float(logs[REWARD]))
        self.wander.push(float(logs[REWARD]))
        for window, key in ((self.zero, "frac_reward_zero_std"), (self.std, "reward_std")):
            if key in logs:
                window.push(float(logs[key]))
        if len(self.reward) < self.LINES:
            return None
        how = self._how()
        if not how or self.told:
            # Told again only after rewards were well again: the fall itself widens the noise.
            self.told = self.told and not self._is_well()
            return None
        self.told = True
        return Finding(
            cause=Cause.REWARD_COLLAPSE,
            step=step,
            bad_step=step,
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
        before, self.best = self.best, max(median if self.best is None else self.best, median)
        if len(self.zero) == self.LINES and self.zero.median >= self.ZERO_SHARE:
            return "no spread"
        if len(self.std) == self.LINES and self.std.median < self.NO_SPREAD:
            return "no spread"
        if before is not None and median < before - self.SPREADS * self.noise:
            return "fell"
        if not self.told:
            spread = max(self.reward.spread, self.wander.spread)
            self.noise = max(self.noise, spread, self.NO_SPREAD)
        return ""

    def _is_well(self) -> bool:
        fell = self.best is not None and self.reward.median < self.best - self.noise
        return not fell and not self.zero.median >= self.ZERO_SHARE / 2

    def state(self) -> dict[str, Any]:
        windows = {name: getattr(self, name).values() for name in self.WINDOWS}
        return {**windows, "best": self.best, "noise": self.noise, "told": self.told}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in self.WINDOWS:
            size = getattr(self, name).size
            setattr(self, name, Window(size, state.get(name, ())))
        self.best, self.noise, self.told = state["best"], state["noise"], state["told"]


class KlBlowUp:
    """Tells once that the divergence from the reference left its usual level and stays away."""

    KEYS = ("kl", "objective/kl")
    USUAL, RECENT = 50, 5
    FACTOR = 10.0
    FLOOR = 1.0  # nats; below it a policy has hardly moved

    def __init__(self, config: HealingConfig) -> None:
        self.usual = Window(self.USUAL)
        self.recent = Window(self.RECENT)
        self.told = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        key = next((k for k in self.KEYS if k in logs), None)
        if key is None:
            return None
        value = abs(float(logs[key]))
        level = max(self.FACTOR * self.usual.quantile(0.75), self.FLOOR) if self.usual else None
        self.recent.push(value)
        if level is None or value <= level:
            self.usual.push(value)  # what blew up must not become the usual
        if level is None or len(self.usual) < self.RECENT or len(self.recent) < self.RECENT:
            return None
        if self.recent.quantile(0.0) <= level:
            self.told = False
            return None
        if self.told:
            return None
        self.told = True
        return Finding(
            cause=Cause.KL_BLOWUP,
            step=step,
            bad_step=step,
            severity=Severity.WARN,
            evidence={
                "kl": self.recent.median,
                "usual": self.usual.median,
                "advice": "raise beta, lower the LR, or take more prompts per step",
            },
        )

    def state(self) -> dict[str, Any]:
        return {"usual": self.usual.values(), "recent": self.recent.values(), "told": self.told}

    def load_state(self, state: dict[str, Any]) -> None:
        self.usual = Window(self.USUAL, state["usual"])
        self.recent = Window(self.RECENT, state["recent"])
        self.told = state["told"]
