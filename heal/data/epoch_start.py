"""What the order of an epoch hangs on: generators, and the epoch that samplers were told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heal.state.rng import RngState


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What an epoch's order hangs on: the generators just before ``iter(loader)``."""

    rng: RngState
    generators: tuple[Any, ...]
    sampler_epoch: int | None
    other_epochs: tuple[tuple[str, int], ...] = ()
    """What others than the sampler were told by ``set_epoch``; not in the first checkpoints."""

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of everyone who was told it, by the place in the loader."""
        told = {} if self.sampler_epoch is None else {"sampler": self.sampler_epoch}
        return {**told, **dict(self.other_epochs)}


def generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers own, each once."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if g is not None}.values())


def generator_states(loader: Any) -> tuple[Any, ...]:
    """Return how the generators that a loader and its samplers own are now."""
    return tuple(g.get_state() for g in generators(loader))


def set_generators(loader: Any, states: tuple[Any, ...]) -> None:
    """Have the generators of a loader go on from what :func:`generator_states` returned."""
    for generator, state in zip(generators(loader), states, strict=True):
        generator.set_state(state)


def start_of(loader: Any) -> EpochStart:
    """Return how an epoch over the loader would begin now."""
    epochs = {place: owner.epoch for place, owner in _epoch_owners(loader).items()}
    own = epochs.pop("sampler", None)
    return EpochStart(RngState.now(), generator_states(loader), own, tuple(epochs.items()))


def _epoch_owners(loader: Any) -> dict[str, Any]:
    """Return who is told the epoch and tells what it was, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "sampler of batch_sampler": getattr(batch_sampler, "sampler", None),
        "dataset": getattr(loader, "dataset", None),
    }
    found: dict[int, tuple[str, Any]] = {}
    for place, owner in places.items():
        knows = isinstance(getattr(owner, "epoch", None), int)
        if knows and callable(getattr(owner, "set_epoch", None)):
            found.setdefault(id(owner), (place, owner))
    return dict(found.values())


def set_epochs(loader: Any, epochs: Mapping[str, int]) -> None:
    """Tell those in these places of a loader their epoch, if it is news to them."""
    for place, owner in _epoch_owners(loader).items():
        # A dataset may have much to do when it is told.
        if place in epochs and owner.epoch != epochs[place]:
            owner.set_epoch(epochs[place])


def advance_epochs(loader: Any, start: EpochStart, following: EpochStart | None) -> None:
    """Do between two epochs what the user's loop did when these came for the first time.

    Args:
        loader: of both.
        start: how the first of them began.
        following: how the second did; None if that was in another process.
    """
    if following is not None:
        set_epochs(loader, following.epochs)
    else:
        set_epochs(loader, {place: epoch + 1 for place, epoch in start.epochs.items()})


def tell_next_epoch(loader: Any, before: EpochStart) -> None:
    """Tell those who were not told otherwise since an epoch began that the next one does."""
    owners = _epoch_owners(loader)
    waiting = {p: e + 1 for p, e in before.epochs.items() if p in owners and owners[p].epoch == e}
    set_epochs(loader, waiting)


def return_to(loader: Any, start: EpochStart) -> None:
    """Have the next epoch begin like an earlier one."""
    start.rng.put_back()
    set_generators(loader, start.generators)
    set_epochs(loader, start.epochs)
