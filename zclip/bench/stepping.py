"""Work of a whole optimizer step: bare, with torch's clipping, with ours."""

import torch
from torch import Tensor

import zclip
from zclip.bench.gradients import Gradients
from zclip.bench.work import NO_LIMIT, OURS, Run, Work

SMALL = 1e-6  # learning rate; the parameters may drift for ever


def step(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """Clip, skip what is not finite, and step a fused AdamW; rivals do the part that they can.

    All share one optimizer: its three states would not fit four times.
    """
    gradients.fill_params()
    inner = torch.optim.AdamW(gradients.params, lr=SMALL, fused=True)
    limited = zclip.ClippedOptimizer(inner, zclip.GlobalNorm(NO_LIMIT))
    adaptive = zclip.ClippedOptimizer(
        inner, zclip.ZClip(max_grad_norm=None, z_thresh=NO_LIMIT, warmup_steps=1)
    )

    def clip_then_step() -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(gradients.params, NO_LIMIT)
        inner.step()
        return norm

    def wrapped(optimizer: zclip.ClippedOptimizer) -> Run:
        def run() -> Tensor:
            optimizer.step()
            assert optimizer.result is not None
            return optimizer.result.total_norm

        return run

    contenders: dict[str, Run] = {
        OURS: wrapped(limited),
        f"{OURS} ZClip": wrapped(adaptive),
        "torch clip": clip_then_step,
        "(no clipping)": lambda: inner.step(),
    }

    def error(norm: Tensor | float | None) -> float:
        if norm is None:
            return 0.0  # the bare step computes no norm
        return gradients.error_of_norm(torch.as_tensor(norm))

    return Work(gradients, contenders, error, reads=0)
