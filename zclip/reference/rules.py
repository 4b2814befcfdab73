"""Every clip rule, once, and the two operators that serve all of them.

A backend without code for a rule calls :func:`reference_rule_`, so that a new rule works everywhere
as soon as its reference stands here.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from zclip.checks import check_writable
from zclip.layout import PROPAGATE, ZERO
from zclip.reference.adagc import adagc_
from zclip.reference.auto_clip import auto_clip_
from zclip.reference.global_norm import global_norm_
from zclip.reference.grad_stats import grad_stats
from zclip.reference.report import reported_norm
from zclip.reference.scale import scale_, zero_nonfinite_
from zclip.reference.spike_skip import spike_skip_
from zclip.reference.zclip import zclip_
from zclip.schemas import norm_dtype

Judged = tuple[Tensor, Tensor]
"""Coefs and verdict."""

Clipped = tuple[Tensor, Tensor, Tensor, Tensor]
"""Norm before clipping (float64 if a gradient is), stats, coefs, verdict."""

_ARGUMENTS = ("state", "stats", "loss")  # of a reference; all others are settings


class Rule:
    """A rule by its reference, a function of ``state, stats, [loss,] *settings``.

    Settings travel as floats; the annotations of the reference say what they are: float, int or
    bool. A setting called ``nonfinite`` is what becomes of NaN and Inf in the gradients themselves.

    Attributes:
        name: of the rule, and of its files in every folder.
        settings: their names, in order, and their types.
        takes_loss: whether the reference looks at the loss.
    """

    def __init__(self, name: str, reference: Callable[..., Judged]) -> None:
        parameters = inspect.signature(reference).parameters
        self.name = name
        self.reference = reference
        self.takes_loss = "loss" in parameters
        self.settings: dict[str, Callable[[float], Any]] = {
            name: p.annotation for name, p in parameters.items() if name not in _ARGUMENTS
        }

    def typed(self, settings: Sequence[float]) -> dict[str, Any]:
        """Return the settings by name, as what they are.

        Raises:
            RuntimeError: there are not as many as the rule has.
        """
        if len(settings) != len(self.settings):
            raise RuntimeError(
                f"{self.name}: expected {len(self.settings)} settings "
                f"({', '.join(self.settings)}), got {len(settings)}"
            )
        named = zip(self.settings.items(), settings, strict=True)
        return {name: kind(value) for (name, kind), value in named}

    def arguments(
        self, stats: Tensor, settings: Sequence[float], loss: Tensor | None
    ) -> dict[str, Any]:
        """Return what the reference takes besides state and stats, by name."""
        typed = self.typed(settings)
        if not self.takes_loss:
            return typed
        return {"loss": stats.new_empty(0) if loss is None else loss, **typed}


RULES = (
    Rule("global_norm", global_norm_),
    Rule("zclip", zclip_),
    Rule("adagc", adagc_),
    Rule("spike_skip", spike_skip_),
    Rule("auto_clip", auto_clip_),
)
"""The number of a rule is its place here; ``csrc/math/rules.h`` has the same numbers."""

IDS = {rule.name: number for number, rule in enumerate(RULES)}

_FIRST_OWN = 1 << 16  # rules of users are numbered from here, in each process again
_own_numbers = itertools.count(_FIRST_OWN)
_own_rules: WeakValueDictionary[int, Rule] = WeakValueDictionary()


def add_rule(rule: Rule) -> int:
    """Give a rule that is not of this library a number, for as long as the rule exists."""
    number = next(_own_numbers)
    _own_rules[number] = rule
    return number


def find_rule(number: int) -> Rule:
    """Return a rule by its number.

    Raises:
        RuntimeError: there is none.
    """
    if 0 <= number < len(RULES):
        return RULES[number]
    rule = _own_rules.get(number)
    if rule is None:
        raise RuntimeError(
            f"rule: expected 0 to {len(RULES) - 1}, or the number of a PythonRule that still "
            f"exists, got {number}"
        )
    return rule


def rule_(
    state: Tensor,
    stats: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Judged:
    """Choose one coefficient per gradient, and say why."""
    found = find_rule(rule)
    return found.reference(state, stats, **found.arguments(stats, settings, loss))


def reference_rule_(
    state: Tensor,
    stats: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Judged:
    """Do as :func:`rule_`, for a backend that has no code for this rule."""
    return rule_(state, stats, rule, settings, loss)


def clip_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Clipped:
    """Measure, choose and scale in one call, made of the separate operators."""
    check_writable(grads)
    norm, stats, coefs, verdict = decide_by_(grads, state, rule, settings, loss)
    if find_rule(rule).typed(settings).get("nonfinite", PROPAGATE) == ZERO:
        zero_nonfinite_(grads, stats)
    scale_(grads, coefs)
    return norm, stats, coefs, verdict


def decide_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Clipped:
    """Measure and choose in one call; the gradients are only read."""
    nonfinite = find_rule(rule).typed(settings).get("nonfinite", PROPAGATE)
    stats = grad_stats(grads)
    coefs, verdict = rule_(state, stats, rule, settings, loss)
    return reported_norm(stats, nonfinite).to(norm_dtype(grads)), stats, coefs, verdict
