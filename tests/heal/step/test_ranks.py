"""Two ranks of DDP over gloo: a NaN on one is refused by both, and both stay the same."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from heal.exit_codes import ExitCode

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from heal import Healer, HealingConfig
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
config = HealingConfig(snapshot_interval=5, quarantine_steps=2, check_interval=5, nan_patience=3)
healer = Healer(model, optimizer, config=config, rank=rank)
healer.exits.dismiss()
torch.manual_seed(rank)
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    if step == 20 and rank == 1:
        loss = loss * float("nan")
    if step == 30:  # the same damage on both, as a bad update would do
        with torch.no_grad():
            model.module.weight[0, 0] = float("nan")
    loss.backward()
    healer.step(loss)
plans = [(at, d.cause.value, [type(a).__name__ for a in p]) for at, d, p in healer.history]
print(plans, model.module.weight.tolist(), healer.last_step, healer.notes)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of DDP that let go of Python objects now and then abort a process that ends
"""


HALF_A_BACKWARD = """
import sys, torch
import torch.distributed as dist
from heal import Healer
from heal.actions import HealingError
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
healer = Healer(model, optimizer, run_dir=sys.argv[2] + ".run", rank=rank)
def fail(grad):
    if healer.attempts == 8 and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
model.module.weight.register_hook(fail)
try:
    loader = [torch.randn(8, 4) for _ in range(20)]
    healer.run(lambda batch: model(batch).square().mean(), loader, 20, progress=False)
except HealingError as halt:
    print(halt)
    sys.stdout.flush()
    import os
    os._exit(halt.exit_code)  # as gloo breaks no group while the process lives
"""


def world(script, store):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(store)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_both_ranks_refuse_roll_back_and_stay_the_same(tmp_path):
    ranks = world(SCRIPT, tmp_path / "store")
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said[0][1] + said[1][1]
    assert said[0][0] == said[1][0]
    assert "Skip" in said[0][0]
    assert "Rollback" in said[0][0]
    assert "nan" not in said[0][0].partition("[[")[2].partition("]]")[0]


def test_a_rank_that_fails_within_backward_ends_all_promptly_with_one_code(tmp_path):
    ranks = world(HALF_A_BACKWARD, tmp_path / "store")
    # The limit of gloo itself is half an hour.
    said = [process.communicate(timeout=120) for process in ranks]
    codes = [process.returncode for process in ranks]
    assert codes == [ExitCode.OUT_OF_MEMORY] * 2, said
    assert all("on rank 1" in told for told, _ in said)
    for name in ("postmortem.json", "postmortem.rank1.json"):
        assert json.loads((tmp_path / "store.run" / name).read_text())["exit_code"] in codes
