"""What the order of an epoch hangs on: generators, and the epoch that a sampler was told."""

from dataclasses import dataclass
from typing import Any

from heal.state.rng import RngState


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What an epoch's order hangs on: the generators just before ``iter(loader)``."""

    rng: RngState
    generators: tuple[Any, ...]
    sampler_epoch: int | None


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
    return EpochStart(RngState.now(), generator_states(loader), _sampler_epoch(loader))


def _sampler_epoch(loader: Any) -> int | None:
    sampler = getattr(loader, "sampler", None)
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def advance_sampler(loader: Any, start: EpochStart | None) -> None:
    """Do between two epochs what the user's loop did when these came for the first time."""
    if start is not None and start.sampler_epoch is not None:
        loader.sampler.set_epoch(start.sampler_epoch + 1)


def return_to(loader: Any, start: EpochStart) -> None:
    """Have the next epoch begin like an earlier one."""
    start.rng.put_back()
    set_generators(loader, start.generators)
    if start.sampler_epoch is not None:
        loader.sampler.set_epoch(start.sampler_epoch)
