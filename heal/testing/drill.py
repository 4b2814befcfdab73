"""A drill: break a run on purpose, watch it heal, and tabulate what that cost."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from heal.actions import Plan, Rollback, Skip, SkipBatches
from heal.diagnose import Diagnosis
from heal.micro_batch import TrainStep
from heal.testing import Chaos, Fault, Strike

if TYPE_CHECKING:
    from heal.healer import Healer


STANDARD = (
    ("nan_gradient", 0.10, 1),
    ("loader_error", 0.16, 1),
    ("inf_gradient", 0.22, 1),
    ("oom_forward", 0.28, 2),
    ("bad_batch", 0.34, 1),
    ("corrupt_weight", 0.40, 1),
    ("exploding_gradient", 0.50, 1),
    ("reset_optimizer", 0.55, 1),
    ("nan_loss", 0.66, 6),
    ("lr_spike", 0.76, 1),
    ("network_error", 0.90, 1),
    ("oom_step", 0.94, 1),
)
"""A standard drill: kind, when as a share of the run, how often in a row."""


def standard_faults(steps: int, optimizers: Sequence[Optimizer] = ()) -> list[Fault]:
    """Return a dozen faults spread over a run of so many steps.

    If none of the optimizers counts its steps, as SGD does not, a reset is left out: momentum that
    was cleared has grown back before the next check.
    """
    can_see_reset = not optimizers or any(_counts_steps(optimizer) for optimizer in optimizers)
    return [
        Fault(kind, int(steps * at), times)
        for kind, at, times in STANDARD
        if kind != "reset_optimizer" or can_see_reset
    ]


def _counts_steps(optimizer: Optimizer) -> bool:
    """Whether an optimizer counts its steps, by the first of another one of its kind."""
    optimizer = getattr(optimizer, "inner", optimizer)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    try:
        alike = type(optimizer)([weight], **optimizer.defaults)
        alike.step()
    except Exception:  # such as an argument that is not among the defaults
        return True
    return "step" in alike.state[weight]


def parse_fault(word: str) -> Fault:
    """Return the fault of a word such as ``nan_gradient@100``, ``nan_loss@100x6`` or
    ``bad_batch~0.01``: a kind, then the attempt and how often in a row, or a rate.

    Raises:
        ValueError: the word is none of these.
    """
    parts = re.fullmatch(r"([^@~]*)(?:@([^x]*)(?:x(.*))?|~(.*))", word)
    if parts is None:
        expected = "kind@attempt, kind@attemptxtimes or kind~rate"
        raise ValueError(f"fault: expected {expected}, got {word!r}")
    kind, at, times, rate = parts.groups()
    try:
        return (
            Fault(kind, rate=float(rate)) if at is None else Fault(kind, int(at), int(times or 1))
        )
    except ValueError as error:
        raise ValueError(f"{word!r}: {error}") from None


@dataclass(slots=True)
class Outcome:
    """What became of one fault."""

    strike: Strike
    detected_at: int | None = None
    causes: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    seconds: float = 0.0
    undone_steps: int = 0
    skipped: list[int] = field(default_factory=list)

    @property
    def is_missed(self) -> bool:
        return self.detected_at is None

    @property
    def lost_steps(self) -> int:
        """Steps that were taken for nothing."""
        return self.undone_steps + len(self.skipped)

    def roll_back(self, here: int, before_step: int) -> None:
        """Count the steps that are undone, skipped ones among them once."""
        self.skipped = [step for step in self.skipped if step < before_step]
        self.undone_steps += max(0, here - before_step)

    def row(self) -> tuple[str, ...]:
        """The cells of a table: fault, struck at, detected at, cause, action, steps, seconds."""
        return (
            self.strike.fault.kind,
            str(self.strike.step),
            "-" if self.detected_at is None else str(self.detected_at),
            ", ".join(self.causes) or "-",
            ", ".join(self.actions) or ("missed" if self.is_missed else "noted"),
            str(self.lost_steps),
            f"{self.seconds:.2f}",
        )


COLUMNS = ("fault", "struck", "found", "diagnosis", "action", "lost", "seconds")
"""Struck and found are steps; lost counts steps."""


class Drill:
    """Runs a healer with faults, and attributes what it does to the fault before it.

    Args:
        healer: freshly made; its hook is used.
        faults: far enough apart to be distinguished.
        seed: of the choice of what is hit.

    Attributes:
        outcomes: one per fault, in the order in which they struck.
        missed: the kinds of faults that were not noticed.
        not_struck: the faults that did not happen.
        losses: number of the attempt and loss of each piece of a batch, a number or not.
    """

    def __init__(self, healer: "Healer", faults: Sequence[Fault], seed: int = 0) -> None:
        self.losses: list[tuple[int, Any]] = []
        self._healer = healer
        self._chaos = Chaos(healer, faults, seed)
        self._by_fault: dict[int, Outcome] = {}
        healer.on_instability(self._attribute)

    def run(self, train_step: TrainStep, loader: Any, steps: int, progress: bool = True) -> float:
        """Train to the end; return the seconds that it took.

        Weights and optimizer state are checked ten times as often as the settings say: faults are
        closer here than in a real run, and what one rollback undoes, no later check can find.

        Raises:
            HealingError: healing came to its end.
            ValueError: there is no step to take.
        """
        if steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {steps}")
        began = time.monotonic()
        self._healer.watch_closely(steps)

        def noted(batch: Any) -> Any:
            loss = train_step(batch)
            self.losses.append((self._healer.attempts - 1, loss.detach()))
            return loss

        broken, loader = self._chaos.wrap(noted), self._chaos.wrap_loader(loader)
        try:
            self._healer.run(broken, loader, steps, progress=progress)
        finally:
            seconds = time.monotonic() - began
            for outcome in self._note_strikes().values():
                outcome.seconds += outcome.lost_steps * seconds / max(1, self._healer.attempts)
        return seconds

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._by_fault.values())

    @property
    def missed(self) -> list[str]:
        return [outcome.strike.fault.kind for outcome in self.outcomes if outcome.is_missed]

    @property
    def not_struck(self) -> list[Fault]:
        return self._chaos.not_struck

    def _note_strikes(self) -> dict[int, Outcome]:
        """Make an outcome of every fault that struck, noticed or not."""
        for strike in self._chaos.strikes:
            self._by_fault.setdefault(id(strike.fault), Outcome(strike))
        return self._by_fault

    def _attribute(self, diagnosis: Diagnosis, plan: Plan) -> None:
        """Be the hook: agree with every plan, and attribute it to the newest fault."""
        outcomes = self._note_strikes()
        if not outcomes:
            return
        outcome = outcomes[id(self._chaos.strikes[-1].fault)]
        here = self._healer.last_step + 1
        if outcome.detected_at is None:
            outcome.detected_at = here
        if diagnosis.cause.value not in outcome.causes:
            outcome.causes.append(diagnosis.cause.value)
        for action in plan:
            name = type(action).__name__
            if name not in outcome.actions:
                outcome.actions.append(name)
            if isinstance(action, Rollback):
                outcome.roll_back(here, action.before_step)
            elif isinstance(action, Skip) or action == SkipBatches(here, here):
                outcome.skipped.append(diagnosis.step)
            outcome.seconds += float(getattr(action, "seconds", 0.0))
