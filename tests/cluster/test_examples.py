"""The SLURM example, with a scheduler that pretends."""

import os
import runpy
import shlex
import subprocess
import sys

import pytest

from tests.cluster.jobs import ROOT, Job, environment

SCRIPT = ROOT / "examples" / "slurm" / "requeue.sh"


def run_script(tmp_path, command, **variables):
    """Run the batch script with an srun that starts one task, and a scontrol that takes notes."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fakes = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"',
        "scontrol": f'echo "$@" >> {shlex.quote(str(tmp_path / "scontrol"))}',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
    }
    for name, body in fakes.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        **variables,
    }
    told = environment(PATH=f"{tools}:{os.environ['PATH']}", **job)
    done = subprocess.run(
        ["bash", str(SCRIPT), *command],
        cwd=tmp_path,
        env=told,
        capture_output=True,
        text=True,
        timeout=300,
    )
    asked = tmp_path / "scontrol"
    return done, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize("code", [0, 1, 40, 41, 45, 46, 47, 48, 49, 50, 51, 52, 75, 143])
def test_the_job_is_queued_again_if_a_new_start_helps_and_only_then(tmp_path, code):
    done, said = run_script(tmp_path, ["-c", f"raise SystemExit({code})"])
    asked = "requeue 4711\n" if code in (47, 48, 49, 50, 75) else ""
    assert (done.returncode, said) == (code, asked)


@pytest.mark.parametrize(("code", "asked"), [(47, ""), (75, "requeue 4711\n")])
def test_a_job_that_fails_again_and_again_is_left_to_a_person(tmp_path, code, asked):
    command = ["-c", f"raise SystemExit({code})"]
    assert run_script(tmp_path, command, SLURM_RESTART_COUNT="20")[1] == asked


def test_the_script_outlives_the_signal_that_tells_the_job_to_stop(tmp_path):
    body = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); raise SystemExit(75)"
    done, said = run_script(tmp_path, ["-c", body])
    assert (done.returncode, said) == (75, "requeue 4711\n")


def test_the_example_trains_saves_and_goes_on(tmp_path):
    """Under the fake scheduler first, with rank and address from SLURM; then two ranks."""
    train = str(ROOT / "examples" / "slurm" / "train.py")
    arguments = [train, "--save-every", "3", "--run-dir", "run", "--steps"]
    first, _ = run_script(tmp_path, [*arguments, "6"])
    assert first.returncode == 0, first.stderr
    assert "SLURM job 4711" in first.stdout
    with Job(tmp_path, 2, run_example, [*arguments, "9"]) as job:
        assert job.wait() == [0, 0], job.logs()
        assert "step 6 of 9, 2 ranks" in job.logs()
    assert (tmp_path / "run" / "step-000009" / "COMMIT").exists()


def run_example(folder, arguments):
    os.chdir(folder)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
