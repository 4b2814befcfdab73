"""Keeps fused SGD from taking uninitialized memory for its momentum.

Its first step allocates the buffers and leaves it to the kernel to fill them. A kernel that skips
the step does not, and the next step would read whatever was there.
"""

import torch
from torch.optim import SGD


class FirstMomentum:
    """Gives SGD zeros to start from. That equals having no buffer, bit by bit, but for dampening.

    The first step is not damped, so with dampening zeros would not do: then the host has to know
    whether that step happened.
    """

    def __init__(self) -> None:
        self._is_complete = False

    def prepare(self, sgd: SGD) -> bool:
        """Make the buffers that the coming step needs; return whether the host must wait for it."""
        if self._is_complete:
            return False
        must_wait, missing = False, False
        for group in sgd.param_groups:
            if not group["momentum"]:
                continue
            for param in group["params"]:
                if param in sgd.state and sgd.state[param].get("momentum_buffer") is not None:
                    continue
                if param.grad is None:
                    missing = True
                elif group["dampening"]:
                    must_wait = missing = True
                else:
                    sgd.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
        self._is_complete = not missing
        return must_wait

    def forget(self) -> None:
        """Look again: parameters or state have changed."""
        self._is_complete = False
