"""Whether a state is sound: hashes of its bits, and where it holds NaN or Inf.

:class:`HealthCheck` measures weights, optimizer state and buffers on the device between steps, and
:class:`Constants` hashes what steps should not change. :func:`find_corruption` looks at everything
at once, and waits for the device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import zclip
from heal.buffers import STATISTICS, BufferCopies, Key, copy_and_hash, is_run_of_bytes, local_part
from heal.causes import Cause
from heal.ranks import Ranks
from heal.record import HealthRow
from heal.training_state import TrainingState, copy_by_kind, optimized
from zclip import ClippedOptimizer
from zclip.layout import NAN, SUMSQ
from zclip.ops import by_device

MEASURED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # by grad_stats
HALF = (torch.bfloat16, torch.float16)  # whose own range a sum may leave
LEAST_BYTES = 4 << 20  # hashed with every snapshot, however small it is: half a millisecond
NOTHING = -1.0  # stands for a moment or a step count that the optimizer does not keep (yet)
KINDS = ("parameter", "buffer", "state")  # of corrupt tensors; the first explains the others


def copy_on_host(
    copies: Mapping[Key, Tensor],
    tensors: Mapping[Key, Tensor],
    without_nan: Mapping[Key, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy tensors; return their hashes, and how many are bad as :func:`count_bad` has it.

    What is one run of bytes is read once.
    """
    may_hold_inf = without_nan or {}
    runs = [key for key, tensor in tensors.items() if is_run_of_bytes(copies[key], tensor)]
    rows = copy_and_hash([copies[k] for k in runs], [tensors[k] for k in runs])
    hashes, are_bad = rows.unbind(dim=1)
    bad, num_bad = [k for k, is_bad in zip(runs, are_bad.tolist(), strict=True) if is_bad], 0
    if bad:
        num_bad = sum(must_be_finite(key, tensors[key]) for key in bad)
        num_bad += int(count_bad(((k, tensors[k]) for k in bad if k in may_hold_inf), may_hold_inf))
    if len(runs) < len(tensors):
        copied = set(runs)
        others = [key for key in tensors if key not in copied]
        copy_by_kind([copies[k] for k in others], [tensors[k] for k in others], non_blocking=False)
        known = dict(zip(runs, hashes.tolist(), strict=True))
        known |= zip(others, fingerprints(tensors[k] for k in others).tolist(), strict=True)
        num_bad += int(count_bad(((k, tensors[k]) for k in others), without_nan))
        hashes = torch.tensor([known[key] for key in tensors], dtype=torch.int64)
    return hashes, torch.tensor(num_bad)


def must_be_finite(key: Key, tensor: Tensor) -> bool:
    """Return whether NaN or Inf in it is a fault. Masks may hold Inf, running statistics not."""
    if tensor.dtype not in MEASURED:
        return False
    return key[0] in ("parameter", "state") or (
        key[0] == "buffer" and str(key[1]).rpartition(".")[2] in STATISTICS
    )


def fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """Hash each tensor: int64 [N], on the device of the first; nothing waits."""
    listed = list(tensors)
    if not listed:
        return torch.empty(0, dtype=torch.int64)
    members = by_device(listed)
    parts = {
        device: torch.ops.zclip.fingerprint([listed[i] for i in indices])
        for device, indices in members.items()
    }
    if len(parts) == 1:
        only: Tensor = next(iter(parts.values()))
        return only
    rows: list[Tensor] = [listed[0]] * len(listed)
    for device, indices in members.items():
        moved = parts[device].to(listed[0].device, non_blocking=True)
        for i, row in zip(indices, moved.unbind(), strict=True):
            rows[i] = row
    return torch.stack(rows)


def count_bad(
    tensors: Iterable[tuple[Key, Tensor]], without_nan: Mapping[Key, Tensor] | None = None
) -> Tensor:
    """Count parameters, moments and buffers with NaN or Inf where it must not be; nothing waits.

    A sum is finite only if all it adds up is. It reads memory at full speed whatever the numbers;
    sums of squares do not where they underflow, as those of second moments may.

    Args:
        tensors: by key; those of other kinds are left out.
        without_nan: keys of buffers that may hold Inf but not NaN, and whether they held it from
            the beginning: then they may.
    """
    found = []
    for key, tensor in tensors:
        if must_be_finite(key, tensor):
            total = tensor.sum(dtype=torch.float32 if tensor.dtype in HALF else None)
            found.append(total.isfinite().logical_not())
        elif without_nan is not None and key in without_nan:
            held_before = without_nan[key].to(tensor.device, non_blocking=True)
            found.append(tensor.isnan().any() & ~held_before)
    if not found:
        return torch.zeros((), dtype=torch.int64)
    device = found[0].device
    return torch.stack([one.to(device, non_blocking=True) for one in found]).sum()


