"""The part that all clippers share: finding gradients, keeping state, one crossing per step.

A subclass says which operators it is made of, which settings they take and what its state looks
like. All arithmetic is in the operators, so that it runs on the device and nothing waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zclip import ops
from zclip.clippers.result import ClipResult, merge_verdicts
from zclip.clippers.state import ClipState
from zclip.layout import NAN, NUM_COUNTERS, ON_NONFINITE, PROPAGATE, SUMSQ, WORST
from zclip.reference import reported_norm
from zclip.schemas import norm_dtype, wide_dtype
from zclip.targets import Target, TargetCache, Targets

Rule = Callable[..., tuple[Tensor, Tensor]]
FusedRule = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class Clipper(ABC):
    """Measures gradients, decides on the device what to do with them, and scales them in place.

    Attributes:
        result: the last step, as :class:`ClipResult`; None before the first.
        per_group: whether every parameter group has statistics and limits of its own.
        on_nonfinite: "skip" refuses a step with NaN or Inf and keeps it out of the statistics;
            "official" does what the published algorithm does.
    """

    is_global: ClassVar[bool] = True
    """Whether one coefficient serves all gradients of a group."""

    is_per_tensor: ClassVar[bool] = False
    """Whether the state has an entry for every parameter, with a gradient or without."""

    fields: ClassVar[Mapping[str, int | slice]] = {}
    """Where in the state each named quantity lives, after the three counters."""

    limit_key: ClassVar[str | None] = None
    """The setting that a parameter group may override."""

    def __init__(self, *, per_group: bool = False, on_nonfinite: str = "skip") -> None:
        if on_nonfinite not in self._nonfinite_codes():
            wanted = ", ".join(self._nonfinite_codes())
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}; wanted one of {wanted}")
        self.per_group = per_group
        self.on_nonfinite = on_nonfinite
        self.result: ClipResult | None = None
        self._state = ClipState(self)
        self._cache = TargetCache()
        self._present: list[int] | None = None

    @abstractmethod
    def _ops(self) -> tuple[Rule, FusedRule]:
        """Return the operator that decides from stats, and the one that does everything."""

    @abstractmethod
    def _settings(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the scalar arguments of both operators for one parameter group."""

    def _state_size(self, num_tensors: int) -> int:
        """Return the length of the state of one group."""
        return NUM_COUNTERS

    def _size_hint(self) -> str:
        """Say which setting the length of the state hangs on."""
        return "call reset() after changing it"

    def _adapted(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a saved state of one group, made to fit where settings have changed."""
        return saved

    def _measured(self, loss: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor arguments between stats and settings."""
        return ()

    def _nonfinite_codes(self) -> Mapping[str, int]:
        return ON_NONFINITE

    @torch.no_grad()
    def step(
        self, *targets: Target, loss: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> Tensor:
        """Clip the gradients in place; call it after ``backward`` and before ``optimizer.step``.

        Nothing waits for the device. A parameter without a gradient is left out; if none has one,
        nothing happens and nothing is counted. Call it once per step: give several models in one
        call, not in several.

        Args:
            targets: a model, several of them, parameters (a list, a generator or
                ``named_parameters()``), or groups as in ``optimizer.param_groups``.
            loss: 0-dim, of this step, for clippers that look at it.
            grad_scale: 0-dim; the gradients are so many times too large, as under a GradScaler,
                and are divided by it first.

        Returns:
            The norm of all gradients before clipping, 0-dim, on the device of the first; float64
            if a gradient is, else float32.

        Raises:
            TypeError: a gradient is sparse, complex or a DTensor, or a target not a parameter.
        """
        found, grads = self._gather(targets)
        if not grads:
            return self._nothing(found)
        if grad_scale is not None:
            ops.scale_(grads, _inverse(grad_scale, grads[0].device).repeat(len(grads)))
        result = self._clip_at_once(found, grads, loss) if len(self._state.states) == 1 else None
        if result is None:
            result = self._decide(found, grads, loss, None)
            ops.scale_(grads, result.coefs)
        self.result = result
        return result.total_norm

    @torch.no_grad()
    def decide(
        self, *targets: Target, loss: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> ClipResult | None:
        """Do all of :meth:`step` but scale: for those who apply the coefficients elsewhere.

        Returns:
            The result, also kept in ``result``; None if no parameter has a gradient.
        """
        found, grads = self._gather(targets)
        if not grads:
            self._nothing(found)
            return None
        self.result = self._decide(found, grads, loss, grad_scale)
        return self.result

    def bind(self, *targets: Target) -> None:
        """Learn the parameters before the first step, so that a loaded state is checked at once."""
        found = self._cache.find(targets)
        self._state.fit(found, found.params[0].device if found.params else torch.device("cpu"))

    def norms_by_name(self) -> dict[str, Tensor]:
        """Return the norm of every gradient of the last step, 0-dim tensors on the device."""
        if self.result is None:
            return {}
        return dict(zip(self._names(), self.result.norms.unbind(), strict=True))

    def worst(self) -> str | None:
        """Return the name of the first tensor with NaN or Inf, else of the largest. This waits."""
        if self.result is None:
            return None
        return self._names()[int(self.result.verdict[WORST])]

    def reset(self) -> None:
        """Forget all statistics and counts, as if newly made."""
        self._state.reset()
        self.result = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all statistics and counts, as tensors on the device; nothing waits."""
        return self._state.save()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; settings stay as they are.

        Raises:
            ValueError: the state does not fit this clipper or its parameters; says what differs.
                If no parameters are known yet, theirs are compared in the first step.
        """
        self._state.load(state_dict)
        self.result = None

    def _gather(self, targets: tuple[Target, ...]) -> tuple[Targets, list[Tensor]]:
        found = self._cache.find(targets)
        grads, self._present = found.gradients(aligned=self.is_per_tensor)
        if grads:
            self._state.fit(found, grads[0].device)
        return found, grads

    def _nothing(self, found: Targets) -> Tensor:
        self.result = None
        return torch.zeros((), device=found.params[0].device if found.params else None)

    def _clip_at_once(
        self, found: Targets, grads: list[Tensor], loss: Tensor | None
    ) -> ClipResult | None:
        """One group, one device, one call; None if there are several devices."""
        state = self._state.states[0]
        arguments = (*self._measured(loss, state), *self._settings(found.settings[0]))
        served = ops.serve(self._ops()[1], grads, state, *arguments, name=self._name)
        return ClipResult(*served[0]) if served else None

    def _decide(
        self,
        found: Targets,
        grads: list[Tensor],
        loss: Tensor | None,
        grad_scale: Tensor | None,
    ) -> ClipResult:
        """Any number of groups and devices: the same operators, one at a time."""
        stats = ops.grad_stats(grads)
        if grad_scale is not None:
            stats[:, SUMSQ] *= _inverse(grad_scale, stats.device).square()
        states = self._state.states
        sizes = found.sizes_of(self._present) if len(states) > 1 else [len(grads)]
        coefs, verdicts = [], []
        for group, rows in enumerate(self._shared_alarm(stats, sizes)):
            if not len(rows):
                continue
            settings = self._settings(found.settings[group])
            measured = self._measured(loss, states[group])
            coef, verdict = self._ops()[0](states[group], rows, *measured, *settings)
            coefs.append(coef)
            verdicts.append(verdict)
        if self._state.counters is not None:
            verdict = merge_verdicts(verdicts, stats, self._state.counters)
        norm = reported_norm(stats, PROPAGATE).to(norm_dtype(grads))
        return ClipResult(norm, stats, torch.cat(coefs), verdict)

    def _shared_alarm(self, stats: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        """Split the stats by group, and let every group know of a bad element in any.

        The step is refused as a whole, so no group may learn from it.
        """
        parts = torch.split(stats, sizes)
        if len(parts) == 1 or self.on_nonfinite != "skip":
            return parts
        bad = stats[:, NAN:].sum(dim=0)
        told = []
        for part in parts:
            rows = part.clone()
            rows[:1, NAN:] += bad - part[:, NAN:].sum(dim=0)
            told.append(rows)
        return tuple(told)

    def _name(self, i: int) -> str:
        return f"the gradient of {self._names()[i]}"

    def _names(self) -> list[str]:
        targets = self._cache.targets
        assert targets is not None
        return targets.names if self._present is None else [targets.names[i] for i in self._present]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the parameters and the last result: they belong to the run, not to us."""
        return {**self.__dict__, "_cache": TargetCache(), "_present": None, "result": None}


def _inverse(grad_scale: Tensor, device: torch.device) -> Tensor:
    return grad_scale.to(device, wide_dtype(device), non_blocking=True).reciprocal()
