"""The healer on a cluster: it stops, compares and pings by itself."""

import json
import signal
import sys

import pytest
import torch

from heal import HealingConfig
from heal.cluster import hardware as gpu_health
from heal.cluster.checks import ClusterWatch, find_replicas
from heal.detectors.host import HostNews
from heal.exit_codes import ExitCode
from heal.journal import Journal
from heal.record import Flag, Record
from tests.cluster import healed
from tests.cluster.fake_nvml import FakeNvml
from tests.cluster.jobs import Job, read_json
from tests.cluster.test_health import told_by_all


def test_a_signal_to_one_rank_makes_every_healer_stop_after_the_same_step(tmp_path):
    with Job(tmp_path, 2, healed.told_to_stop) as job:
        job.wait_for(lambda: min(job.steps()) >= 10)
        job.send(1, signal.SIGTERM)
        assert job.wait() == [ExitCode.PREEMPTED] * 2, job.logs()
    first, second = (read_json(tmp_path / f"told{rank}") for rank in range(2))
    assert first == second


def test_a_bit_that_flips_in_one_replica_is_healed_bit_by_bit(tmp_path):
    healthy = told_by_all(tmp_path / "healthy", 3, healed.silent_flip, 1, -1)
    assert healthy[0]["causes"] == []
    sick = told_by_all(tmp_path / "sick", 3, healed.silent_flip, 1, 12)
    assert sick[0] == sick[1] == sick[2]
    assert sick[0]["causes"] == ["weight_corruption"]
    assert "Rollback" in sick[0]["plans"][0]
    assert sick[0]["digest"] == healthy[0]["digest"]
    lines = (tmp_path / "sick" / "events.jsonl").read_text().splitlines()
    (event,) = [e for e in map(json.loads, lines) if e["event"] == "replicas_differ"]
    assert (event["tensor"], event["odd_ranks"]) == ("module.weight", [1])


def test_statistics_that_are_spoilt_on_one_rank_are_healed_by_all(tmp_path):
    first, second = told_by_all(tmp_path, 2, healed.spoilt_statistics, 1, 40)
    assert first["causes"] == second["causes"] == ["weight_corruption"]
    assert first["plans"] == second["plans"]
    assert "Rollback" in first["plans"][0]
    assert first["weights"] == second["weights"]
    assert max(first["largest"], second["largest"]) < 10.0


def test_replicas_that_were_never_the_same_are_left_alone(tmp_path):
    for told in told_by_all(tmp_path, 2, healed.differing_from_the_start):
        assert told["history"] == 0
        assert any("replicas differ from the start" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("interval", "read_at", "is_replicated"),
    [(5, 15, False), (1, 15, False), (5, 15, True)],
    ids=["rarely", "more often than it is read", "before replicas are compared"],
)
def test_a_rank_that_misses_the_ping_ends_the_run_of_the_others_by_name(
    tmp_path, interval, read_at, is_replicated
):
    told = told_by_all(tmp_path, 2, healed.absent_at_the_ping, 1, interval, read_at, is_replicated)
    code, why = told[0]
    assert code == ExitCode.DISTRIBUTED
    assert "missing: rank 1" in why


def watch_gpu(monkeypatch, tmp_path, **state):
    """A watch that looks at a pretended GPU every step, the GPU, and what was told."""
    gpu = FakeNvml(**state)
    monkeypatch.setitem(sys.modules, "pynvml", gpu)
    monkeypatch.setattr(gpu_health, "_watches", {})
    flags, notes = [], []
    monkeypatch.setattr(HealingConfig, "gpu_health_check_interval", 1)
    config = HealingConfig()
    journal = Journal(tmp_path, 0)
    watch = ClusterWatch(torch.nn.Linear(2, 2), config, journal, flags.append, notes.append)
    return watch, gpu.state, flags, notes


def test_new_ecc_errors_stop_all_ranks_and_old_ones_are_only_told(monkeypatch, tmp_path):
    watch, gpu, flags, notes = watch_gpu(monkeypatch, tmp_path, ecc=2)
    assert watch.look(1) == []
    assert (flags, len(notes)) == ([], 1)
    gpu["ecc"] = 3
    watch.look(2)
    assert flags == [Flag.DEVICE_ERROR]
    assert "gpu_health" in (tmp_path / "events.jsonl").read_text()


def test_an_xid_of_the_hardware_stops_all_ranks_and_one_of_the_program_does_not(
    monkeypatch, tmp_path
):
    watch, gpu, flags, notes = watch_gpu(monkeypatch, tmp_path, xids=[31])
    watch.look(1)
    assert (flags, notes) == ([], ["the GPU of this rank is not well: XID 31"])
    gpu["xids"].append(79)
    watch.look(2)
    assert flags == [Flag.DEVICE_ERROR]


def test_only_what_ddp_or_a_mesh_replicates_is_compared():
    assert find_replicas(torch.nn.Linear(2, 2)) == ([], None)


def test_damage_is_dated_to_the_last_comparison_that_found_none():
    """Compared at 50 and 100, read two steps later, told in the record of step 102."""
    config = HealingConfig(check_interval=0, nccl_health_check_interval=50, lag=2)
    finding = HostNews(config).observe(Record(step=102, flags=Flag.WEIGHTS_BAD))
    assert finding.bad_step == 50


@pytest.mark.parametrize("how", ["torch", "heal"])
def test_a_group_that_cannot_come_back_after_a_restart_is_told_at_the_start(tmp_path, how):
    with Job(tmp_path, 2, healed.joined, how) as job:
        assert job.wait() == [0, 0], job.logs()
    notes = [read_json(tmp_path / f"told{rank}") for rank in range(2)]
    told = [note for note in notes[0] if "heal.cluster.init_process_group" in note]
    assert len(told) == (1 if how == "torch" else 0)
    assert notes[1] == []
