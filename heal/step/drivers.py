"""Which scheduler drives which optimizer."""

import gc
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zclip import ClippedOptimizer


def schedulers_of(optimizer: Optimizer) -> list[Any]:
    """Return the torch schedulers that drive an optimizer, without those inside of others.

    An optimizer does not know them: whoever refers to it is asked, which takes some 50 ms.
    """
    found = []
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            found.append(holder)
        elif type(holder) is dict and holder.get("optimizer") is optimizer:
            owners = gc.get_referrers(holder)
            found += [o for o in owners if isinstance(o, LRScheduler) and vars(o) is holder]
    inside = {id(part) for s in found for part in getattr(s, "_schedulers", ())}
    return [s for s in found if id(s) not in inside and s.optimizer is optimizer]


def inner_of(scheduler: Any) -> Any:
    """Return the bare optimizer that a scheduler drives; None if it does not say."""
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, ClippedOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's has it inside
    return optimizer.inner if isinstance(optimizer, ClippedOptimizer) else optimizer
