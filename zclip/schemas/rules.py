"""The clip rules: from stats to coefficients, alone and fused with measuring and scaling.

Two operators serve every rule. ``rule`` is its place in :data:`zclip.reference.rules.RULES`, and
``settings`` are its settings, in the order of its reference. Every rule keeps its statistics in
``state``, on the device; see :mod:`zclip.layout`. ``loss`` is for rules that look at it.
"""

import torch
from torch import Tensor

from zclip.schemas.library import library
from zclip.schemas.shapes import empty_fused, empty_judgement

_JUDGED = "(Tensor coefs, Tensor verdict)"
_CLIPPED = "(Tensor norm, Tensor stats, Tensor coefs, Tensor verdict)"
_WHICH = "int rule, float[] settings, Tensor? loss=None"

library.define(f"rule_(Tensor(a!) state, Tensor stats, {_WHICH}) -> {_JUDGED}")
library.define(f"clip_by_(Tensor(a!)[] grads, Tensor(b!) state, {_WHICH}) -> {_CLIPPED}")
# As clip_by_, for those who apply the coefficients themselves: the gradients are only read.
library.define(f"decide_by_(Tensor[] grads, Tensor(a!) state, {_WHICH}) -> {_CLIPPED}")
# On the CPU only: clip_by_ on gradients that zclip.reading has read, and watch_loss_ on its verdict
# if there is a watch. It writes gradients that are not in the schema, so no graph may hold it.
library.define(
    "clip_read_(int reading, Tensor(a!) state, int rule, float[] settings, Tensor? loss=None,"
    " Tensor(b!)? watch=None, Tensor? watched=None, float[] watch_settings=[]) -> " + _CLIPPED
)
# What a backend calls for a rule that it has no code of its own for.
library.define(f"reference_rule_(Tensor(a!) state, Tensor stats, {_WHICH}) -> {_JUDGED}")


@torch.library.register_fake("zclip::rule_", lib=library)
@torch.library.register_fake("zclip::reference_rule_", lib=library)
def _rule_(
    state: Tensor, stats: Tensor, rule: int, settings: list[float], loss: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return empty_judgement(stats, stats.shape[0])


@torch.library.register_fake("zclip::clip_by_", lib=library)
@torch.library.register_fake("zclip::decide_by_", lib=library)
def _clip_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: list[float],
    loss: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_fused(grads, state)


library.define(
    "agc_(Tensor(a!)[] grads, Tensor[] params, Tensor(b!) state, float clip, float eps,"
    f" int on_nonfinite) -> {_CLIPPED}"
)
library.define(
    "watch_loss_(Tensor(a!) state, Tensor loss, Tensor(b!) verdict, float factor,"
    " int rising_steps, float decay, int warmup_steps) -> ()"
)


@torch.library.register_fake("zclip::agc_", lib=library)
def _agc_(
    grads: list[Tensor],
    params: list[Tensor],
    state: Tensor,
    clip: float,
    eps: float,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_fused(grads, state)


@torch.library.register_fake("zclip::watch_loss_", lib=library)
def _watch_loss_(
    state: Tensor,
    loss: Tensor,
    verdict: Tensor,
    factor: float,
    rising_steps: int,
    decay: float,
    warmup_steps: int,
) -> None:
    return None
