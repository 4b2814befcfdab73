"""A GradScaler knows optimizers by identity; here it learns that a wrapper is what is inside.

Without that, gradients that were unscaled for the optimizer inside are divided again when the
wrapper is stepped, and nothing shows it but the model.
"""

from typing import Any

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def adopt_unscaling(scaler: Any, wrapper: Optimizer, inner: Optimizer) -> None:
    """Have the scaler know of the wrapper what it knows of the optimizer inside, in this step."""
    states = scaler._per_optimizer_states
    known = states.pop(id(inner), None)
    if known is not None and known["stage"] is not OptState.READY:
        # Into the dictionary that is there: the scaler may hold it already.
        states[id(wrapper)].update(known)
