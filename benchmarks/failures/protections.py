"""The same training under healing, nothing, plain clipping, and a monitor of the loss."""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.failures.families import STEPS, Training, make
from benchmarks.failures.rows import ROWS, Row, creeping
from heal import Healer, HealingConfig
from heal.actions import HealingError, Rollback, Skip, changes_training
from heal.testing import Chaos

SETTINGS: dict[str, Any] = {
    "snapshot_interval": 10,
    "quarantine_steps": 4,
    "check_interval": 5,
    "lr_ramp_steps": 20,
    "incident_steps": 20,
    "snapshot_memory_factor": 4.0,
}
"""For runs of 120 steps; the default settings are for runs of a thousand times that."""


class Ended(NamedTuple):
    """How one run ended."""

    loss: float  # held out; NaN if the model is broken
    detected: bool  # whether anything was told of it, be it a note in the journal
    lost: int  # steps that were done and undone, refused, or not done because the run died
    died: str  # what ended it before its time; empty if nothing did
    changed: bool  # whether training was changed, by more than a refusal


def healed(row: Row, family: str, seed: int) -> Ended:
    """Train under a Healer, with the clipping that it has by default."""
    training = make(family, seed)
    healer = Healer(
        training.model,
        training.optimizer,
        training.scheduler,
        HealingConfig(**SETTINGS),
        sleep=lambda seconds: None,
    )
    healer.exits.dismiss()
    chaos = Chaos(healer, row.faults, seed)
    lost = 0

    def count(diagnosis: Any, plan: Any) -> None:
        nonlocal lost
        for action in plan:
            if isinstance(action, Rollback):
                lost += max(0, healer.last_step + 1 - action.before_step)
            elif isinstance(action, Skip):
                lost += 1

    healer.on_instability(count)
    broken = chaos.wrap(training.train_step)

    def train_step(batch: Any) -> Any:
        creeping(row, training.scheduler, healer.attempts - 1)
        return broken(batch)

    died = ""
    try:
        healer.run(train_step, chaos.wrap_loader(training.loader), STEPS, progress=False)
    except (HealingError, Exception) as error:
        died = type(error).__name__
        lost += STEPS - 1 - healer.last_step
    changed = any(changes_training(plan) for _, _, plan in healer.history)
    return Ended(_evaluated(training), bool(healer.history), lost, died, changed)


def bare(row: Row, family: str, seed: int, max_norm: float | None = None) -> Ended:
    """Train with no protection, or with ``clip_grad_norm_`` alone."""
    training = make(family, seed)
    died, done = "", 0
    try:
        for batch, loss_of in _batches(row, training, seed):
            training.optimizer.zero_grad()
            loss = loss_of(batch)
            if not math.isfinite(float(loss.detach())) and math.isnan(training.evaluate()):
                died = "NaN"  # in the weights: no step to come can change that
                break
            loss.backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
            training.optimizer.step()
            training.scheduler.step()
            done += 1
    except Exception as error:
        died = type(error).__name__
    return Ended(_evaluated(training), False, STEPS - done, died, False)


def clipped(row: Row, family: str, seed: int) -> Ended:
    """Train with plain clipping to norm 1."""
    return bare(row, family, seed, max_norm=1.0)


MONITOR_INTERVAL, MONITOR_WINDOW, MONITOR_FACTOR, MONITOR_LR = 20, 20, 3.0, 0.5


def monitored(row: Row, family: str, seed: int) -> Ended:
    """Train with a monitor that sees the loss only.

    Every 20 steps it copies model, optimizer and scheduler. On a loss that is NaN, Inf or above
    three times the mean of the last 20 it returns to the copy and halves the learning rate.
    """
    training = make(family, seed)
    parts = (training.model, training.optimizer, training.scheduler)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    saved_at, done, lost, detected, died = 0, 0, 0, False, ""
    recent: deque[float] = deque(maxlen=MONITOR_WINDOW)
    try:
        for batch, loss_of in _batches(row, training, seed):
            training.optimizer.zero_grad()
            loss = loss_of(batch)
            value = float(loss.detach())
            usual = sum(recent) / len(recent) if len(recent) == MONITOR_WINDOW else math.inf
            if not math.isfinite(value) or value > MONITOR_FACTOR * usual:
                detected = True
                lost += done - saved_at
                for part, state in zip(parts, saved, strict=True):
                    part.load_state_dict(copy.deepcopy(state))
                training.scheduler.base_lrs = [b * MONITOR_LR for b in training.scheduler.base_lrs]
                saved[2]["base_lrs"] = list(training.scheduler.base_lrs)
                done = saved_at
                continue
            recent.append(value)
            loss.backward()
            training.optimizer.step()
            training.scheduler.step()
            done += 1
            if done % MONITOR_INTERVAL == 0:
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
                saved_at = done
    except Exception as error:
        died = type(error).__name__
        lost += STEPS - done
    return Ended(_evaluated(training), detected, lost, died, detected)


def _batches(row: Row, training: Training, seed: int) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield batches and the broken loss, one for each attempt, as many as there are steps."""
    optimizer = training.optimizer
    wrapped = SimpleNamespace(
        inner=optimizer, state=optimizer.state, param_groups=optimizer.param_groups
    )
    bystander: Any = SimpleNamespace(  # what chaos asks of a healer
        model=training.model,
        optimizers=[wrapped],
        attempts=0,
        last_step=-1,
        journal=SimpleNamespace(rank=0),
        newest_snapshot=lambda: None,
    )
    chaos = Chaos(bystander, row.faults, seed)
    loss_of, loader = chaos.wrap(training.train_step), chaos.wrap_loader(training.loader)
    attempt = 0
    while True:
        for batch in loader:
            creeping(row, training.scheduler, attempt)
            yield batch, loss_of
            attempt += 1
            if attempt == STEPS:
                return


def _evaluated(training: Training) -> float:
    try:
        return training.evaluate()
    except Exception:
        return math.nan


PROTECTIONS: dict[str, Callable[[Row, str, int], Ended]] = {
    "heal": healed,
    "none": bare,
    "clipping": clipped,
    "loss monitor": monitored,
}


def run_one(key: tuple[str, str, int, str]) -> tuple[tuple[str, str, int, str], dict[str, Any]]:
    """Do one run; the key names row, family, seed and protection."""
    torch.set_num_threads(1)
    row, family, seed, protection = key
    found = next(r for r in ROWS if r.name == row)
    return key, PROTECTIONS[protection](found, family, seed)._asdict()
