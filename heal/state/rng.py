"""The random number generators of a process, read and put back without drawing from them."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """Python, numpy if it is in use, torch on the CPU and on every accelerator that was used."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> "RngState":
        """Read all generators. Nothing waits: accelerator generators keep their state here."""
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else (),
        )

    def put_back(self) -> None:
        """Set all generators to this state."""
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda and _cuda_in_use():
            torch.cuda.set_rng_state_all(self.cuda)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
