"""Work that clips by fixed rules: torch's three functions, and scaling alone."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import zclip
from zclip import ops
from zclip.bench.forced import operators
from zclip.bench.gradients import Gradients
from zclip.bench.rivals import NormAndClip, by_torch, clip_with
from zclip.bench.work import OURS, Limit, Run, Work
from zclip.layout import PROPAGATE
from zclip.reference import IDS
from zclip.schemas import wide_dtype

LARGEST_VALUE = 3.0  # in deviations: one element in 370 is cut
FACTOR = 1 - 2**-8  # exact in every dtype, and after many calls the gradients are still there
CALLS_UNTIL_SMALL = 50


def clip_grad_norm_(
    gradients: Gradients, backends: list[str], rivals: list[str], clips: bool = False
) -> Work:
    """Clip all gradients as one vector: below the limit, or always above it."""
    limit = Limit(gradients, clips)
    ways: dict[str, NormAndClip] = {
        OURS: zclip.clip_grad_norm_,
        "torch foreach": by_torch(foreach=True),
        "torch loop": by_torch(foreach=False),
        **{rival: clip_with(rival) for rival in rivals},
    }
    contenders = {name: _limited(way, gradients, limit) for name, way in ways.items()}
    for backend in backends:
        fused = operators(backend, gradients.device).clip_by_
        contenders[f"{OURS}[{backend}]"] = _operator(fused, gradients, limit)

    def error(norm: Tensor | float | None) -> float:
        assert norm is not None
        return max(gradients.error_of_norm(torch.as_tensor(norm)), limit.error_of_values())

    return Work(
        gradients,
        contenders,
        error,
        rewrites=int(clips),
        freshen=limit.freshen,
        between=limit.freshen_if_small,
    )


def _limited(way: NormAndClip, gradients: Gradients, limit: Limit) -> Run:
    return lambda: way(gradients.params, limit.next())


def _operator(fused: Callable[..., tuple[Tensor, ...]], gradients: Gradients, limit: Limit) -> Run:
    wide = wide_dtype(gradients.device)
    counters = torch.empty(0, dtype=wide, device=gradients.device)
    rule = IDS["global_norm"]
    return lambda: fused(gradients.grads, counters, rule, (limit.next(), PROPAGATE))[0]


def clip_grad_value_(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """Bound every element."""
    params = gradients.params

    def by(foreach: bool) -> Run:
        return lambda: torch.nn.utils.clip_grad_value_(params, LARGEST_VALUE, foreach=foreach)

    contenders: dict[str, Run] = {
        OURS: lambda: zclip.clip_grad_value_(params, LARGEST_VALUE),
        "torch foreach": by(foreach=True),
        "torch loop": by(foreach=False),
    }
    for backend in backends:
        clamp = operators(backend, gradients.device).clamp_
        contenders[f"{OURS}[{backend}]"] = partial(clamp, gradients.grads, LARGEST_VALUE)

    def error(_: Tensor | float | None) -> float:
        return gradients.error_of_values(lambda g: g.clamp(-LARGEST_VALUE, LARGEST_VALUE))

    return Work(gradients, contenders, error, reads=0, rewrites=1, freshen=gradients.fill)


def scale_(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """Multiply every gradient by a number that is on the device."""
    grads = gradients.grads
    factor = torch.tensor(FACTOR, device=gradients.device)
    coefs = torch.full(
        (len(grads),), FACTOR, dtype=wide_dtype(gradients.device), device=gradients.device
    )

    def loop() -> None:
        for grad in grads:
            grad.mul_(factor)

    contenders: dict[str, Run] = {
        OURS: lambda: ops.scale_(grads, coefs),
        "torch foreach": lambda: torch._foreach_mul_(grads, factor),
        "torch loop": loop,
    }
    for backend in backends:
        multiply = operators(backend, gradients.device).scale_
        contenders[f"{OURS}[{backend}]"] = partial(multiply, grads, coefs)

    def error(_: Tensor | float | None) -> float:
        return gradients.error_of_values(lambda grad: grad * FACTOR)

    def between(turn: int) -> None:
        if turn % CALLS_UNTIL_SMALL == 0:
            gradients.fill()

    return Work(
        gradients, contenders, error, reads=0, rewrites=1, freshen=gradients.fill, between=between
    )
