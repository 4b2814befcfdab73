"""Which samples of a dataset a batch was made of, found out after the fact."""

import itertools
from typing import Any

import torch
from torch.utils.data import IterableDataset

from heal.data.epoch_start import EpochStart, generators, return_to
from heal.state.rng import RngState


def sample_indices(loader: Any, start: EpochStart | None, batch: int) -> list[Any] | None:
    """Return the indices that the batch number ``batch`` of an epoch had in its dataset.

    The sampler is asked again, from the state of the generators in which the epoch began; they are
    put back afterwards. None where the loader cannot tell: an iterable dataset, a loader that is
    no DataLoader, or one that keeps its own position.

    Args:
        loader: a torch DataLoader, or what looks like one.
        start: how the epoch began.
        batch: counted from 0.
    """
    sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    is_map_style = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if start is None or not is_map_style or hasattr(loader, "state_dict"):
        return None
    now = RngState.now()
    put_back = [(g, g.get_state()) for g in generators(loader)]
    try:
        return_to(loader, start)
        # A loader draws the seed of its workers before its sampler draws anything.
        torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
        drawn = iter(sampler if sampler is not None else loader.sampler)
        found = next(itertools.islice(drawn, batch, None), None)
        return None if found is None else found if isinstance(found, list) else [found]
    except Exception:  # a sampler of somebody else's making; identity is a courtesy
        return None
    finally:
        for generator, state in put_back:
            generator.set_state(state)
        now.put_back()
