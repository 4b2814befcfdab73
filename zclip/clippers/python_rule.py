"""A rule that a user wrote in torch: no compiler, no operator, no table to edit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zclip.clippers.clipper import ClipOp, Clipper, RuleOp
from zclip.layout import NUM_COUNTERS, ON_NONFINITE, REFUSE
from zclip.reference.report import health_of, norms_of, report, reported_norm
from zclip.reference.rules import Clipped, Rule, add_rule, rule_
from zclip.schemas import norm_dtype

Function = Callable[[Tensor, Tensor], Tensor]
"""From stats, float64 [N, 3], and the rule's own state to coefficients."""


class PythonRule(Clipper):
    """Clip by a function of your own, ``stats, state -> coefs``, written in torch.

    It is a clipper like any other: measuring, scaling, counting, verdicts, per-group statistics,
    several ranks, checkpoints and :func:`zclip.wrap` are the library's. The function gets

    - ``stats``: float64 [N, 3], one row per gradient. ``stats[:, SUMSQ]`` is the sum of squares of
      its finite elements; see :mod:`zclip.layout`. All ranks get the same.
    - ``state``: float64 [``state_size``], zeros at first, to be changed in place.

    and returns the coefficients, 0-dim or [N]: each gradient is multiplied by its own. 1 leaves it
    untouched and unread; a negative one skips the whole step. With ``on_nonfinite="skip"`` a step
    with NaN or Inf is skipped whatever the function returns, and its changes to the state are
    undone; so the function need not look for them.

    Everything stays on the device as long as the function reads no value: use ``torch.where``,
    not ``if``; and no ``.item()``. It runs once per step, or once per group with ``per_group``.

    Args:
        function: the rule. To be copied or pickled it has to be importable, or an object with
            ``__call__``.
        state_size: how many numbers the rule remembers.
        per_group: give each parameter group a state and coefficients of its own.
        on_nonfinite: "skip" skips a step with NaN or Inf; "official" leaves it to the function.

    Example:
        >>> def twice_the_average(stats, state):
        ...     norm, mean = stats[:, SUMSQ].sum().sqrt(), state[0]
        ...     coef = torch.where(mean > 0, (2 * mean / norm).clamp(max=1.0), 1.0)
        ...     mean.copy_(torch.where(mean > 0, 0.99 * mean + 0.01 * norm * coef, norm))
        ...     return coef
        >>> clipper = zclip.PythonRule(twice_the_average, state_size=1)
        >>> optimizer = zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True), clipper)
    """

    is_global: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, int | slice]] = {"state": slice(NUM_COUNTERS, None)}

    def __init__(
        self,
        function: Function,
        state_size: int = 0,
        *,
        per_group: bool = False,
        on_nonfinite: str = "skip",
    ) -> None:
        if not callable(function):
            raise TypeError(f"function: expected a function of stats and state, got {function!r}")
        if state_size < 0:
            raise ValueError(f"state_size: expected 0 or more, got {state_size}")
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        self.function = function
        self.own_size = int(state_size)
        self._numbered = _numbered(function)

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the one setting that every rule of a user has."""
        return (ON_NONFINITE[self.on_nonfinite],)

    def state_size(self, num_tensors: int) -> int:
        """Return the length of the counters and of the rule's own state."""
        return NUM_COUNTERS + self.own_size

    def size_hint(self) -> str:
        """Return the setting that the length of the state depends on."""
        return f"state_size is {self.own_size}"

    def rule_id(self) -> int:
        """Return the number under which the operators find the function."""
        return self._numbered[0]

    def operators(self) -> tuple[RuleOp, ClipOp]:
        """Return the two operators in Python, so that an error of the function keeps its traceback.

        ``torch.ops.zclip.clip_by_`` would serve as well, by a call from C++ into Python.
        """
        return rule_, _clip_by_

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the number: another process counts from the start."""
        return {**super().__getstate__(), "_numbered": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Get a number for the copy."""
        self.__dict__.update(state)
        self._numbered = _numbered(self.function)


def _clip_by_(
    grads: list[Tensor],
    state: Tensor,
    rule: int,
    settings: Sequence[float],
    loss: Tensor | None = None,
) -> Clipped:
    stats = torch.ops.zclip.grad_stats.default(grads)
    coefs, verdict = rule_(state, stats, rule, settings, loss)
    torch.ops.zclip.scale_.default(grads, coefs)
    return reported_norm(stats).to(norm_dtype(grads)), stats, coefs, verdict


def _numbered(function: Function) -> tuple[int, Rule]:
    """Return the function as a rule, and its number; the rule must be held to keep the number."""

    def python_rule_(state: Tensor, stats: Tensor, on_nonfinite: int) -> tuple[Tensor, Tensor]:
        return _apply(function, state, stats, on_nonfinite)

    rule = Rule(getattr(function, "__name__", type(function).__name__), python_rule_)
    return add_rule(rule), rule


def _apply(
    function: Function, state: Tensor, stats: Tensor, on_nonfinite: int
) -> tuple[Tensor, Tensor]:
    count, own = stats.shape[0], state[NUM_COUNTERS:]
    before = own.clone()
    health, norms = health_of(stats), norms_of(stats)
    coefs = function(stats.clone(), own)
    if not isinstance(coefs, Tensor) or coefs.shape not in ((), (count,)):
        got = tuple(coefs.shape) if isinstance(coefs, Tensor) else type(coefs).__name__
        raise ValueError(
            f"the rule's result: expected a tensor of shape () or ({count},), one coefficient "
            f"for all gradients or one each, got {got}"
        )
    coefs = coefs.detach().to(stats).expand(count)
    bad = health.refused(on_nonfinite)
    own.copy_(torch.where(bad, before, own))
    skipped = bad | (coefs < 0.0).any()
    coefs = torch.where(skipped, REFUSE, coefs)
    verdict = report(
        state,
        stats,
        health,
        blocked=skipped,
        clipped=~skipped & ~(coefs >= 1.0).all(),
        clipped_norm=torch.where(skipped, 0.0, (norms * coefs).square().sum().sqrt()),
    )
    return coefs.clone(), verdict
