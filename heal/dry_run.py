"""Tries a few steps and takes them back, to find mistakes before the long run does."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heal.data.loader_pass import loader_rewinder
from heal.data.split import own_copy
from heal.guarded_step import GuardedStep
from heal.micro_batch import TrainStep
from heal.training_state import RngState, TrainingState
from zclip import Mailbox


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """What a dry run found. ``problems`` is empty if training can begin."""

    losses: list[float] = field(default_factory=list)
    seconds_per_step: float = math.nan
    snapshot_bytes: int = 0
    trained: int = 0
    """Parameters that had a gradient."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems


def dry_run(
    state: TrainingState,
    guarded: GuardedStep,
    train_step: TrainStep,
    loader: Any,
    steps: int,
    accumulate: int,
) -> DryRunReport:
    """Take ``steps`` steps on the run itself and put back every byte, also if they fail.

    ``train_step`` holds the model that it was made with, so that a copy of the model would not
    be the one that it trains. Frozen weights are put back too, for a forward may write to them, as
    to a teacher's; meanwhile a copy of them is in host memory.

    Raises:
        ValueError: there is nothing to try.
    """
    if steps < 1 or accumulate < 1:
        raise ValueError(
            f"steps is {steps}, accumulate is {accumulate}; expected 1 or more of each"
        )
    if hasattr(loader, "__next__"):
        problem = "the loader is an iterator: what a dry run draws from it would be missing later"
        return DryRunReport(problems=[problem])
    rng = RngState.now()
    rewind = loader_rewinder(loader)
    saved = {key: tensor.detach().clone() for key, tensor in state.everything().items()}
    untrained = [p for p in state.parameters() if not state.is_trainable(p)]
    frozen = [(p, p.detach().to("cpu", copy=True)) for p in untrained]
    modes = [(module, module.training) for module in state.model.modules()]
    values = state.values()
    grads = [(p, p.grad) for p in state.parameters()]
    counts = [(o, o.steps) for o in guarded.optimizers]
    mailbox, posted = guarded.mailbox, guarded.posted
    guarded.mailbox = Mailbox(mailbox.lag, mailbox.width, mailbox.room)  # letters of the run stay
    report = DryRunReport(snapshot_bytes=sum(t.nbytes for t in saved.values()))
    try:
        return _attempt(report, guarded, train_step, loader, steps, accumulate, grads)
    finally:
        for param, grad in grads:
            param.grad = grad
        for param, weights in frozen:
            param.data.copy_(weights)  # through .data: else it would pass for one that is trained
        for module, mode in modes:
            module.training = mode
        state.restore(saved, values)
        for optimizer, count in counts:
            optimizer.steps = count
        guarded.mailbox, guarded.posted = mailbox, posted
        rewind()
        rng.put_back()


def _attempt(
    report: DryRunReport,
    guarded: GuardedStep,
    train_step: TrainStep,
    loader: Any,
    steps: int,
    accumulate: int,
    grads: Sequence[tuple[Tensor, Tensor | None]],
) -> DryRunReport:
    losses: list[float] = []
    problems: list[str] = []
    trained = 0
    began = time.perf_counter()
    try:
        batches = iter(loader)
        for step in range(steps):
            for param, _ in grads:
                param.grad = None  # taken out, not zeroed: the gradients that were there stay whole
            total = 0.0
            for _ in range(accumulate):
                loss = train_step(own_copy(next(batches)))
                problems += _problems_of(loss)
                if problems:
                    return DryRunReport(problems=problems)
                scaled = loss if guarded.scaler is None else guarded.scaler.scale(loss)
                (scaled / accumulate).backward()
                total += float(loss.detach()) / accumulate
            trained = sum(p.grad is not None for p, _ in grads)
            guarded.step(step, torch.tensor(total))
            losses.append(total)
    except StopIteration:
        problems.append(f"the loader has fewer than {steps * accumulate} batches")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    if not all(math.isfinite(loss) for loss in losses):
        problems.append(f"losses are not finite: {losses}")
    if losses and not trained:
        problems.append("no parameter has a gradient")
    seconds = (time.perf_counter() - began) / max(1, len(losses))
    return DryRunReport(losses, seconds, report.snapshot_bytes, trained, problems)


def _problems_of(loss: Any) -> list[str]:
    if not isinstance(loss, Tensor):
        return [f"train_step returned {type(loss).__name__}; expected the loss, a tensor"]
    if loss.numel() != 1:
        return [f"train_step returned a tensor of shape {tuple(loss.shape)}; expected one number"]
    if not loss.requires_grad:
        return ["the loss does not depend on any parameter that is trained"]
    return []
