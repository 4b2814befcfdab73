"""What vouches for tensors: a hash of their bits, and whether any of them is NaN or Inf."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

import zclip
from heal.buffers import STATISTICS, Key, copy_and_hash, is_run_of_bytes, local_part
from heal.training_state import TrainingState, copy_by_kind
from zclip.ops import by_device

MEASURED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # by grad_stats
HALF = (torch.bfloat16, torch.float16)  # whose own range a sum may leave


def copy_on_host(
    copies: Mapping[Key, Tensor],
    tensors: Mapping[Key, Tensor],
    without_nan: Mapping[Key, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy, hash and measure; return the latter two. What is a run of bytes is read once.

    Args:
        copies: written, by key.
        tensors: read.
        without_nan: see :func:`count_bad`.
    """
    may_hold_inf = without_nan or {}
    runs = [key for key, tensor in tensors.items() if is_run_of_bytes(copies[key], tensor)]
    at_once = set(runs)
    others = [key for key in tensors if key not in at_once]
    rows = copy_and_hash([copies[k] for k in runs], [tensors[k] for k in runs]).tolist()
    hashes = {key: row[0] for key, row in zip(runs, rows, strict=True)}
    counted = zip(runs, rows, strict=True)
    bad = [key for key, row in counted if row[1]]
    num_bad = sum(must_be_finite(key, tensors[key]) for key in bad)
    num_bad += int(count_bad(((k, tensors[k]) for k in bad if k in may_hold_inf), may_hold_inf))
    if others:
        copy_by_kind([copies[k] for k in others], [tensors[k] for k in others], non_blocking=False)
        hashes |= zip(others, fingerprints(tensors[k] for k in others).tolist(), strict=True)
        num_bad += int(count_bad(((k, tensors[k]) for k in others), without_nan))
    return torch.tensor([hashes[key] for key in tensors], dtype=torch.int64), torch.tensor(num_bad)


def must_be_finite(key: Key, tensor: Tensor) -> bool:
    """Tell whether NaN or Inf in it is a fault. Masks may hold Inf; running statistics may not."""
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


# What steps should not change, frozen parameters and still buffers: hashed, not copied.
#
# Writes in place leave a trace in ``_version``; those through ``.data``, as some moving averages
# are kept, leave none but in the bits themselves.


LEAST_BYTES = 4 << 20  # hashed with every snapshot, be it ever so small: half a millisecond


class Constants:
    """Fingerprints of tensors that nobody writes, compared a part at a time.

    With each snapshot at most as many bytes are hashed as it has itself: a base model of many
    gigabytes takes many snapshots to go round. On a device nothing waits: what one look finds is
    heard at the next.

    Args:
        state: what the run is made of; told of what is not constant after all.
        note: told of it too, in words.
    """

    def __init__(self, state: TrainingState, note: Callable[[str], None]) -> None:
        self._state = state
        self._note = note
        self._known: dict[int, Tensor] = {}  # by identity: int64 []
        self._next = 0
        self._sent: tuple[zclip.Mailbox, list[Key]] | None = None

    def look(self, step: int) -> None:
        """Notice what is written in place, hash some of the rest, and tell of what has changed."""
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
        """Have snapshots hold these from now on, and say so."""
        constants = {key for key, _ in self._state.constants()}
        for key in keys:
            if key in constants:
                name = self._state.name_of(key)
                self._state.count_as_changing(key)
                self._note(f"{name} is not trained and yet changes{but}; snapshots hold it now")

    def forget(self) -> None:
        """Begin anew: the run was given another state."""
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
