"""A ``pynvml`` for a GPU that is not there. ``test_gpu_health`` compares it with the real one."""

import types

import pynvml as real


class FakeNvml(types.ModuleType):
    """Answers what a healthy GPU would; ``state`` makes it sick, and None makes it refuse."""

    NVMLError = real.NVMLError
    NVMLError_Timeout = real.NVMLError_Timeout

    def __init__(self, **state):
        super().__init__("pynvml")
        self.state = {
            "ecc": 0,
            "rows": (0, 0, 0, 0),
            "clocks": real.nvmlClocksEventReasonGpuIdle,
            "memory": (1000, 500),
            "temperature": 40,
            "xids": [],
        } | state
        self.handle = None
        for name in dir(real):
            if name.startswith(("NVML_", "nvmlClocksEventReason", "nvmlEventType")):
                setattr(self, name, getattr(real, name))

    def _answer(self, name):
        value = self.state[name]
        if value is None:
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlInit(self):
        if self.state.get("no_driver"):
            raise real.NVMLError(real.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlDeviceGetHandleByIndex(self, index):
        self.handle = index
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.handle = uuid
        return uuid

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):
        assert errorType == real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counterType == real.NVML_VOLATILE_ECC
        return self._answer("ecc")

    def nvmlDeviceGetRemappedRows(self, device):
        return self._answer("rows")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer("clocks")

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        total, used = self._answer("memory")
        return types.SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == real.NVML_TEMPERATURE_GPU
        return self._answer("temperature")

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlDeviceRegisterEvents(self, handle, eventTypes, eventSet):
        assert eventTypes == real.nvmlEventTypeXidCriticalError
        self.state["registered"] = eventSet

    def nvmlEventSetWait_v2(self, eventSet, timeoutms):
        assert eventSet == self.state["registered"], "nobody tells those who did not register"
        assert timeoutms == 0, "training does not wait for bad news"
        if not self._answer("xids"):
            raise real.NVMLError(real.NVML_ERROR_TIMEOUT)
        return types.SimpleNamespace(eventData=self.state["xids"].pop(0))
