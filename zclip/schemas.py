"""Every operator's schema and fake implementation: the one place where an op is declared.

Nothing here computes. ``csrc/`` fills the CPU key, and ``reference.py`` answers for every device
that no backend serves.
"""

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors
from zclip.layout import NUM_STATS, NUM_VERDICT

library = torch.library.Library("zclip", "DEF")

library.define("grad_stats(Tensor[] grads) -> Tensor")
library.define("power_stats(Tensor[] grads, float p) -> Tensor")
library.define(
    "global_norm_(Tensor(a!) state, Tensor stats, float max_norm, int nonfinite)"
    " -> (Tensor coefs, Tensor verdict)"
)
library.define("scale_(Tensor(a!)[] grads, Tensor coefs) -> ()")
library.define("zero_nonfinite_(Tensor(a!)[] grads, Tensor stats) -> ()")
library.define("clamp_(Tensor(a!)[] grads, float limit) -> ()")
library.define(
    "clip_by_global_norm_(Tensor(a!)[] grads, Tensor(b!) state, float max_norm, int nonfinite)"
    " -> (Tensor norm, Tensor stats, Tensor coefs, Tensor verdict)"
)
library.define("read_probe(Tensor[] tensors) -> Tensor")
library.define("native_features() -> int")


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of stats, coefs and state: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm_dtype(grads: list[Tensor]) -> torch.dtype:
    """Return the dtype of a total norm: float64 if a gradient is, else float32."""
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _checked(tensors: list[Tensor]) -> None:
    check_tensors(tensors)
    check_one_device(tensors)


def _empty_stats(grads: list[Tensor]) -> Tensor:
    _checked(grads)
    return grads[0].new_empty((len(grads), NUM_STATS), dtype=wide_dtype(grads[0].device))


def _fake_rule(like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    coefs = like.new_empty(count, dtype=wide_dtype(like.device))
    return coefs, like.new_empty(NUM_VERDICT, dtype=torch.float32)


@torch.library.register_fake("zclip::grad_stats", lib=library)
def _grad_stats(grads: list[Tensor]) -> Tensor:
    return _empty_stats(grads)


@torch.library.register_fake("zclip::power_stats", lib=library)
def _power_stats(grads: list[Tensor], p: float) -> Tensor:
    return _empty_stats(grads)


@torch.library.register_fake("zclip::global_norm_", lib=library)
def _global_norm_(
    state: Tensor, stats: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor]:
    return _fake_rule(stats, stats.shape[0])


@torch.library.register_fake("zclip::scale_", lib=library)
def _scale_(grads: list[Tensor], coefs: Tensor) -> None:
    _checked(grads)


@torch.library.register_fake("zclip::zero_nonfinite_", lib=library)
def _zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    _checked(grads)


@torch.library.register_fake("zclip::clamp_", lib=library)
def _clamp_(grads: list[Tensor], limit: float) -> None:
    _checked(grads)


@torch.library.register_fake("zclip::clip_by_global_norm_", lib=library)
def _clip_by_global_norm_(
    grads: list[Tensor], state: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats = _empty_stats(grads)
    norm = state.new_empty((), dtype=norm_dtype(grads))
    return norm, stats, *_fake_rule(state, len(grads))