class Constants:
    """Fingerprints of what steps should not change: frozen parameters and still buffers.

    Writes in place leave a trace in ``_version``; those through ``.data``, as some moving averages
    are kept, leave none but in the bits themselves. With each snapshot at most as many bytes are
    hashed as it has itself: a base model of many gigabytes takes many snapshots to go round. On a
    device nothing waits: what one look finds is read at the next.

    What is not constant after all becomes a part of ``state``, and ``note`` gets a text.
    """

    def __init__(self, state: TrainingState, note: Callable[[str], None]) -> None:
        self._state = state
        self._note = note
        self._known: dict[int, Tensor] = {}  # by identity: int64 []
        self._next = 0
        self._sent: tuple[zclip.Mailbox, list[Key]] | None = None

    def look(self, step: int) -> None:
        """Notice what is written in place, hash some of the rest, and note what has changed."""
        self._state.notice_changes()
        constants = self._state.constants()
        if constants:
            num_bytes = sum(tensor.nbytes for tensor in self._state.tensors().values())
            self.count_as_changing(self._look(step, constants, num_bytes))

    def changed(self) -> list[Key]:
        """Return those that are not what they were when last looked at; waits for the device."""
        constants = self._state.constants()
        known = [(key, tensor) for key, tensor in constants if id(tensor) in self._known]
        now = fingerprints(local_part(tensor) for _, tensor in known).tolist()
        before = (int(self._known[id(tensor)]) for _, tensor in known)
        return [key for (key, _), a, b in zip(known, before, now, strict=True) if a != b]

    def corrupt(self, keys: Sequence[Key]) -> str:
        """Return which of them holds NaN or Inf and must not; empty if none does."""
        constants = dict(self._state.constants())
        for key in keys:
            if int(count_bad([(key, local_part(constants[key]))])):
                return self._state.name_of(key)
        return ""

    def count_as_changing(self, keys: Sequence[Key], but: str = "") -> None:
        """Have snapshots hold these from now on, and note it."""
        constants = {key for key, _ in self._state.constants()}
        for key in keys:
            if key in constants:
                name = self._state.name_of(key)
                self._state.count_as_changing(key)
                self._note(f"{name} is not trained and yet changes{but}; snapshots hold it now")

    def forget(self) -> None:
        """Start over: the run was given another state."""
        self._known.clear()
        self._sent = None

    def _look(self, step: int, named: Sequence[tuple[Key, Tensor]], num_bytes: int) -> list[Key]:
        """Hash as many as may be; tensors are not cut, so it may be one more."""
        changed = self._read()
        self._known = {id(t): h for _, t in named if (h := self._known.get(id(t))) is not None}
        new = [(key, tensor) for key, tensor in named if id(tensor) not in self._known]
        part = [
            pair
            for pair in self._part(named, max(num_bytes, LEAST_BYTES))
            if id(pair[1]) in self._known
        ]
        self._learn(new)
        if part:
            before = torch.stack([self._known[id(tensor)] for _, tensor in part])
            self._learn(part)
            after = torch.stack([self._known[id(tensor)] for _, tensor in part])
            mailbox = zclip.Mailbox(lag=0, width=len(part))
            mailbox.post(step, (before != after).float())
            self._sent = mailbox, [key for key, _ in part]
            if after.is_cpu:
                changed += self._read()
        return changed

    def _learn(self, pairs: Sequence[tuple[Key, Tensor]]) -> None:
        tensors = [tensor for _, tensor in pairs]
        rows = fingerprints(map(local_part, tensors)).unbind() if tensors else ()
        self._known.update((id(t), row) for t, row in zip(tensors, rows, strict=True))

    def _part(
        self, named: Sequence[tuple[Key, Tensor]], num_bytes: int
    ) -> Iterator[tuple[Key, Tensor]]:
        """Go on where the last part ended, once round at most."""
        for _ in range(len(named)):
            self._next %= len(named)
            pair = named[self._next]
            self._next += 1
            yield pair
            num_bytes -= pair[1].nbytes
            if num_bytes <= 0:
                return

    def _read(self) -> list[Key]:
        if self._sent is None:
            return []
        (mailbox, keys), self._sent = self._sent, None
        rows = mailbox.poll()
        return [key for _, row in rows for key, flag in zip(keys, row, strict=True) if flag > 0]


