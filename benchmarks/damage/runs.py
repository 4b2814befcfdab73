"""One training, damaged or not, under one protection."""

import math
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.damage.families import Training
from benchmarks.damage.kinds import Kind, Striker
from benchmarks.healed_runs import Events, cause_of_end, quiet_healer

MAX_NORM = 1.0
MODES = ("run", "loop")
PROTECTIONS = ("none", "clip", "heal")


@dataclass
class Ended:
    """How one run ended.

    Attributes:
        loss: held out; NaN if the model is broken.
        died: what ended it before its time; empty if nothing did.
        detected: the step at which something was first reported, from the damage on.
        reports: how often each cause was reported.
        keeps_last_good: whether the weights are those from right before the damage.
    """

    loss: float
    died: str = ""
    detected: int | None = None
    rollbacks: int = 0
    lr_changes: int = 0
    experiments: int = 0
    reports: dict[str, int] | None = None
    keeps_last_good: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


def bare(training: Training, striker: Striker, steps: int, max_norm: float | None = None) -> Ended:
    """Train without healing, at most with ``clip_grad_norm_``."""
    for batch in islice(striker.loader(), steps):
        striker.before_attempt()
        loss = training.train_step(batch)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return Ended(training.evaluate(), keeps_last_good=striker.ends_with_last_good())


def healed(training: Training, striker: Striker, steps: int, mode: str, **settings: Any) -> Ended:
    """Train under a Healer: by ``healer.run``, or in a hand-written loop."""
    died = ""
    with tempfile.TemporaryDirectory() as folder:
        healer = quiet_healer(training.model, training.optimizer, run_dir=Path(folder), **settings)
        train = _by_run if mode == "run" else _by_hand
        try:
            train(healer, training, striker, steps)
        except Exception as error:  # a halt, or what it could not heal: the run is at its end
            died = cause_of_end(error)
        events = Events(Path(folder))
    return Ended(
        training.evaluate(),
        died,
        events.first_report(striker.at),
        events.rollbacks,
        events.lr_changes,
        events.counts["experiment"],
        dict(events.causes()),
        striker.ends_with_last_good(),
    )


def _by_run(healer: Any, training: Training, striker: Striker, steps: int) -> None:
    striker.before_attempt()
    healer.run(
        training.train_step,
        striker.loader(),
        steps,
        progress=False,
        on_step=lambda step: striker.before_attempt(),
    )


def _by_hand(healer: Any, training: Training, striker: Striker, steps: int) -> None:
    loader = striker.loader()
    striker.before_attempt()
    with healer:
        while healer.last_step + 1 < steps:
            for batch in healer.batches(loader):
                before = healer.last_step
                loss = training.train_step(batch)
                loss.backward()
                healer.step(loss)
                training.optimizer.zero_grad()
                if healer.last_step != before:  # not so if the batch was only tried out
                    striker.before_attempt()
                if healer.last_step + 1 >= steps:
                    break


def train(
    training: Training,
    kind: Kind | None,
    seed: int,
    steps: int,
    protection: str,
    mode: str = "run",
    **settings: Any,
) -> Ended:
    """Train to the end under a protection, with damage or, where the kind is None, without."""
    torch.set_num_threads(1)
    at = 0 if kind is None else kind.starts_at(steps, seed)
    striker = Striker(kind, training, at, seed)
    if protection == "heal":
        return healed(training, striker, steps, mode, **settings)
    return bare(training, striker, steps, MAX_NORM if protection == "clip" else None)
