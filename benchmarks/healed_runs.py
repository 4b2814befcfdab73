"""What the benchmarks of healing share: streams of batches, quiet healers, and their journals.

Only heal's public interface is used, so that the same benchmark runs on any version of it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from heal import Healer, HealingConfig

ROUTINE = {"started", "goal", "note", "resumed", "checkpoint"}
"""Events of the journal that any healthy run has."""


PREEMPTED = 75  # exit code of a run that a signal stopped


class Stream:
    """A loader of ``steps`` batches, each made from its number and one generator.

    Args:
        steps: batches of one pass.
        make: takes the number of the batch and a generator, and returns the batch.
        seed: of the generator; every pass begins with it, so that each has the same batches.
    """

    def __init__(self, steps: int, make: Callable[[int, Generator], Any], seed: int) -> None:
        self.steps, self.make, self.seed = steps, make, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        for step in range(self.steps):
            yield self.make(step, generator)


def quiet_healer(
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    run_dir: Path,
    **settings: Any,
) -> Healer:
    """Return a healer that never sleeps and whose clock a busy machine cannot disturb."""
    return Healer(
        model,
        optimizer,
        scheduler,
        HealingConfig(**settings),
        run_dir=run_dir,
        sleep=lambda seconds: None,
        clock=partial(next, itertools.count(0.0)),
    )


def cause_of_end(error: Exception) -> str:
    """Return what ended a run; a signal to the benchmark, which healing turns into a halt, is none.

    Raises:
        KeyboardInterrupt: the benchmark was told to stop.
    """
    if getattr(error, "exit_code", None) == PREEMPTED:
        raise KeyboardInterrupt from error
    return f"{type(error).__name__}: {error}"


class Events:
    """What a journal says happened.

    Args:
        run_dir: of the run; without a journal in it nothing happened.

    Attributes:
        counts: how many events there are of each kind.
        reports: recoveries and alerts, in order.
        rollbacks: how many plans returned to a snapshot.
        lr_changes: how many plans scaled the learning rate.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        self.counts = Counter(event["event"] for event in events)
        self.reports = [event for event in events if event["event"] in ("recovery", "alert")]
        actions = Counter(
            step["action"] for event in self.reports for step in event.get("plan", [])
        )
        self.rollbacks, self.lr_changes = actions["Rollback"], actions["ScaleLr"]
        self.notes = [event["text"] for event in events if event["event"] == "note"]

    def first_report(self, since: int) -> int | None:
        """Return the step at which something was first reported, from ``since`` on."""
        noticed = [event.get("noticed_at", event["step"]) for event in self.reports]
        return min((step for step in noticed if step >= since), default=None)

    def causes(self) -> Counter[str]:
        """Return how often each cause was reported."""
        return Counter(event["failure"] for event in self.reports)

    def beyond_routine(self) -> Counter[str]:
        """Return the counts of everything a healthy run need not have."""
        return Counter({kind: n for kind, n in self.counts.items() if kind not in ROUTINE})
