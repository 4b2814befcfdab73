"""What a set-up trains with: plain loops, or the same under a Healer.

A set-up is a function of a seed and a :class:`Bare` or :class:`Healed`; it trains and returns the
modules to compare. The same lines run in both, so that any difference is the healer's.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from benchmarks.healed_runs import Events, quiet_healer

LossOf = Callable[[Any], Tensor]


class BareSteps:
    """Steps optimizers and a scheduler; has the part of a Healer's interface that loops use."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.scheduler, self.last_step = scheduler, -1

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return iter(loader)

    def step(self, loss: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.last_step += 1


class Bare:
    """Trains without a healer."""

    def watch(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Any:
        """Return what has ``batches`` and ``step``, for a loop of the set-up's own."""
        return BareSteps(model, optimizer, scheduler)

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        loss_of: LossOf,
        scheduler: Any = None,
        accumulate: int = 1,
    ) -> None:
        """Train one pass over the loader, a step for every ``accumulate`` batches."""
        self._by_hand(
            self.watch(model, optimizer, scheduler), optimizer, loader, loss_of, accumulate
        )

    def _by_hand(
        self, steps: Any, optimizer: Any, loader: Any, loss_of: LossOf, accumulate: int
    ) -> None:
        for number, batch in enumerate(steps.batches(loader)):
            loss = loss_of(batch)
            (loss if accumulate == 1 else loss * (1 / accumulate)).backward()
            if accumulate == 1 or (number + 1) % accumulate == 0:
                steps.step(loss)
                optimizer.zero_grad()

    def __enter__(self) -> "Bare":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class Healed(Bare):
    """Trains under healers, and reads their journals afterwards.

    Args:
        mode: "loop", or "run" to have ``healer.run`` train the set-ups that need no loop of their
            own.
        settings: of every healer.

    Attributes:
        journals: one for each healer, once the block is left.
    """

    def __init__(self, mode: str = "loop", **settings: Any) -> None:
        self.mode, self.settings = mode, settings
        self.journals: list[Events] = []
        self._folder = tempfile.TemporaryDirectory()
        self._healers: list[tuple[Any, Path]] = []

    def watch(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Any:
        run_dir = Path(self._folder.name) / str(len(self._healers))
        healer = quiet_healer(model, optimizer, scheduler, run_dir=run_dir, **self.settings)
        self._healers.append((healer, run_dir))
        return healer

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        loss_of: LossOf,
        scheduler: Any = None,
        accumulate: int = 1,
    ) -> None:
        healer = self.watch(model, optimizer, scheduler)
        if self.mode == "run":
            steps = len(loader) // accumulate
            healer.run(loss_of, loader, steps, accumulate=accumulate, progress=False)
        else:
            self._by_hand(healer, optimizer, loader, loss_of, accumulate)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for healer, run_dir in self._healers:
            healer.close(error)
            self.journals.append(Events(run_dir))
        self._folder.cleanup()

    def events(self) -> Counter[str]:
        """Return what all journals say beyond routine."""
        return sum((journal.beyond_routine() for journal in self.journals), Counter())

    def changes(self) -> tuple[int, int]:
        """Return how many rollbacks and changes of the learning rate there were."""
        return (
            sum(journal.rollbacks for journal in self.journals),
            sum(journal.lr_changes for journal in self.journals),
        )

    def causes(self) -> Counter[str]:
        """Return how often each cause was reported."""
        return sum((journal.causes() for journal in self.journals), Counter())
