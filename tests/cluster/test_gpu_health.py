"""What NVML says about a GPU: with a driver that pretends, and by the names of the real one."""

import inspect
import sys
import types

import pynvml as real
import pytest
import torch

from heal.cluster import check_gpu_health
from heal.cluster import hardware as gpu_health
from heal.cluster.hardware import GpuWatch
from tests.cluster.fake_nvml import FakeNvml


@pytest.fixture
def nvml(monkeypatch):
    def install(**state):
        module = FakeNvml(**state)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    monkeypatch.setattr(gpu_health, "_watches", {})
    return install


def test_the_fake_has_the_functions_of_the_real_one_with_their_arguments():
    ours = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(ours) > 8
    for name in ours:
        mine = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        assert mine == list(inspect.signature(getattr(real, name)).parameters), name


def test_a_healthy_gpu_is_well(nvml):
    nvml()
    health = check_gpu_health()
    assert (health.available, health.ok, health.reason) == (True, True, "")
    assert (health.ecc_errors, health.memory_used, health.temperature) == (0, 0.5, 40)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"ecc": 2}, "2 ECC errors that could not be corrected"),
        ({"rows": (0, 0, 1, 0)}, "memory rows wait for repair: reset the GPU"),
        ({"rows": (0, 0, 0, 1)}, "memory rows wait for repair: reset the GPU"),
        (
            {"clocks": real.nvmlClocksEventReasonHwThermalSlowdown},
            "too hot, slowed down by the hardware",
        ),
        ({"memory": (1000, 990)}, "99.0% of the memory is in use"),
        ({"ecc": 1, "xids": [79]}, "1 ECC errors that could not be corrected; XID 79"),
    ],
)
def test_every_fault_is_named(nvml, state, reason):
    nvml(**state)
    health = check_gpu_health()
    assert (health.available, health.ok, health.reason) == (True, False, reason)


def test_an_xid_is_told_once_and_all_of_them_at_once(nvml):
    module = nvml(xids=[48, 63])
    watch = GpuWatch()
    assert watch.look().xids == (48, 63)
    assert watch.look().xids == ()
    module.state["xids"].append(79)
    assert watch.look().xids == (79,)


def test_power_caps_and_idling_are_not_faults(nvml):
    both = real.nvmlClocksEventReasonSwPowerCap | real.nvmlClocksEventReasonGpuIdle
    nvml(clocks=both)
    assert check_gpu_health().ok


def test_what_a_gpu_does_not_tell_is_none_and_no_fault(nvml):
    nvml(ecc=None, rows=None, clocks=None, memory=None, temperature=None, xids=None)
    health = check_gpu_health()
    assert health.available
    assert health.ok
    assert (health.ecc_errors, health.pending_repair, health.memory_used) == (None, None, None)


def test_without_a_driver_it_says_so_and_does_not_raise(nvml):
    nvml(no_driver=True)
    health = check_gpu_health()
    assert not health.available
    assert health.ok
    assert health.reason.startswith("not available: NVML does not answer")


def test_without_pynvml_it_says_what_to_install(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    health = check_gpu_health()
    assert not health.available
    assert "pip install nvidia-ml-py" in health.reason


def test_the_gpu_is_found_by_its_uuid_for_torch_may_count_otherwise(nvml, monkeypatch):
    module = nvml()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = types.SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    check_gpu_health(3)
    assert module.handle == "GPU-1234-abcd"
