"""A GradScaler tells optimizers apart by identity; here it learns that a wrapper is what is inside.

Without that, gradients that were unscaled for the optimizer inside are divided again when the
wrapper is stepped, and nobody notices but the model.
"""

import sys
from typing import Any

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer


def adopt_unscaling(scaler: Any, wrapper: Optimizer, inner: Optimizer) -> None:
    """Have the scaler know of the wrapper what it knows of the optimizer inside, in this step."""
    states = scaler._per_optimizer_states
    known = states.pop(id(inner), None)
    if known is not None and known["stage"] is not OptState.READY:
        # Into the dictionary that is there: the scaler may hold it already.
        states[id(wrapper)].update(known)


def asking_scaler() -> GradScaler | None:
    """Return the GradScaler whose method asked for the attribute that calls this, if one did.

    ``GradScaler.step`` hands itself to nobody, and asks the optimizer for an attribute before it
    unscales. Its frame is the only place where it can be found.
    """
    asking = sys._getframe(2).f_locals.get("self")
    return asking if isinstance(asking, GradScaler) else None
