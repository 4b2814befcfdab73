"""grad_stats against the ways people measure gradients today.

pytest benchmarks/bench_grad_stats.py --benchmark-group-by=param:block
"""

import pytest
import torch

from zclip import grad_stats
from zclip.layout import SUMSQ

# Each returns the norm of every gradient; only zclip also counts NaN and Inf.
RIVALS = {
    "zclip": lambda grads: grad_stats(grads)[:, SUMSQ].sqrt(),
    "foreach": lambda grads: torch.stack(torch._foreach_norm(grads)),
    "loop": lambda grads: torch.stack([g.norm() for g in grads]),
}
# bfloat16 norms are rounded by torch to 8 bits, float32 norms drift on millions of elements.
RTOL = {"zclip": 1e-6, "foreach": 5e-3, "loop": 5e-3}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.benchmark(group="grad_stats")
def test_grad_stats(report, grads, rival):
    norms = report(RIVALS[rival], grads)
    exact = torch.stack([g.double().norm() for g in grads])
    torch.testing.assert_close(norms.double(), exact, rtol=RTOL[rival], atol=0)
