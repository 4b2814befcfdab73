"""clip_grad_norm_ against torch's, with nothing to clip and with everything to clip.

pytest benchmarks/bench_clip_grad_norm_.py --benchmark-group-by=param:block,param:clips
"""

import itertools

import pytest
import torch

import zclip

RIVALS = {
    "zclip": zclip.clip_grad_norm_,
    "torch-foreach": lambda p, limit: torch.nn.utils.clip_grad_norm_(p, limit, foreach=True),
    "torch-loop": lambda p, limit: torch.nn.utils.clip_grad_norm_(p, limit, foreach=False),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("clips", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.benchmark(group="clip_grad_norm_")
def test_clip_grad_norm_(report, grads, clips, rival):
    params = [torch.nn.Parameter(torch.empty_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    # A shrinking limit keeps clipping; a constant one is met after the first call.
    limits = (0.999**n for n in itertools.count()) if clips else itertools.repeat(1e30)
    norm = report(lambda: RIVALS[rival](params, next(limits)))
    assert norm.isfinite()
