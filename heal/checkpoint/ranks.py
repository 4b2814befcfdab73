"""The few words that ranks exchange about checkpoints: bytes, gathered, without pickle."""

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of a process group, or this process alone if there is none.

    Every rank has to call :meth:`gather`, in the same order.

    Args:
        group: the default group if None.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1

    def gather(self, payload: bytes) -> list[bytes]:
        """Return what every rank says, by rank."""
        if self.size == 1:
            return [payload]
        device = self._device()
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(size) for size in lengths]
        longest = max(1, *sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        mine = mine.to(device)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(said, mine, group=self._group)
        return [bytes(t.tolist()[:size]) for t, size in zip(said, sizes, strict=True)]

    def _device(self) -> torch.device:
        if "gloo" in str(dist.get_backend_config(self._group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
