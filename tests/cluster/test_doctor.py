"""The doctor names what is wrong with a config or a cluster, and what to do."""

import os
import socket
import sys

import pytest

from heal import HealingConfig
from heal.cli import main
from heal.cluster import hardware as gpu_health
from heal.doctor import (
    Finding,
    check_backend,
    check_cluster,
    check_config,
    check_folder,
    check_gpu,
    check_launcher,
    check_master,
)
from tests.cluster.fake_nvml import FakeNvml

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def levels(findings):
    return [finding.level for finding in findings]


def test_a_whole_checkup_of_this_very_process_finds_no_fault(tmp_path):
    findings = check_cluster({}, tmp_path)
    assert set(levels(findings)) == {"ok"}, findings
    assert list(tmp_path.iterdir()) == []


def test_every_complaint_comes_with_advice(tmp_path):
    sick = {**RANKS, "RANK": "7", "MASTER_ADDR": "no.such.host.invalid", "GLOO_SOCKET_IFNAME": "x9"}
    findings = check_cluster(sick, tmp_path / "missing")
    complaints = [finding for finding in findings if finding.level != "ok"]
    assert len(complaints) >= 4
    assert all(finding.todo for finding in complaints)


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"MASTER_PORT": None}, "error", "expected MASTER_PORT in the environment"),
        ({"RANK": "one"}, "error", "RANK in the environment: expected a whole number, got 'one'"),
        ({"RANK": "2"}, "error", "RANK 2 is not below WORLD_SIZE 2"),
        ({"MASTER_PORT": "70000"}, "error", "MASTER_PORT 70000 is no port"),
        ({"TORCHELASTIC_RUN_ID": "a"}, "warn", "at most 0 restarts"),
        (
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "3"},
            "ok",
            "torchrun: rank 0 of 2, at most 3 restarts",
        ),
    ],
)
def test_a_launcher_that_contradicts_itself_is_noticed(changes, level, what):
    environment = {k: v for k, v in {**RANKS, **changes}.items() if v is not None}
    (finding,) = check_launcher(environment)
    assert finding.level == level
    assert what in finding.what


def test_a_batch_script_is_told_that_it_is_no_task():
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-2]"}
    said, warned = check_launcher(job)
    assert said == Finding("ok", "SLURM job 1: 4 tasks on 2 nodes")
    assert (warned.level, "batch script" in warned.what) == ("warn", True)


def test_a_master_that_listens_is_told_from_one_that_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert levels(check_master({**RANKS, "MASTER_PORT": port})) == ["ok"]
    (refused,) = check_master({**RANKS, "MASTER_PORT": port})
    assert refused.level == "warn"
    assert "no process listens" in refused.what


def test_an_interface_that_is_not_there_is_named():
    (_, finding) = check_backend({"GLOO_SOCKET_IFNAME": "nope0"})
    assert finding.level == "error"
    assert "nope0" in finding.what
    assert levels(check_backend({"GLOO_SOCKET_IFNAME": "lo"})) == ["ok"]


def test_a_sick_gpu_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(ecc=3))
    monkeypatch.setattr(gpu_health, "_watches", {})
    (finding,) = check_gpu()
    assert finding.level == "error"
    assert "3 ECC errors" in finding.what


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (finding,) = check_folder(tmp_path / "missing")
    assert finding.level == "error"
    (tmp_path / "file").touch()
    assert levels(check_folder(tmp_path / "file")) == ["error"]


def test_a_clock_that_is_off_is_noticed(tmp_path, monkeypatch):
    from heal import doctor as cluster

    real = cluster.time.time
    monkeypatch.setattr(cluster.time, "time", lambda: real() + 100)
    (finding,) = cluster.check_clock(tmp_path)
    assert finding.level == "warn"
    assert "the clock is 100 s off" in finding.what


def write(tmp_path, text):
    path = tmp_path / "heal.toml"
    path.write_text(text)
    return path


def test_a_good_config_is_read_and_its_changes_are_listed(tmp_path):
    (finding,) = check_config(write(tmp_path, HealingConfig(lr_factor=0.7).to_toml()))
    assert finding.level == "ok"
    assert finding.what.endswith("settings that differ: lr_factor")


@pytest.mark.parametrize(
    ("text", "level", "what"),
    [
        ("lr_factr = 0.5", "error", "expected lr_factor"),
        ("lr_factor = ", "error", "is not TOML"),
        ("lr_factor = 2.0", "error", "lr_factor: expected a number > 0 and <= 1, got 2.0"),
        ("quarantine_steps = 200", "error", "none ever counts as good"),
        ("quarantine_steps = 1", "warn", "quarantine_steps = 1 is less than lag = 2"),
        ("max_recovery_attempts = 0", "warn", "the first trouble ends the run"),
        (
            "nan_patience = 101",
            "warn",
            "nan_patience = 101 is not below max_consecutive_skips",
        ),
        (
            "nan_patience = 100",
            "warn",
            "nan_patience = 100 is not below max_consecutive_skips",
        ),
        ('nan_patience = 101\nnan_action = "skip"', "ok", "nan_action"),
        ("nccl_health_check_interval = 0", "warn", "nccl_health_check_interval = 0"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(tmp_path, text, level, what):
    finding = check_config(write(tmp_path, text))[-1]
    assert finding.level == level
    assert what in finding.what
    assert finding.todo or level == "ok"


def test_a_config_that_is_not_there_says_how_to_make_one(tmp_path):
    (finding,) = check_config(tmp_path / "heal.toml")
    assert finding.level == "error"
    assert "heal init > " in finding.todo
    assert levels(check_config(os.devnull)) == ["ok"]
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    assert levels(check_config(path)) == ["error"]


def test_the_command_looks_at_config_and_cluster(tmp_path, capsys, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    path = write(tmp_path, "lr_factr = 0.5")
    assert main(["doctor", "--config", str(path)]) == 2
    assert "expected lr_factor" in capsys.readouterr().out
    assert main(["doctor", "--cluster"]) == 0
    assert "no launcher: a single process" in capsys.readouterr().out
    assert main(["doctor"]) == 2
    assert "--cluster" in capsys.readouterr().err
