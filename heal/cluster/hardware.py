"""Health checks: what the driver knows about a GPU, and whether every rank answers a ping."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from heal.cluster.launch import has_peers, own_store, wait_for

FULL = 0.98  # share of the memory in use from which the next allocation is likely to fail
THROTTLES = {
    "HwSlowdown": "slowed down by the hardware",
    "HwThermalSlowdown": "too hot, slowed down by the hardware",
    "HwPowerBrakeSlowdown": "slowed down by the power supply",
    "SwThermalSlowdown": "too hot, slowed down by the driver",
}
"""Reasons for a slow clock that are faults; idling and power caps are not."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One look at one GPU. What the driver does not report is None.

    Attributes:
        available: whether NVML answered at all; if not, ``reason`` says why, and nothing else is
            known. That is not a fault.
        ok: no fault found.
        reason: every fault in words, or why there is no answer; "" if all is well.
        ecc_errors: that could not be corrected, since the driver was loaded.
        xids: critical errors since the look before, by NVIDIA's numbers.
        pending_repair: memory rows wait to be remapped, or could not be.
        throttled: names of the faults that slow the clock down.
        memory_used: share of the memory in use, by all processes.
        temperature: in degrees Celsius.
    """

    available: bool
    ok: bool = True
    reason: str = ""
    ecc_errors: int | None = None
    xids: tuple[int, ...] = ()
    pending_repair: bool | None = None
    throttled: tuple[str, ...] = ()
    memory_used: float | None = None
    temperature: int | None = None


class GpuWatch:
    """Looks at one GPU again and again; the driver reports XIDs only from registration on."""

    def __init__(self, device: int | None = None) -> None:
        self._unavailable = ""
        try:
            self._nvml: Any = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._find(device)
            self._events = self._ask(self._register)
        except ImportError:
            self._unavailable = "pynvml is not installed; pip install nvidia-ml-py"
        except Exception as error:  # no driver, no GPU, no permission: all are "not available"
            self._unavailable = f"NVML does not answer: {error}"

    def look(self) -> GpuHealth:
        """Return what is known now; never raises, and never waits for the device."""
        if self._unavailable:
            return GpuHealth(available=False, reason=f"not available: {self._unavailable}")
        nvml, gpu = self._nvml, self._handle
        ecc = self._ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
        rows = self._ask(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
        pending = None if rows is None else any(rows[2:])  # pending, or failed
        slow = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)) or 0
        throttled = tuple(
            name for name in THROTTLES if slow & getattr(nvml, f"nvmlClocksEventReason{name}", 0)
        )
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        used = None if memory is None or not memory.total else memory.used / memory.total
        xids = self._ask(self._xids) or ()
        faults = []
        if ecc:
            faults.append(f"{ecc} ECC errors that could not be corrected")
        if xids:
            faults.append(f"XID {', '.join(map(str, xids))}")
        if pending:
            faults.append("memory rows wait for repair: reset the GPU")
        faults += [THROTTLES[name] for name in throttled]
        if used is not None and used > FULL:
            faults.append(f"{used:.1%} of the memory is in use")
        return GpuHealth(
            available=True,
            ok=not faults,
            reason="; ".join(faults),
            ecc_errors=ecc,
            xids=xids,
            pending_repair=pending,
            throttled=throttled,
            memory_used=used,
            temperature=self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
        )

    def _find(self, device: int | None) -> Any:
        """Find it by UUID where torch has it: CUDA_VISIBLE_DEVICES renumbers for torch only."""
        if torch.cuda.is_available():
            index = torch.cuda.current_device() if device is None else device
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            if uuid is not None:
                return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._nvml.nvmlDeviceGetHandleByIndex(device or 0)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return an answer; None where this GPU or this driver has none."""
        with suppress(self._nvml.NVMLError, AttributeError):
            return question()
        return None

    def _register(self) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        kind = self._nvml.nvmlEventTypeXidCriticalError
        self._nvml.nvmlDeviceRegisterEvents(self._handle, kind, events)
        return events

    def _xids(self) -> tuple[int, ...]:
        found: list[int] = []
        with suppress(self._nvml.NVMLError_Timeout):  # no more events
            while self._events is not None:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                found.append(int(event.eventData))
        return tuple(found)


_watches: dict[int | None, GpuWatch] = {}


def check_gpu_health(device: int | None = None) -> GpuHealth:
    """Look at a GPU through NVML; says "not available" where there is none, and never raises.

    ``device`` is an index as torch counts; the current one if None.
    """
    if device not in _watches:
        _watches[device] = GpuWatch(device)
    return _watches[device].look()


TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """What a ping brought back.

    Attributes:
        ok: every rank answered in time, and the sum was right.
        seconds: from the start of the ping to its answer, or to the timeout.
        missing: ranks that did not come to the ping.
        reason: in words; "" if all is well.
    """

    ok: bool
    seconds: float
    missing: tuple[int, ...] = ()
    reason: str = ""


class GroupPing:
    """Pings the ranks of a group, all if None, over a group of its own beside training.

    Every rank adds a one on its device, over the path that gradients take, gloo or NCCL. A ping
    that failed leaves its group in an unknown state, and no other is sent.
    """

    def __init__(
        self, group: "dist.ProcessGroup | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: expected more than 0, got {timeout_seconds!r}")
        self._group = group
        self._timeout = timeout_seconds
        self._count = 0
        self._began = 0.0
        self._failed = ""
        self._under_way: Any = None

    def connect(self) -> None:
        """Make the group now; else the first ping does, which a rank that is gone would hold up."""
        if has_peers(self._group):
            _ = self._peers

    def ping(self, timeout_seconds: float | None = None) -> GroupHealth:
        """Wait until all have answered, or the time is up; all ranks have to call it alike."""
        self._timeout = timeout_seconds or self._timeout
        self.start()
        return self.finish()

    def start(self) -> None:
        """Send a ping and go on; all ranks have to call it alike."""
        if self._under_way is not None:
            self.finish()
        if self._failed or not has_peers(self._group):
            return
        side, store, one = self._peers
        self._count += 1
        self._began = time.monotonic()
        store.set(f"{self._count}/{dist.get_rank()}", "here")
        one.fill_(1)
        try:
            self._under_way = dist.all_reduce(one, group=side, async_op=True)
        except RuntimeError as error:
            self._failed = f"the ping could not be sent: {error}"

    def finish(self) -> GroupHealth:
        """Return what came back of the ping that was sent; waits if it is still under way."""
        if self._under_way is None:
            reason = f"an earlier ping failed: {self._failed}" if self._failed else ""
            return GroupHealth(not self._failed, 0.0, (), reason)
        _, store, one = self._peers
        work, self._under_way = self._under_way, None
        size = dist.get_world_size(self._group)
        try:
            if wait_for(work.is_completed, self._timeout):
                work.wait()  # raises if it ended badly
                if int(one.item()) != size:
                    self._failed = f"{size} ranks sent a 1 and the sum is {int(one.item())}"
            else:
                self._failed = f"no answer within {self._timeout:g} s"
        except RuntimeError as error:  # gloo raises at once if a peer's connection is closed
            self._failed = f"the ping failed: {error}"
        seconds = time.monotonic() - self._began
        if not self._failed:
            # Of the ping before: a rank that still waits may look for the keys of this one.
            store.delete_key(f"{self._count - 1}/{dist.get_rank()}")
            return GroupHealth(True, seconds)
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        missing = tuple(r for r in ranks if not store.check([f"{self._count}/{r}"]))
        names = f"; missing: rank {', '.join(map(str, missing))}" if missing else ""
        return GroupHealth(False, seconds, missing, self._failed + names)

    @cached_property
    def _peers(self) -> tuple[Any, Any, Tensor]:
        """Group, store and number, made when first needed, by all ranks together."""
        group = self._group or dist.group.WORLD
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        accelerator = None if backend == "gloo" else torch.accelerator.current_accelerator()
        is_local = self._group is not None
        side = dist.new_group(ranks, backend=backend, use_local_synchronization=is_local)
        store = PrefixStore(f"heal/ping/{side.group_name}", own_store())
        return side, store, torch.ones(1, dtype=torch.int32, device=accelerator or "cpu")


_pings: dict[Any, GroupPing] = {}


def check_nccl_health(
    timeout_seconds: float = TIMEOUT_SECONDS, group: "dist.ProcessGroup | None" = None
) -> GroupHealth:
    """Ping every rank once, over NCCL or gloo, whichever the group has; never hangs.

    All ranks have to call it at the same place, say every hundred steps. It waits for the slowest,
    on a GPU also for what is enqueued before it.

    Args:
        timeout_seconds: how long the answer may take.
        group: the ranks that have to answer; all of them if None.

    Example:
        >>> health = check_nccl_health(timeout_seconds=10.0)
        >>> if not health.ok:
        ...     raise SystemExit(f"{health.reason}")
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (world, group)
    if key not in _pings:
        for other in [k for k in _pings if k[0] is not world]:
            del _pings[other]  # of a world that is gone
        _pings[key] = GroupPing(group, timeout_seconds)
    return _pings[key].ping(timeout_seconds)
