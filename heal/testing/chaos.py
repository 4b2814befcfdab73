"""Breaks a run on purpose: faults by step or by rate, seeded, for drills and tests.

Each fault strikes a set number of times, by the count of attempts, so that a step which is repeated
after a rollback is not hit again.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heal.micro_batch import TrainStep
from heal.testing.faults import KINDS, BatchFault, Fault, NothingToBreak, Strike

if TYPE_CHECKING:
    from heal.healer import Healer


class BrokenLoader:
    """Passes on what a loader gives, except where ``check_batch`` raises."""

    def __init__(self, loader: Any, check_batch: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._check_batch = check_batch

    def __iter__(self) -> Iterator[Any]:
        """Unlike a generator, ``map`` goes on after an error, as DataLoader's iterators do."""
        return map(self._check_batch, iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        """Samplers, generators and the like are the loader's own."""
        return getattr(self._loader, name)


class Chaos:
    """Strikes a run that is trained by a Healer.

    Args:
        healer: whose run is broken.
        faults: what to do, and when.
        seed: of the choice of tensors, elements and attempts; the run's own generators are not
            touched.

    Attributes:
        healer: the same.
        strikes: what happened so far. A fault that found nothing to change did not happen, nor did
            one after a fault that raised at the same attempt.

    Example:
        >>> chaos = Chaos(healer, [Fault("nan_gradient", at=100), Fault("bad_batch", rate=0.01)])
        >>> healer.run(chaos.wrap(train_step), chaos.wrap_loader(loader), steps=1000)
    """

    def __init__(self, healer: "Healer", faults: Sequence[Fault], seed: int = 0) -> None:
        self.strikes: list[Strike] = []
        self.healer = healer
        self._faults = list(faults)
        self._random = random.Random(seed)
        self._seed = seed
        self._attempt = -1
        self._batch = -1

    def wrap(self, train_step: TrainStep) -> TrainStep:
        """Return ``train_step`` with faults; those between steps strike before it runs."""

        def broken(batch: Any) -> Tensor:
            later: list[tuple[Strike, Callable[[Tensor], Tensor]]] = []
            for fault in self._due_now():
                strike = self._note(fault, self._attempt)  # now, because it may raise
                try:
                    change = KINDS[fault.kind](self, fault)
                    if isinstance(change, BatchFault):
                        batch = change.apply(batch)
                except NothingToBreak:
                    self.strikes.pop()
                    continue
                if callable(change):
                    self.strikes.pop()
                    later.append((strike, change))
            loss = train_step(batch)
            for strike, change in later:
                loss = change(loss)
                self.strikes.append(strike)
            return loss

        return broken

    def wrap_loader(self, loader: Any) -> "BrokenLoader":
        """Return the loader with the faults of kind "loader_error"."""
        return BrokenLoader(loader, self._check_batch)

    def _check_batch(self, batch: Any) -> Any:
        """Count a batch that was drawn; one that should fail is lost, as a torn sample's would."""
        self._batch += 1
        for fault in self._due(self._batch, in_loader=True):
            self._note(fault, self._batch)
            raise ValueError(f"injected: sample of batch {self._batch} is torn ({fault.kind})")
        return batch

    @property
    def not_struck(self) -> list[Fault]:
        """The faults meant for this rank that did not happen, not even once."""
        struck = {id(strike.fault) for strike in self.strikes}
        return [f for f in self._faults if id(f) not in struck and self._is_here(f)]

    def _due_now(self) -> list[Fault]:
        """The faults of a new attempt; further pieces or batches of the same one have none."""
        counted = self.healer.attempts
        if not counted:  # a hand-written loop: every call is an attempt
            self._attempt += 1
        elif counted - 1 > self._attempt:
            self._attempt = counted - 1
        else:
            return []
        return self._due(self._attempt, in_loader=False)

    def _due(self, attempt: int, in_loader: bool) -> list[Fault]:
        """Those whose turn it is. All draw, whatever strikes: ranks draw the same numbers."""
        due = []
        for fault in self._faults:
            if (fault.kind == "loader_error") is not in_loader:
                continue
            if fault.at is None:
                strikes = self._random.random() < fault.rate
            else:
                strikes = fault.at <= attempt < fault.at + fault.times
            if strikes and self._is_here(fault):
                due.append(fault)
        return due

    def _note(self, fault: Fault, attempt: int) -> Strike:
        self.strikes.append(Strike(fault, attempt, self.healer.last_step + 1))
        return self.strikes[-1]

    def _is_here(self, fault: Fault) -> bool:
        """Ranks draw the same numbers; where a fault strikes is decided after."""
        chosen = 0 if fault.rank is None and fault.kind == "slow_rank" else fault.rank
        return chosen is None or chosen == self.healer.journal.rank

    def parameter(self) -> Tensor:
        """Choose a trainable parameter with more than one element."""
        params = [p for p in self.healer.model.parameters() if p.requires_grad and p.numel() > 1]
        return self._random.choice(params)

    def element(self, tensor: Tensor) -> int:
        """Choose an element."""
        return self._random.randrange(tensor.numel())

    def since(self, fault: Fault) -> int:
        """Return how many attempts ago a fault struck first; 0 for one that strikes by rate."""
        return 0 if fault.at is None else self._attempt - fault.at

    def generator(self) -> torch.Generator:
        """Return a generator for this attempt: the run's own are not touched."""
        return torch.Generator().manual_seed((self._seed << 32) + self._attempt)
