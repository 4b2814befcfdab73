"""Work that clips by adaptive rules, beside the published code where there is any."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zclip
from zclip.bench import published
from zclip.bench.forced import operators
from zclip.bench.gradients import Gradients
from zclip.bench.rivals import by_torch
from zclip.bench.work import NO_LIMIT, OURS, Limit, Run, Work
from zclip.clippers import Clipper

ENDLESS = 1_000_000_000  # steps: a warm-up that a benchmark does not leave


def _global_norm(limit: Limit) -> Clipper:
    return zclip.GlobalNorm(limit.value)


def _zclip(limit: Limit) -> Clipper:
    return zclip.ZClip(max_grad_norm=limit.value, warmup_steps=1)


def _adagc(limit: Limit) -> Clipper:
    # While it warms up, AdaGC clips to a fixed norm: the only part of it that clips on demand.
    return zclip.AdaGC(lambda_abs=limit.value, warmup_steps=ENDLESS if limit.clips else 1)


def _spike_skip(limit: Limit) -> Clipper:
    return zclip.SpikeSkip(min_count=2)


def _auto_clip(limit: Limit) -> Clipper:
    clipper = zclip.AutoClip(percentile=100.0)
    # A norm as large as the largest before is scaled by a hair less than 1, as torch does it.
    torch._foreach_mul_(limit.gradients.grads, 2.0)
    clipper.step(limit.gradients.params)
    limit.gradients.fill()
    return clipper


def _agc(limit: Limit) -> Clipper:
    return zclip.AGC(clip=NO_LIMIT)


RULES: dict[str, Callable[[Limit], Clipper]] = {
    "global_norm": _global_norm,
    "zclip": _zclip,
    "adagc": _adagc,
    "spike_skip": _spike_skip,
    "auto_clip": _auto_clip,
    "agc": _agc,
}
"""Rule to its clipper, with settings that clip nothing, or always where there is a limit."""

LIMIT_OF = {"global_norm": "max_norm", "zclip": "max_grad_norm", "adagc": "lambda_abs"}
"""Rules that can be made to clip every time, and the attribute that is their limit."""

PLAIN: dict[str, Callable[[Limit], Any]] = {
    "zclip": lambda limit: published.ZClip(max_grad_norm=limit.value, warmup_steps=1),
    "adagc": lambda limit: published.AdaGC(
        lambda_abs=limit.value, warmup_steps=ENDLESS if limit.clips else 1
    ),
}
"""Rules whose published code is restated."""


def clip_by_rule(
    gradients: Gradients, backends: list[str], rivals: list[str], rule: str, clips: bool = False
) -> Work:
    """One step of a clipper, state and verdict included.

    Beside the rules that have no published code here, torch clips to a fixed norm: less work.
    """
    if clips and rule not in LIMIT_OF:
        raise ValueError(f"rule {rule} cannot be made to clip every time; leave out --clipped")
    limit = Limit(gradients, clips)
    if rule == "agc":
        gradients.fill_params()
    contenders: dict[str, Run] = {OURS: _stepping(RULES[rule](limit), rule, gradients, limit)}
    if rule in PLAIN:
        contenders["published"] = _stepping(PLAIN[rule](limit), rule, gradients, limit)
    else:
        fixed = by_torch(foreach=True)
        contenders["torch fixed"] = lambda: fixed(gradients.params, limit.next())
    for backend in backends:
        clipper = RULES[rule](limit)
        _answer_by(clipper, rule, operators(backend, gradients.device), gradients)
        contenders[f"{OURS}[{backend}]"] = _stepping(clipper, rule, gradients, limit)

    def error(norm: Tensor | float | None) -> float:
        assert norm is not None
        return max(gradients.error_of_norm(torch.as_tensor(norm)), limit.error_of_values())

    return Work(
        gradients,
        contenders,
        error,
        reads=2 if rule == "agc" else 1,
        rewrites=int(clips),
        freshen=limit.freshen,
        between=limit.freshen_if_small,
    )


def _stepping(clipper: Any, rule: str, gradients: Gradients, limit: Limit) -> Run:
    attribute = LIMIT_OF.get(rule)

    def step() -> Tensor | float:
        if attribute is not None:
            setattr(clipper, attribute, limit.next())
        norm: Tensor | float = clipper.step(gradients.params)
        return norm

    return step


def _answer_by(clipper: Any, rule: str, ops: Any, gradients: Gradients) -> None:
    """Make a clipper use the operators of one backend."""
    if rule != "agc":
        clipper.operators = lambda: (ops.rule_, ops.clip_by_)
        return
    state = torch.zeros(3, dtype=torch.float64, device=gradients.device)

    @torch.no_grad()
    def step(params: Any) -> Tensor:
        norm: Tensor = ops.agc_(gradients.grads, params, state, *clipper.settings({}))[0]
        return norm

    clipper.step = step
