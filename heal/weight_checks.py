"""Measures weights, optimizer state and buffers on the device, and mails what it found."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zclip
from heal.buffers import BufferCopies, Key, local_part
from heal.causes import Cause
from heal.integrity import MEASURED
from heal.ranks import Ranks
from heal.training_state import TrainingState
from heal.verdict import HealthRow
from zclip import ClippedOptimizer
from zclip.layout import NAN, SUMSQ

NOTHING = -1.0  # stands for a moment or a step count that the optimizer does not keep (yet)


class HealthCheck:
    """Posts a row of norms and counts; the row is read ``lag`` steps later, when it has landed.

    One in host memory may be read at once: the sooner damage is found, the fewer steps are undone.

    Args:
        optimizers: whose parameters and state are measured.
        names: of the parameters, by identity.
        buffers: those that forward writes are checked for NaN, running statistics for Inf as well.
        lag: steps after which a row may be read.
        ranks: who measure together, so that all of them find the same: shards add up, and what
            is corrupt on one replica is in the mean of all.
        waits: whether rows in host memory wait as well, for a forecast that learned from such.
    """

    def __init__(
        self,
        optimizers: Sequence[ClippedOptimizer],
        names: dict[int, str],
        buffers: BufferCopies,
        lag: int,
        ranks: Ranks,
        waits: bool = False,
    ) -> None:
        self._waits = waits
        self._optimizers = optimizers
        self._names = names
        self._buffers = buffers
        self._lag = lag
        self._ranks = ranks
        self._sent: list[tuple[int, int, zclip.Mailbox, _Layout]] = []

    @torch.no_grad()
    def post(self, step: int) -> None:
        """Measure now. The row tells of the state before ``step``."""
        weights, moments, owners, counters = self._gather()
        if not weights:
            return
        statistics, others = self._buffers.statistics(), self._buffers.without_nan()
        checked = {**statistics, **others}
        measured = len(weights) + len(moments)
        stats = zclip.grad_stats([*weights, *moments, *(b.detach() for b, _ in checked.values())])
        bad = stats[:, NAN:].sum(dim=1)
        if checked:
            first_other = measured + len(statistics)
            bad[first_other:] = stats[first_other:, NAN]
            were_bad = [
                was_bad.to(bad.device, non_blocking=True) for _, was_bad in checked.values()
            ]
            bad[measured:] *= torch.stack(were_bad).logical_not()
        counted = counters.to(stats, non_blocking=True)
        told = self._ranks.mean(torch.cat([stats[:measured, SUMSQ], bad, counted]))
        told[:measured].sqrt_()
        told = told.float()
        mailbox = zclip.Mailbox(lag=0, width=told.numel())
        mailbox.post(step, told)
        names = tuple(name for name, _ in self._named_parameters())
        due = step if told.is_cpu and not self._waits else step + self._lag
        layout = _Layout(owners, names, tuple(checked))
        self._sent.append((step, due, mailbox, layout))

    def read(self, step: int) -> list[HealthRow]:
        """Return the rows that are due by now."""
        rows = []
        while self._sent and self._sent[0][1] <= step:
            at, _, mailbox, layout = self._sent.pop(0)
            for _, values in mailbox.poll():
                rows.append(_decode(at, values, layout))
        return rows

    @property
    def is_under_way(self) -> bool:
        """Whether a row was posted that was not read yet."""
        return bool(self._sent)

    def clear(self) -> None:
        """Forget what is under way: after a rollback it speaks of no state."""
        self._sent.clear()

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        """Those that are trained; the name tells each from all others, frozen ones too."""
        params = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        return [
            (self._names.get(id(p), f"parameter {i}"), p)
            for i, p in enumerate(params)
            if p.requires_grad and p.dtype in MEASURED
        ]

    def _gather(self) -> tuple[list[Tensor], list[Tensor], list[int], Tensor]:
        """Weights, moments, the weight that each moment belongs to, and all step counts."""
        weights: list[Tensor] = []
        moments: list[Tensor] = []
        owners: list[int] = []
        counters: list[Tensor | float] = []
        for _, param in self._named_parameters():
            states = (o.state[param] for o in self._optimizers if param in o.state)
            state: dict[str, Any] = next(states, {})
            counter: Tensor | float = NOTHING
            for name, value in state.items():
                if name == "step":
                    counter = value
                elif isinstance(value, Tensor) and value.dtype in MEASURED:
                    moments.append(_local(value))
                    owners.append(len(weights))
            counters.append(counter)
            weights.append(_local(param))
        return weights, moments, owners, _stacked(counters)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the numbers of a row are of."""

    owners: list[int]  # the weight that each moment belongs to
    names: tuple[str, ...]
    buffers: tuple[str, ...]


