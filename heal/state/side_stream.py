"""Copies to the host on a stream of their own, beside the run."""

from collections.abc import Callable

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream that begins where the run's stream is and does not hold it up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> torch.Event:
        """Enqueue work behind what the run has enqueued; return the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            done = torch.Event(self._device)
            done.record(self._stream)
        return done


def host_memory(like: Tensor) -> Tensor:
    """Return memory on the host for a copy, pinned if the source is on a CUDA device."""
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda")
