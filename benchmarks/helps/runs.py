"""One training, watched or healed, and what is kept of it."""

import itertools
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.helps.alarms import ALARMS, FIRST_LOOK, LOOK_STEPS, Alarm, Watched
from benchmarks.helps.families import STEPS, make
from benchmarks.helps.faults import INSTANT, SlowFault, doubled_at
from heal import Healer, HealingConfig
from heal.actions import HealingError, Plan, Rollback, Skip, changes_training
from heal.causes import Family
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.lab.forecast.features import CHECK_INTERVAL
from heal.lab.probes import Anchor, AnchoredRecovery
from heal.testing import Chaos

NOTHING = "nothing"
CURES: dict[str, HealingConfig] = {
    "bare healer": HealingConfig(),
    "more checks": HealingConfig(check_interval=CHECK_INTERVAL),  # as the forecast has them
    "forecast": HealingConfig(forecast=True),
    "EWC, Fisher": HealingConfig(),
    "EWC, uniform": HealingConfig(),
}
"""By name, with the settings of each; all else is as by default."""
ANCHOR_STRENGTH, ANCHOR_STEPS = 10.0, 100
DIGITS = 4  # of a score, in the file of results

Told = dict[str, Any]
Key = tuple[str, str, str, int]  # variant, family, fault, seed
Job = tuple[str, str, int, tuple[str, ...]]  # family, fault, seed, variants that share a training


class Broken:
    """A training under a Healer, with a fault in it.

    Attributes:
        losses: of the data, by attempt.
        told: attempt, cause and whether training was changed, of all that the healer spoke of.
        lost: steps undone, refused, or never done.
    """

    def __init__(self, family: str, fault: str, seed: int, config: HealingConfig) -> None:
        self.training, self.probed = make(family, seed)
        self.healer = Healer(
            self.training.model,
            self.training.optimizer,
            self.training.scheduler,
            config,
            sleep=lambda seconds: None,
            clock=partial(next, itertools.count(0.0)),  # a busy machine must raise no alarm
        )
        self.healer.exits.dismiss()
        self.slow = SlowFault(fault, self.training, seed)
        struck = [INSTANT[fault]] if fault in INSTANT else []
        self.chaos = Chaos(self.healer, struck, seed)
        self.losses: list[float] = []
        self.told: list[tuple[int, str, bool]] = []
        self.lost = 0

    def train(self, step: Any, acts: bool, on_step: Any = None) -> tuple[bool, float]:
        """Train to the end or to the halt; return whether it halted, and CPU seconds per attempt.

        Args:
            step: that of the training, or what was wrapped around it: free of side effects.
            acts: whether the healer may do what it plans.
            on_step: called after every step.
        """

        def attempt(batch: Any) -> Tensor:
            self.slow.begin(self.healer.attempts - 1)
            loss: Tensor = step(batch)
            self.losses.append(float(loss.detach()))
            return loss

        def note(diagnosis: Diagnosis, plan: Plan) -> Plan | None:
            at = self.healer.attempts - 1
            self.told.append((at, diagnosis.cause.value, changes_training(plan)))
            if not acts:
                return None if diagnosis.family is Family.STOP else ()
            for action in plan:
                if isinstance(action, Rollback):
                    self.lost += max(0, self.healer.last_step + 1 - action.before_step)
                elif isinstance(action, Skip):
                    self.lost += 1
            return None

        self.healer.on_instability(note)
        halted, began = False, time.process_time()
        try:
            self.healer.run(
                self.chaos.wrap(attempt),
                self.training.loader,
                STEPS,
                progress=False,
                on_step=on_step,
            )
        except HealingError as halt:
            if halt.exit_code == ExitCode.PREEMPTED:  # a signal to the benchmark, not to the run
                raise KeyboardInterrupt from halt
            halted = True
            self.lost += STEPS - 1 - self.healer.last_step
        return halted, (time.process_time() - began) / max(1, self.healer.attempts)

    def final_loss(self) -> float | None:
        """Return the held-out loss; None if the weights are not finite."""
        loss = self.training.evaluate()
        return loss if math.isfinite(loss) else None


def run_one(job: Job) -> dict[Key, Told]:
    """Do one training; return what is kept of it, for each of its variants."""
    torch.set_num_threads(1)
    family, fault, seed, variants = job
    if variants[0] in CURES:
        told = {variants[0]: healed(family, fault, seed, variants[0])}
    else:
        told = watched(family, fault, seed, [v for v in variants if v != NOTHING])
    return {(v, family, fault, seed): told[v] for v in variants}


def watched(family: str, fault: str, seed: int, alarms: Sequence[str]) -> dict[str, Told]:
    """Train with a healer that clips, refuses and watches but may not heal, beside some alarms.

    Returns:
        What each alarm said, by its name, and under ``NOTHING`` what became of the run.
    """
    run = Broken(family, fault, seed, HealingConfig())
    made = run.training
    seen = Watched(made.model, made.optimizer, made.train_step, run.probed, run.losses)
    looking: dict[str, Alarm] = {name: ALARMS[name].make(seen) for name in alarms}
    scores: dict[str, list[float | None]] = {name: [] for name in alarms}
    seconds = dict.fromkeys(alarms, 0.0)

    def on_step(step: int) -> None:
        is_due = step >= FIRST_LOOK and step % LOOK_STEPS == 0
        for name, alarm in looking.items():
            began = time.process_time()
            alarm.follow()
            if is_due:
                scores[name].append(_rounded(alarm.look()))
            seconds[name] += time.process_time() - began

    run.train(made.train_step, acts=False, on_step=on_step)
    loss = run.final_loss()
    told: dict[str, Told] = {NOTHING: {"doubled": doubled_at(run.losses), "loss": loss}}
    for name in alarms:
        told[name] = {"scores": scores[name], "cpu": seconds[name] / STEPS, "loss": loss}
    return told


def healed(family: str, fault: str, seed: int, cure: str) -> Told:
    """Train under a healer that acts, with one piece more or none."""
    run = Broken(family, fault, seed, CURES[cure])
    step: Any = run.training.train_step
    if cure.startswith("EWC"):
        recovery = AnchoredRecovery(run.healer, ANCHOR_STRENGTH, ANCHOR_STEPS)
        if cure == "EWC, uniform":
            recovery.make_anchor = uniform_anchor
        step = recovery.wrap(step)
    halted, cpu = run.train(step, acts=True)
    return {
        "told": run.told,
        "doubled": doubled_at(run.losses),
        "lost": run.lost,
        "halted": halted,
        "cpu": cpu,
        "loss": run.final_loss(),
    }


def uniform_anchor(model: Any, fisher: dict[str, Tensor], strength: float) -> Anchor:
    """Return an anchor that is as strong on the whole, but alike for every weight."""
    count = sum(f.numel() for f in fisher.values())
    mean = sum(float(f.sum()) for f in fisher.values()) / count
    return Anchor(model, {n: f * 0.0 + mean for n, f in fisher.items()}, strength)


def _rounded(score: float) -> float | None:
    """Return a score as it is kept; what is not a number is no alarm."""
    return None if math.isnan(score) else float(f"{score:.{DIGITS}g}")
