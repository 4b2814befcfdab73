"""Memory that really runs out: a child process whose address space is limited."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CHILD = """
import json, resource, sys
from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed, bare, losses

rows = [[4 + (start + 3 * i) % 28 for i in range(128)] for start in range(96)]
data = tiny.Dataset.from_dict({"input_ids": rows, "labels": rows})

def trainer():
    model = tiny.llama(
        max_position_embeddings=128, attn_implementation="eager", attention_dropout=0.0
    )
    return tiny.plain(sys.argv[1], model, data, per_device_train_batch_size=96, max_steps=2)

bare(tiny.plain(sys.argv[1], max_steps=1))  # loads what is loaded late
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2]) * 2**20
scarce, (_, most) = trainer(), resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (limit, most))
healed = Healed(scarce)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
plenty = bare(trainer())
print(json.dumps({
    "decisions": healed.decisions,
    "error": repr(healed.error) if healed.error else None,
    "plenty": losses(plenty),
    "scarce": losses(scarce),
}))
"""
MEBIBYTES = 80  # less than the whole batch takes, more than a quarter of it


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells its address space")
def test_memory_that_really_runs_out_is_healed_with_the_same_effective_batch(tmp_path):
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path), str(MEBIBYTES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["error"] is None
    assert {cause for cause, _ in result["decisions"]} == {"oom"}
    assert result["scarce"] == pytest.approx(result["plenty"], rel=1e-4)