class HealthCheck:
    """Posts a row of norms and counts; the row is read ``lag`` steps later, when it has landed.

    One in host memory may be read at once: the sooner damage is found, the fewer steps are undone.

    Buffers that forward writes are checked for NaN, running statistics for Inf as well. All ranks
    find the same: shards add up, and what is corrupt on one replica is in the mean of all.

    Args:
        names: of the parameters, by identity.
        waits: whether rows in host memory wait as well, as a forecast expects that learned so.
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
        """Measure now: the state before ``step``."""
        named = self._named_parameters()
        if not named:
            return
        moments, owners, counters = self._optimizer_state([param for _, param in named])
        statistics = self._buffers.statistics()
        checked = {**statistics, **self._buffers.without_nan()}
        grads = [_measurable(param.grad) for _, param in named]
        tensors = [*(param for _, param in named), *moments, *(b for b, _ in checked.values())]
        measured, others = len(named) + len(moments), len(tensors)
        tensors += [grad for grad in grads if grad is not None]
        stats = zclip.grad_stats([local_part(tensor) for tensor in tensors])
        slopes = _with_gaps(stats[others:, SUMSQ], grads)
        stats = stats[:others]
        bad = stats[:, NAN:].sum(dim=1)
        if checked:
            first_other = measured + len(statistics)
            bad[first_other:] = stats[first_other:, NAN]
            were_bad = [b.to(bad.device, non_blocking=True) for _, b in checked.values()]
            bad[measured:] *= torch.stack(were_bad).logical_not()
        counted = counters.to(stats, non_blocking=True)
        squares = stats[:, SUMSQ]
        parts = [squares[:measured], bad, counted, squares[measured:], slopes]
        row = self._ranks.mean(torch.cat(parts))
        for norms in (row[:measured], row[row.numel() - len(checked) - len(named) : -len(named)]):
            norms.sqrt_()
        row = row.float()
        mailbox = zclip.Mailbox(lag=0, width=row.numel())
        mailbox.post(step, row)
        due = step if row.is_cpu and not self._waits else step + self._lag
        sizes = tuple(param.numel() for _, param in named)
        layout = _Layout(owners, tuple(name for name, _ in named), tuple(checked), sizes)
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
        """Forget what is under way: after a rollback it is of no state."""
        self._sent.clear()

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        """Those that are trained; the name sets each apart from all others, frozen ones too."""
        params = [p for optimizer in self._optimizers for p in optimized(optimizer)]
        return [
            (self._names.get(id(p), f"parameter {i}"), p)
            for i, p in enumerate(params)
            if p.requires_grad and p.dtype in MEASURED
        ]

    def _optimizer_state(self, params: Sequence[Tensor]) -> tuple[list[Tensor], list[int], Tensor]:
        """Return moments, the index of the weight that each belongs to, and all step counts."""
        moments: list[Tensor] = []
        owners: list[int] = []
        counters: list[Tensor | float] = []
        for i, param in enumerate(params):
            states = (o.state[param] for o in self._optimizers if param in o.state)
            state: dict[str, Any] = next(states, {})
            counters.append(state.get("step", NOTHING))
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.dtype in MEASURED:
                    moments.append(value)
                    owners.append(i)
        return moments, owners, _stacked(counters)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the numbers of a row are of."""

    owners: list[int]  # the weight that each moment belongs to
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]


