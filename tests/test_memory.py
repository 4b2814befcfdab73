"""Extra memory grows with the number of chunks, never with the number of elements."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, torch, zclip
zclip.clip_grad_norm_(torch.nn.Parameter(torch.zeros(3)), 1.0)
params = []
for _ in range(4):
    p = torch.nn.Parameter(torch.zeros(1)); p.grad = None
    params.append(p)
grads = [torch.ones(10_000_000) for _ in params]
for p, g in zip(params, grads): p.data = g; p.grad = g
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
zclip.clip_grad_norm_(params, {max_norm}, nonfinite="{mode}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("mode", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_clipping_160_megabytes_takes_less_than_one(max_norm, mode):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(max_norm=max_norm, mode=mode)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 1024  # KiB
