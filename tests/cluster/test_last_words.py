"""A process that is ended by its own threads leaves a postmortem all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys, threading, time, torch
from heal import Healer, HealingConfig
from heal.checkpoint import saving

how, folder = sys.argv[1:]
settings = {
    "second signal": {"shutdown_timeout_sec": 0.0},
    "deadline": {"shutdown_timeout_sec": 2.0},
    "hang": {"hang_timeout_seconds": 5.0, "hang_exit": True},
    "kill": {},
}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
healer = Healer(
    model,
    optimizer,
    config=HealingConfig(checkpoint_interval=0, **settings[how]),
    run_dir=folder + "/run",
    checkpoint_dir=folder + "/checkpoints",
)

def stuck(*args):
    print("saving", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "second signal":
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(600)

saving.write_file = stuck

def on_step(step):
    if step == 10 and how == "hang":
        time.sleep(600)
    if step == 10:
        os.kill(os.getpid(), signal.SIGTERM)

data = [torch.ones(1, 2)] * 100
healer.run(lambda b: model(b).square().mean(), data, 100, progress=False, on_step=on_step)
"""


@pytest.mark.parametrize(
    ("how", "code", "reason", "told"),
    [
        ("second signal", 143, "sigterm", 143),
        ("deadline", 49, "sigterm", 49),
        ("hang", 50, "hung", 50),
        ("kill", -9, "sigterm", 75),  # nobody is told of SIGKILL: this was written before the save
    ],
)
def test_a_process_that_is_ended_leaves_a_postmortem(tmp_path, how, code, reason, told):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    page = json.loads((tmp_path / "run" / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"]) == (reason, told)
    assert 10 <= page["last_step"] < 20
