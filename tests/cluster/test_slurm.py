"""What SLURM says, and where to go on."""

import pytest

from heal.cluster import SLURMInfo, get_slurm_info, log_job_info, resolve_resume_path
from heal.cluster.slurm import expand_hostlist

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "gpt",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NODELIST": "gpu[01-02],big7",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_JOB_END_TIME": "1700000000",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("a,b", ("a", "b")),
        ("gpu[01-03,07],login", ("gpu01", "gpu02", "gpu03", "gpu07", "login")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("r[1-2]n[1-2].x", ("r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x")),
    ],
)
def test_hostlists_are_expanded(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["gpu[1-", "gpu]1[", "gpu[a-b]", "gpu[]", ",a", "n[1-9999999]"])
def test_a_broken_hostlist_is_refused(text):
    with pytest.raises(ValueError, match=r"hosts|range"):
        expand_hostlist(text)


def test_outside_of_a_job_there_is_nothing_to_tell(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert get_slurm_info() is None
    said = []
    assert log_job_info(log=said.append) is None
    assert said == []


def test_the_job_is_read_from_the_environment():
    assert get_slurm_info(JOB) == SLURMInfo(
        job_id="4711",
        job_name="gpt",
        partition="gpu",
        nodes=("gpu01", "gpu02", "big7"),
        rank=3,
        world_size=12,
        local_rank=1,
        restart_count=2,
        array_task_id=5,
        end_time=1700000000.0,
    )


def test_only_the_first_task_writes_the_line():
    said = []
    log_job_info(get_slurm_info(JOB), said.append)
    assert said == []
    log_job_info(get_slurm_info({**JOB, "SLURM_PROCID": "0"}), said.append)
    assert said == ["SLURM job 4711 (gpt) on 3 nodes of gpu, 12 tasks, requeued 2 times"]


def test_the_job_is_shown_by_default(capsys):
    log_job_info(get_slurm_info({**JOB, "SLURM_PROCID": "0"}))
    assert "SLURM job 4711 (gpt) on 3 nodes" in capsys.readouterr().err


def test_jobs_get_different_ports_and_the_batch_script_is_no_rank():
    ports = {
        get_slurm_info({**JOB, "SLURM_JOB_ID": job}).as_torchrun()["MASTER_PORT"]
        for job in ("4711", "4712", "123456789")
    }
    assert len(ports) == 3
    assert all(1024 < int(port) < 65536 for port in ports)
    assert get_slurm_info({"SLURM_JOB_ID": "1"}).as_torchrun() == {}


def folder(root, name, commit=True):
    (root / name).mkdir(parents=True)
    if commit:
        (root / name / "COMMIT").touch()
    return root / name


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    assert resolve_resume_path(tmp_path / "none") is None
    folder(tmp_path, "step-000900")
    newest = folder(tmp_path, "step-001000")
    folder(tmp_path, "step-001100", commit=False)
    folder(tmp_path, "step-001200.tmp")
    (tmp_path / "step-9999999").touch()
    assert resolve_resume_path(tmp_path) == newest
    assert resolve_resume_path(tmp_path, None) is None


def test_steps_are_compared_as_numbers(tmp_path):
    folder(tmp_path, "step-999999")
    newest = folder(tmp_path, "step-1000000")
    assert resolve_resume_path(tmp_path) == newest


def test_an_explicit_checkpoint_must_be_complete(tmp_path):
    named = folder(tmp_path, "elsewhere")
    assert resolve_resume_path(tmp_path, named) == named
    half = folder(tmp_path, "half", commit=False)
    with pytest.raises(
        FileNotFoundError, match="half, which has no COMMIT: its save was cut short"
    ):
        resolve_resume_path(tmp_path, half)
    with pytest.raises(FileNotFoundError, match="nowhere, which is not there"):
        resolve_resume_path(tmp_path, tmp_path / "nowhere")


def test_another_resolver_may_choose(tmp_path):
    assert resolve_resume_path(tmp_path, resolver=lambda root: root / "mine") == tmp_path / "mine"