def _decode(step: int, values: Sequence[float], layout: _Layout) -> HealthRow:
    count = len(layout.names)
    measured = count + len(layout.owners)
    counted = 2 * measured + len(layout.buffers)
    norms, bad = values[:measured], values[measured:counted]
    squares = [NOTHING] * count
    moment_bad = [0] * count
    for moment, owner in enumerate(layout.owners):
        squares[owner] = max(0.0, squares[owner]) + norms[count + moment] ** 2
        moment_bad[owner] += _count(bad[count + moment])
    return HealthRow(
        step=step,
        weight_norms=tuple(norms[:count]),
        weight_bad=tuple(_count(b) for b in bad[:count]),
        moment_norms=tuple(math.sqrt(s) if s >= 0 else s for s in squares),
        moment_bad=tuple(moment_bad),
        step_counters=tuple(values[counted:]),
        names=layout.names,
        buffer_bad=tuple(_count(b) for b in bad[measured:]),
        buffer_names=layout.buffers,
    )


def _count(value: float) -> int:
    """How many; one at least if any rank has one, for a mean may be less."""
    return math.ceil(value) if math.isfinite(value) else 1


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def _stacked(counters: Sequence[Tensor | float]) -> Tensor:
    """One tensor of all counts; on the device only if the optimizer keeps them there."""
    tensors = [c for c in counters if isinstance(c, Tensor)]
    if not tensors:
        return torch.tensor([float(c) for c in counters])
    device = tensors[0].device
    rows = [
        c.detach().reshape(()).to(device, torch.float32, non_blocking=True)
        if isinstance(c, Tensor)
        else torch.full((), float(c), device=device)
        for c in counters
    ]
    return torch.stack(rows)


# A look at the whole state for NaN and Inf, when something says that there may be some.
#
# Corrupt weights show first as something else: a NaN loss, an exception where a model samples from
# its output, an index out of range. Skipping such a batch, or lowering the learning rate, cures
# nothing. Unlike the checks in between steps this waits for the device.


@torch.no_grad()
def find_corruption(state: TrainingState) -> dict[str, Any] | None:
    """Return where a state holds NaN or Inf that must not be there; None if it holds none.

    Of several the one that explains the others comes first: weights, then buffers, then moments.

    Returns:
        ``cause``, the name of the first ``tensor``, how many ``tensors`` and how many ``elements``
        of the first are bad.
    """
    strict = {("buffer", name) for name in state.buffers.statistics()}
    lenient = state.without_nan()
    kinds: dict[Key, int] = {}
    tensors = {}
    for key, tensor in state.tensors().items():
        part = local_part(tensor)
        if part.dtype not in MEASURED or not part.numel():
            continue
        if key[0] in ("parameter", "state") or key in strict or key in lenient:
            tensors[key] = part
            kinds[key] = ("parameter", "buffer", "state").index(str(key[0]))
    if not tensors:
        return None
    rows = zclip.grad_stats(list(tensors.values()))[:, NAN:].tolist()
    bad: list[tuple[int, Key, int]] = []
    for (key, tensor), (num_nan, num_inf) in zip(tensors.items(), rows, strict=True):
        count = num_nan if key in lenient else num_nan + num_inf
        if count and not (key in lenient and bool(lenient[key].to(tensor.device))):
            bad.append((kinds[key], key, int(count)))
    if not bad:
        return None
    kind, key, count = min(bad, key=lambda entry: entry[0])
    is_state = key[0] == "state"
    cause = Cause.OPTIMIZER_CORRUPTION if is_state else Cause.WEIGHT_CORRUPTION
    return {
        "cause": cause.value,
        "tensor": _shown(state, key),
        "tensors": sum(entry[0] == kind for entry in bad),
        "elements": count,
    }


def _shown(state: TrainingState, key: Key) -> str:
    if key[0] == "state":
        groups = state.optimizers[int(key[1])].param_groups
        param = [p for group in groups for p in group["params"]][int(key[2])]
        names = (name for name, p in state.model.named_parameters() if p is param)
        return f"{key[3]} of {next(names, f'parameter {key[2]}')}"
    return state.name_of(key).removeprefix("parameter ")
