"""The specification: each operator in plain torch, written to be read, not to be fast.

Backends are tested against these functions. They also answer on every device that has no kernels
of ours, so they must not wait for it: no value is read here, only tensors are made of tensors.
"""

from zclip.reference.adagc import adagc_
from zclip.reference.agc import agc_
from zclip.reference.auto_clip import auto_clip_
from zclip.reference.fingerprint import copy_and_hash_, fingerprint
from zclip.reference.global_norm import global_norm_
from zclip.reference.grad_stats import grad_stats, power_stats, read_probe
from zclip.reference.optim_update import optim_update_
from zclip.reference.report import reported_norm
from zclip.reference.rules import (
    IDS,
    RULES,
    Rule,
    clip_by_,
    decide_by_,
    reference_rule_,
    rule_,
)
from zclip.reference.scale import clamp_, scale_, zero_nonfinite_
from zclip.reference.spike_skip import spike_skip_
from zclip.reference.watch_loss import watch_loss_
from zclip.reference.zclip import zclip_


def native_features() -> int:
    """Return the features of the compiled extension: none of them."""
    return 0


__all__ = [
    "IDS",
    "RULES",
    "Rule",
    "adagc_",
    "agc_",
    "auto_clip_",
    "clamp_",
    "clip_by_",
    "copy_and_hash_",
    "decide_by_",
    "fingerprint",
    "global_norm_",
    "grad_stats",
    "native_features",
    "optim_update_",
    "power_stats",
    "read_probe",
    "reference_rule_",
    "reported_norm",
    "rule_",
    "scale_",
    "spike_skip_",
    "watch_loss_",
    "zclip_",
    "zero_nonfinite_",
]
