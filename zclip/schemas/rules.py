"""The clip rules: from stats to coefficients, alone and fused with measuring and scaling.

Settings are written once per rule, so that ``<rule>_`` and ``clip_by_<rule>_`` cannot drift apart.
Every rule keeps its statistics in ``state``, on the device; see :mod:`zclip.layout`.
"""

import torch
from torch import Tensor

from zclip.schemas.library import library
from zclip.schemas.shapes import empty_fused, empty_judgement

# Rule: (tensors it reads besides the stats, settings). No argument may be called "mode":
# torch.compile passes arguments by name to a function of its own that has one of that name.
_RULES = {
    "global_norm_": ("", "float max_norm, int nonfinite"),
    "zclip_": (
        "",
        "float alpha, float z_thresh, float max_grad_norm, float eps, int warmup_steps,"
        " int clip_mode, float clip_factor, bool skip_update_on_spike, bool skip_step_on_spike,"
        " int on_nonfinite",
    ),
    "adagc_": (
        "",
        "float lambda_rel, float beta, float lambda_abs, float eps, int warmup_steps, int seed,"
        " int on_nonfinite",
    ),
    "spike_skip_": (
        "Tensor loss, ",
        "int window, float sigma, int min_count, int on_nonfinite",
    ),
    "auto_clip_": ("", "float percentile, int history, int on_nonfinite"),
}
_FUSED_RESULT = "(Tensor norm, Tensor stats, Tensor coefs, Tensor verdict)"


def _fake_rule(state: Tensor, stats: Tensor, *settings: object) -> tuple[Tensor, Tensor]:
    return empty_judgement(stats, stats.shape[0])


def _fake_fused(
    grads: list[Tensor], state: Tensor, *settings: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_fused(grads, state)


for _name, (_tensors, _settings) in _RULES.items():
    library.define(
        f"{_name}(Tensor(a!) state, Tensor stats, {_tensors}{_settings})"
        " -> (Tensor coefs, Tensor verdict)"
    )
    library.define(
        f"clip_by_{_name}(Tensor(a!)[] grads, Tensor(b!) state, {_tensors}{_settings})"
        f" -> {_FUSED_RESULT}"
    )
    torch.library.register_fake(f"zclip::{_name}", _fake_rule, lib=library)
    torch.library.register_fake(f"zclip::clip_by_{_name}", _fake_fused, lib=library)

library.define(
    "agc_(Tensor(a!)[] grads, Tensor[] params, Tensor(b!) state, float clip, float eps,"
    f" int on_nonfinite) -> {_FUSED_RESULT}"
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
