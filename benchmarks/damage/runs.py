"""One training, damaged or not, under one protection."""

import importlib.util
import math
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.damage.families import Training
from benchmarks.damage.kinds import Kind, Striker
from benchmarks.healed_runs import Events, cause_of_end, quiet_healer

MAX_NORM = 1.0
MODES = ("run", "loop")
OLDER, ARC = "older", "ARC"
PROTECTIONS = ("none", "clip", OLDER, ARC, "heal")
Batches = list[Any]


def is_installed(protection: str) -> bool:
    """Return whether a protection can be measured here."""
    return protection != ARC or importlib.util.find_spec("arc") is not None


@dataclass
class Ended:
    """How one run ended.

    Attributes:
        loss: held out; NaN if the model is broken.
        died: what ended it before its time; empty if nothing did.
        detected: the step at which something was first reported, from the damage on.
        reports: how often each cause was reported.
        batches: those of the steps that counted, as they were before any damage to them.
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
    batches: Batches | None = None

    def to_json(self) -> dict[str, Any]:
        values = asdict(replace(self, batches=None))
        del values["batches"]
        return {**values, "loss": self.loss if math.isfinite(self.loss) else None}


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


def under_arc(training: Training, striker: Striker, steps: int) -> Ended:
    """Train under ARC's controller with its default settings."""
    import arc

    controller = arc.Controller(training.model, training.optimizer, verbose=False)
    reports: Counter[str] = Counter()
    detected, died = None, ""
    warnings.simplefilter("ignore")  # that it cannot heal something: the table says so
    try:
        for step, batch in enumerate(islice(striker.loader(), steps)):
            striker.before_attempt()
            loss = training.train_step(batch)
            loss.backward()
            action = controller.step(loss)
            if action.failure_type is not None or action.rolled_back:
                reports[str(action.failure_type)] += 1
                if detected is None and step >= striker.at:
                    detected = step
            if not action.should_skip:
                training.optimizer.step()
            training.optimizer.zero_grad()
    except Exception as error:
        died = cause_of_end(error)
    return Ended(
        training.evaluate(),
        died,
        detected,
        rollbacks=controller.total_rollbacks,
        reports=dict(reports),
        keeps_last_good=striker.ends_with_last_good(),
    )


class Counted:
    """Keeps the batch of each step; one of a step that was undone makes way for the next."""

    def __init__(self, healer: Any, training: Training) -> None:
        self._healer, self._training = healer, training
        self._of_step: dict[int, Any] = {}

    def train_step(self, batch: Any) -> Tensor:
        """As that of the training."""
        self._of_step[self._healer.last_step + 1] = batch
        return self._training.train_step(batch)

    def batches(self) -> Batches:
        """Return the batches of the steps that counted."""
        return [self._of_step[step] for step in sorted(self._of_step)]


def healed(training: Training, striker: Striker, steps: int, mode: str, **settings: Any) -> Ended:
    """Train under a Healer: by ``healer.run``, or in a hand-written loop."""
    died = ""
    with tempfile.TemporaryDirectory() as folder:
        healer = quiet_healer(training.model, training.optimizer, run_dir=Path(folder), **settings)
        counted = Counted(healer, training)
        train = _by_run if mode == "run" else _by_hand
        try:
            train(healer, training._replace(train_step=counted.train_step), striker, steps)
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
        [striker.undamaged(batch) for batch in counted.batches()],
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
    if protection == ARC:
        return under_arc(training, striker, steps)
    return bare(training, striker, steps, MAX_NORM if protection == "clip" else None)
