"""The SLURM example, with a scheduler that pretends."""

import os
import runpy
import subprocess
import sys

import pytest

from tests.cluster.jobs import ROOT, Job, environment

SCRIPT = ROOT / "examples" / "slurm" / "requeue.sh"


def run_script(tmp_path, command):
    """Run the batch script with an srun that starts one task, and a scontrol that takes notes."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fakes = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, body in fakes.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "1"}
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


@pytest.mark.parametrize(("code", "asked"), [(75, "requeue 4711\n"), (0, ""), (41, "")])
def test_the_job_is_queued_again_if_it_was_preempted_and_only_then(tmp_path, code, asked):
    done, said = run_script(tmp_path, ["-c", f"raise SystemExit({code})"])
    assert (done.returncode, said) == (code, asked)


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
