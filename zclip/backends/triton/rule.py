"""Triton backend of zclip::rule_ and zclip::clip_by_, for every rule.

The kernel of a rule is ``launch`` in the file of its name in this folder. A rule without one is
answered by its reference, between our own measuring and scaling. Fused, that is four launches, two
more per further dtype, whatever the number of tensors: partials, finish, the rule, scale.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from zclip.backends.triton.grad_stats import launch_finish, launch_partials
from zclip.backends.triton.launch import on_device
from zclip.backends.triton.report import check_stats
from zclip.backends.triton.scale_ import launch_scale
from zclip.backends.triton.tensor_list import READ, WRITE, TensorList
from zclip.reference import reported_norm
from zclip.reference.rules import RULES, Clipped, Judged, find_rule, reference_rule_


@functools.cache
def _module_of(number: int) -> ModuleType | None:
    """Return the file with the kernel of a rule; None if there is none, as for rules of users."""
    if number >= len(RULES):
        return None
    name = f"{__package__}.{RULES[number].name}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def rule_(
    state: Tensor,
    stats: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Judged:
    """See :func:`zclip.reference.rule_`."""
    found = find_rule(rule)
    module = _module_of(rule)
    if module is None:
        return reference_rule_(state, stats, rule, settings, loss)
    stats = check_stats(stats, state, "rule_")
    arguments = found.arguments(stats, settings, loss)
    with on_device(stats.device):
        _, coefs, verdict = module.launch(state, stats, torch.float32, **arguments)
    return coefs, verdict


def clip_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Clipped:
    """See :func:`zclip.reference.clip_by_`."""
    found = find_rule(rule)
    module = _module_of(rule)
    if module is not None and hasattr(module, "clip_by"):
        clipped: Clipped = module.clip_by(grads, state, **found.typed(settings))
        return clipped
    tensors = TensorList(grads, WRITE)
    with on_device(tensors.table.device):
        norm, stats, coefs, verdict = _decide(tensors, state, rule, settings, loss)
        launch_scale(tensors.table, coefs)
        tensors.write_back()
    return norm, stats, coefs, verdict


def decide_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Clipped:
    """See :func:`zclip.reference.decide_by_`."""
    tensors = TensorList(grads, READ)
    with on_device(tensors.table.device):
        return _decide(tensors, state, rule, settings, loss)


def _decide(
    tensors: TensorList,
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None,
) -> Clipped:
    found, module, table = find_rule(rule), _module_of(rule), tensors.table
    slots, _ = launch_partials(table)
    stats = launch_finish(table, slots)
    norm_dtype = torch.float64 if table.has_float64 else torch.float32
    if module is None:
        coefs, verdict = reference_rule_(state, stats, rule, settings, loss)
        norm = reported_norm(stats).to(norm_dtype)
    else:
        arguments = found.arguments(stats, settings, loss)
        norm, coefs, verdict = module.launch(state, stats, norm_dtype, **arguments)
    return norm, stats, coefs, verdict
