"""What the driver knows about a GPU and training does not: ECC, XID, throttling, memory."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

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
    """One look at one GPU. What the driver does not tell is None.

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
    """Looks at one GPU again and again; XIDs are told only to those who registered before.

    Args:
        device: index as torch counts; the current one if None.
    """

    def __init__(self, device: int | None = None) -> None:
        self._nvml: Any = None
        self._unavailable = ""
        self._events: Any = None
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._find(device)
        except ImportError:
            self._unavailable = "pynvml is not installed; pip install nvidia-ml-py"
        except Exception as error:  # no driver, no GPU, no permission: all are "not available"
            self._unavailable = f"NVML does not answer: {error}"
        if not self._unavailable:
            self._events = self._ask(self._register)

    def look(self) -> GpuHealth:
        """Return what is known now; never raises, and never waits for the device."""
        if self._unavailable:
            return GpuHealth(available=False, reason=f"not available: {self._unavailable}")
        ecc = self._ask(self._ecc_errors)
        pending = self._ask(self._pending_repair)
        throttled = self._ask(self._throttled) or ()
        xids = self._ask(self._xids) or ()
        memory = self._ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle))
        used = None if memory is None or not memory.total else memory.used / memory.total
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
            temperature=self._ask(self._temperature),
        )

    def _find(self, device: int | None) -> Any:
        """By UUID where torch tells it: CUDA_VISIBLE_DEVICES renumbers for torch only."""
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
        if self._events is None:
            return ()
        with suppress(self._nvml.NVMLError_Timeout):  # no more events
            while True:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                found.append(int(event.eventData))
        return tuple(found)

    def _ecc_errors(self) -> int:
        nvml = self._nvml
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, since))

    def _pending_repair(self) -> bool:
        _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        return bool(pending or failed)

    def _throttled(self) -> tuple[str, ...]:
        nvml = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        return tuple(
            name for name in THROTTLES if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")
        )

    def _temperature(self) -> int:
        nvml = self._nvml
        return int(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))


_watches: dict[int | None, GpuWatch] = {}


def check_gpu_health(device: int | None = None) -> GpuHealth:
    """Look at a GPU through NVML; says "not available" where there is none, and never raises.

    Args:
        device: index as torch counts; the current one if None.
    """
    if device not in _watches:
        _watches[device] = GpuWatch(device)
    return _watches[device].look()