def _decode(step: int, values: Sequence[float], layout: _Layout) -> HealthRow:
    rest = iter(values)

    def following(named: Sequence[Any]) -> tuple[float, ...]:
        return tuple(islice(rest, len(named)))

    names, owners, buffers = layout.names, layout.owners, layout.buffers
    weight_norms, moment_norms = following(names), following(owners)
    weight_bad, moment_bad, buffer_bad = following(names), following(owners), following(buffers)
    counters, buffer_norms = following(names), following(buffers)
    squares, num_bad = [NOTHING] * len(names), [0] * len(names)
    for owner, norm, bad in zip(owners, moment_norms, moment_bad, strict=True):
        squares[owner] = max(0.0, squares[owner]) + norm**2
        num_bad[owner] += _count(bad)
    return HealthRow(
        step=step,
        weight_norms=weight_norms,
        weight_bad=tuple(map(_count, weight_bad)),
        moment_norms=tuple(math.sqrt(s) if s >= 0 else s for s in squares),
        moment_bad=tuple(num_bad),
        step_counters=counters,
        names=names,
        buffer_bad=tuple(map(_count, buffer_bad)),
        buffer_names=buffers,
        buffer_norms=buffer_norms,
        gradient_norms=tuple(math.sqrt(s) if s >= 0 else NOTHING for s in rest),
        sizes=layout.sizes,
    )


def _measurable(grad: Tensor | None) -> Tensor | None:
    """Return a gradient that can be measured; None if it cannot."""
    is_so = grad is not None and grad.layout is torch.strided and grad.dtype in MEASURED
    return grad if is_so else None


def _with_gaps(squares: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
    """Return a number for every gradient: its sum of squares, in order, and -1 for None."""
    if len(squares) == len(grads):
        return squares
    nothing, found = squares.new_full((), NOTHING), iter(squares.unbind())
    return torch.stack([nothing if grad is None else next(found) for grad in grads])


def _count(value: float) -> int:
    """How many; at least one if any rank has one: the mean over the ranks may be less."""
    return math.ceil(value) if math.isfinite(value) else 1


def _stacked(counters: Sequence[Tensor | float]) -> Tensor:
    """One tensor of all counts; on the device only if the optimizer keeps them there."""
    tensors = [c for c in counters if isinstance(c, Tensor)]
    if not tensors:
        return torch.tensor([float(c) for c in counters])
    device = tensors[0].device
    if len(tensors) == len(counters) and len({(c.device, c.dtype, c.dim()) for c in tensors}) == 1:
        return torch.stack(tensors).reshape(len(tensors)).float()
    rows = [
        c.detach().reshape(()).to(device, torch.float32, non_blocking=True)
        if isinstance(c, Tensor)
        else torch.full((), float(c), device=device)
        for c in counters
    ]
    return torch.stack(rows)


@torch.no_grad()
def find_corruption(state: TrainingState) -> dict[str, Any] | None:
    """Return where a state holds NaN or Inf that must not be there; None if it holds none.

    Corrupt weights show first as something else: a NaN loss, an exception where a model samples
    from its output, an index out of range. Skipping such a batch, or lowering the learning rate,
    cures nothing. Unlike the checks between steps this waits for the device.

    Returns:
        ``cause``, the name of the first ``tensor``, how many ``tensors`` and how many ``elements``
        of the first are bad.
    """
    strict = {("buffer", name) for name in state.buffers.statistics()}
    lenient = state.without_nan()
    checked: dict[Key, Tensor] = {}
    for key, tensor in state.tensors().items():
        part = local_part(tensor)
        is_checked = key[0] in ("parameter", "state") or key in strict or key in lenient
        if is_checked and part.dtype in MEASURED and part.numel():
            checked[key] = part
    rows = zclip.grad_stats(list(checked.values()))[:, NAN:].tolist() if checked else []
    bad: dict[Key, int] = {}
    for key, (num_nan, num_inf) in zip(checked, rows, strict=True):
        count = num_nan if key in lenient else num_nan + num_inf
        if count and not (key in lenient and bool(lenient[key])):
            bad[key] = int(count)
    if not bad:
        return None
    worst = min(bad, key=lambda key: KINDS.index(str(key[0])))
    is_state = worst[0] == "state"
    cause = Cause.OPTIMIZER_CORRUPTION if is_state else Cause.WEIGHT_CORRUPTION
    name = f"{worst[3]} of {worst[2]}" if is_state else state.name_of(worst)
    return {
        "cause": cause.value,
        "tensor": name.removeprefix("parameter "),
        "tensors": sum(key[0] == worst[0] for key in bad),
        "elements": bad[worst],
    }
