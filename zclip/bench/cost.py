"""What a call costs besides time: memory, operators or launches, and waits for the device."""

import ctypes
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
}
"""Operators that hand a value to the host: on a GPU each is a wait."""


@dataclass(frozen=True)
class Cost:
    """Counted in one call."""

    launches: int
    """Kernels on a GPU; on the CPU the operators that Python called."""
    syncs: int
    """Times the host waited for the device; on the CPU, would have."""
    peak_bytes: int | None
    """Memory beyond what was there before the call, at its peak; None where it is not counted."""


def cost_of(run: Callable[[], object], device: torch.device) -> Cost:
    """Count in three further calls: counting one thing disturbs the others."""
    if device.type == "cuda":
        return Cost(_kernels(run), _cuda_waits(run), _cuda_peak(run))
    counter = OperatorCounter()
    with counter:
        run()
    return Cost(counter.operators, counter.syncs, resident_peak(run))


class OperatorCounter(TorchDispatchMode):
    """Counts operators, and among them those that read a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.syncs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operators += 1
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        self.syncs += func._schema.name in READS or any(tag in func.tags for tag in tags)
        return func(*args, **(kwargs or {}))


def resident_peak(run: Callable[[], object]) -> int | None:
    """Return by how much the process grew during a call; None where the kernel does not say."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory freed before hides memory taken now
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _cuda_peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cuda_waits(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def _kernels(run: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or [])
