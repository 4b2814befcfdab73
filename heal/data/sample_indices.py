"""Which samples of a dataset a batch was made of, found out after the fact."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from heal.data.epoch_start import EpochStart, generators, return_to
from heal.state.rng import RngState

OWN_VALUES = (str, bytes, list, tuple, dict, set, Tensor)
"""What a sampler may shuffle in place; other things that have a length are data, and not copied."""


def is_map_style(loader: Any) -> bool:
    """Return whether a loader looks samples up in its dataset, by indices of a sampler."""
    dataset = getattr(loader, "dataset", None)
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def sample_indices(loader: Any, start: EpochStart | None, batch: int) -> list[Any] | None:
    """Return the indices that the batch number ``batch`` of an epoch had in its dataset.

    A copy of the sampler is asked again, from the state of the generators in which the epoch began;
    they are put back afterwards, and the sampler itself is never asked. Asked twice, it must give
    the same order: one that draws from a generator that only it knows does not, and what it gave
    is past. None there, and where the loader cannot tell: an iterable dataset, a loader that is no
    DataLoader, or one that keeps its own position.

    Args:
        loader: a torch DataLoader, or what looks like one.
        start: how the epoch began.
        batch: counted from 0.
    """
    if start is None or not is_map_style(loader) or hasattr(loader, "state_dict"):
        return None
    now = RngState.now()
    put_back = [(g, g.get_state()) for g in generators(loader)]
    try:
        copied = _copied_samplers(loader)
        first, again = (_drawn(copied, start, batch + 1) for _ in range(2))
        if first != again or len(first) <= batch:
            return None
        found = first[batch]
        return found if isinstance(found, list) else [found]
    except Exception:  # a sampler of somebody else's making; identity is a courtesy
        return None
    finally:
        for generator, state in put_back:
            generator.set_state(state)
        now.put_back()


def _drawn(loader: Any, start: EpochStart, count: int) -> list[Any]:
    """Return the first of what the samplers of an epoch give out."""
    return_to(loader, start)
    # A loader draws the seed of its workers before its sampler draws anything.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return list(itertools.islice(iter(index_sampler), count))


def _copied_samplers(loader: Any) -> SimpleNamespace:
    """Return what looks like the loader, with samplers of its own; data and generators are shared.

    Generators are known and put back; data may be large, and is not changed by being sampled.
    """
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    shared = [loader.dataset, *generators(loader)]
    for owner in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        shared += [value for value in getattr(owner, "__dict__", {}).values() if _is_data(value)]
    memo = {id(value): value for value in shared}
    sampler, batch_sampler = copy.deepcopy((sampler, batch_sampler), memo)
    own = getattr(loader, "generator", None)
    return SimpleNamespace(sampler=sampler, batch_sampler=batch_sampler, generator=own)


def _is_data(value: Any) -> bool:
    is_own = isinstance(value, OWN_VALUES) or type(value).__module__ == "numpy"
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not is_own
