"""Measures and copies a run's tensors, so that training may go on while they are written."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from heal.checkpoint.contents import Contents
from heal.checkpoint.manifest import Entry
from heal.checkpoint.shards import checksum_text, checksums, dtype_name
from heal.state.measured import MEASURED
from heal.state.side_stream import host_memory
from heal.state.training_state import copy_by_kind
from zclip import grad_stats
from zclip.layout import NAN


class Measured:
    """Checksums of tensors and the count of NaN and Inf in them, on their way to the host."""

    @torch.no_grad()
    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._names = [name for name, t in contents.tensors.items() if t.numel()]
        tensors = [contents.tensors[name] for name in self._names]
        trained = [
            t
            for name, t in zip(self._names, tensors, strict=True)
            if name.startswith(("parameter/", "state/")) and t.dtype in MEASURED
        ]
        bad = grad_stats(trained)[:, NAN:].sum() if trained else torch.zeros(())
        there = (checksums(tensors) if tensors else torch.zeros(0, dtype=torch.int64), bad)
        self._sums, self._bad = (
            host_memory(t).copy_(t, non_blocking=t.device.type == "cuda") for t in there
        )
        self._landed = landing_of(there)

    def num_bad(self) -> int:
        """Return how many NaN and Inf are in parameters and optimizer state; waits for them."""
        self._wait()
        return int(self._bad)

    def entries(self, rank: int) -> dict[str, Entry]:
        """Return what the manifest says of every tensor; waits for the checksums."""
        self._wait()
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        return self._listed(rank, sums)

    def outlines(self, rank: int) -> dict[str, Entry]:
        """Return the same without checksums; waits for nothing."""
        return self._listed(rank, {})

    def _listed(self, rank: int, sums: Mapping[str, int]) -> dict[str, Entry]:
        made = {}
        for name, t in self._contents.tensors.items():
            chunk = self._contents.chunks.get(name)
            whole = None if chunk is None else chunk.whole
            start = None if chunk is None else chunk.start
            checksum = checksum_text(sums.get(name, 0))
            made[name] = Entry(rank, dtype_name(t, name), tuple(t.shape), whole, start, checksum)
        return made

    def _wait(self) -> None:
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None


class Staging:
    """Host memory for copies of the tensors of one save, allocated once and used again."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> "Copies":
        """Copy tensors to the host; on a device nothing waits."""
        memory = {name: self._fitting(name, tensors[name]) for name in names}
        self._memory = memory
        sources = [tensors[name] for name in memory]
        on_cuda = any(t.device.type == "cuda" for t in sources)
        copy_by_kind(list(memory.values()), sources, non_blocking=on_cuda)
        return Copies(memory, landing_of(sources))

    def _fitting(self, name: str, like: Tensor) -> Tensor:
        there = self._memory.get(name)
        if there is not None and there.shape == like.shape and there.dtype == like.dtype:
            return there
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class Copies:
    """Tensors on the host that may still be on their way."""

    def __init__(self, tensors: dict[str, Tensor], landed: torch.Event | None = None) -> None:
        self._tensors = tensors
        self._landed = landed

    def wait(self) -> dict[str, Tensor]:
        """Return the tensors once they are there."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        return self._tensors


def landing_of(sources: Iterable[Tensor]) -> torch.Event | None:
    """Return an event behind the copies just enqueued; None if they are done already.

    They run in the stream of the run: what it enqueues next cannot overtake them.
    """
    device = next((t.device for t in sources if t.device.type == "cuda"), None)
    if device is None:
        return None
    landed = torch.Event(device)
    landed.record(torch.cuda.current_stream(device))
    return landed
