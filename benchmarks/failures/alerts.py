"""Failures that are told of and not healed: there is nothing to return to, or nothing to undo.

Each runs the same trainings as the others, with the trouble and without it.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.failures.families import BATCH, STEPS, Training, make
from benchmarks.failures.protections import SETTINGS
from heal import Healer, HealingConfig
from heal.causes import Cause

FLAT_STEPS = 80  # of 120 without progress; the default is 1000
SAMPLES, LONGER = 48, 400  # as many as a small network learns by heart, and how long that takes
NEAR = 0.95  # of the loss of pure chance
SLOWER = 5.0  # times as long, a step takes from the middle on

FIELDS = {
    "exit_reason",
    "exception_type",
    "last_step",
    "timestamp",
    "final_metrics",
    "recovery_actions",
    "running_time_seconds",
}
"""Of a postmortem, as the first seed names them."""


class NoCure(Exception):
    """What healing has never heard of."""


def plateau(family: str, seed: int, strikes: bool) -> bool:
    """Labels say nothing about their samples: the loss stays where chance has it."""
    training = make(family, seed)
    shuffled = torch.Generator().manual_seed(seed)
    classes = 1 + int(max(batch[1].max() for batch in training.loader))

    def train_step(batch: Any) -> Any:
        inputs, labels = batch
        if strikes:
            labels = torch.randint(classes, labels.shape, generator=shuffled)
        return training.train_step([inputs, labels])

    chance = math.log(classes)
    healer = _healer(training, plateau_steps=FLAT_STEPS)
    healer.run(train_step, training.loader, STEPS, progress=False)
    told = [d for _, d, _ in healer.history if d.cause is Cause.PLATEAU]
    # Those that end well lie flat as well, but lower.
    return any(d.evidence["loss"] > NEAR * chance for d in told)


def overfitting(family: str, seed: int, strikes: bool) -> bool:
    """A few samples, their labels exchanged, are learned by heart; evaluation is far worse."""
    training = make(family, seed)
    loader, steps = training.loader, STEPS
    if strikes:
        inputs, labels = (part[:SAMPLES] for part in loader.dataset.tensors)
        mixed = labels[torch.randperm(len(labels))]
        loader = DataLoader(TensorDataset(inputs, mixed), batch_size=BATCH, shuffle=True)
        steps = LONGER
        training.scheduler.lr_lambdas = [lambda step: 1.0]
    healer = _healer(training)
    healer.run(training.train_step, loader, steps, progress=False)
    healer.observe_eval(training.evaluate())
    return _told(healer, Cause.OVERFITTING)


def slow_steps(family: str, seed: int, strikes: bool) -> bool:
    """Steps take five times as long from the middle on, by a clock of ours."""
    training = make(family, seed)
    now = 0.0

    def train_step(batch: Any) -> Any:
        nonlocal now
        now += SLOWER if strikes and healer.last_step >= STEPS // 2 else 1.0
        return training.train_step(batch)

    healer = _healer(training, clock=lambda: now)
    healer.run(train_step, training.loader, STEPS, progress=False)
    return _told(healer, Cause.THROUGHPUT_COLLAPSE)


def crash(family: str, seed: int, strikes: bool) -> bool:
    """An error without a cure ends the run; the postmortem has every field, and the error."""
    training = make(family, seed)

    def train_step(batch: Any) -> Any:
        if strikes and healer.last_step == STEPS // 2:
            raise NoCure("not in any table")
        return training.train_step(batch)

    with tempfile.TemporaryDirectory() as folder:
        healer = Healer(
            training.model, training.optimizer, config=HealingConfig(**SETTINGS), run_dir=folder
        )
        try:
            healer.run(train_step, training.loader, STEPS, progress=False)
        except Exception as error:
            if "NoCure" not in repr(error) + repr(error.__cause__):
                raise
        postmortem = json.loads((Path(folder) / "postmortem.json").read_text())
    return set(postmortem) >= FIELDS and "NoCure" in str(postmortem["exception_type"])


ALERTS: dict[str, Callable[[str, int, bool], bool]] = {
    "labels at random (a plateau at chance, as DPO's at ln 2)": plateau,
    "few samples learned by heart (overfitting)": overfitting,
    "steps five times as slow": slow_steps,
    "an error without a cure (postmortem)": crash,
}


def alert_rows(seeds: int, families: Iterable[str]) -> Iterator[str]:
    """Run everything; yield the lines of the table."""
    yield "| failure | reported | reported without it |"
    yield "|---|---|---|"
    keys = [(family, seed) for family in families for seed in range(seeds)]
    for name, happens in ALERTS.items():
        struck, calm = (sum(happens(*key, strikes) for key in keys) for strikes in (True, False))
        yield f"| {name} | {struck}/{len(keys)} | {calm}/{len(keys)} |"


def _healer(training: Training, clock: Any = None, **settings: Any) -> Healer:
    healer = Healer(
        training.model,
        training.optimizer,
        training.scheduler,
        HealingConfig(**SETTINGS, **settings),
        **({} if clock is None else {"clock": clock}),
    )
    healer.exits.dismiss()
    return healer


def _told(healer: Healer, cause: Cause) -> bool:
    return any(diagnosis.cause is cause for _, diagnosis, _ in healer.history)
