"""Fresh copies of the buffers that forward writes, so that a skipped step leaves no trace in them.

BatchNorm writes its running statistics long before the batch is known to be bad. Which
buffers are written is found out by watching: masks, position tables and quantised weights never
are, and cost neither time nor copies.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

import zclip  # noqa: F401  declares torch.ops.zclip

# Tensors under keys, each part of memory once: tied weights, views and expanded ones.


Key = tuple[str | int, ...]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, else the tensor; detached."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; 0 for one of inference mode, where no one counts."""
    return 0 if tensor.is_inference() else tensor._version


def without_duplicates(named: Iterable[tuple[Key, Tensor]]) -> dict[Key, Tensor]:
    """Keep one tensor for each place in memory, and one view of storage that many overlap in.

    That is the tensor which all others are views of, if there is one: its numbers can be checked.
    Else it is the bytes.
    """
    by_storage: dict[int, list[tuple[Key, Tensor]]] = {}
    for key, tensor in named:
        tensor = _once_each(local_part(tensor))
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((key, tensor))
    kept: dict[Key, Tensor] = {}
    for sharers in by_storage.values():
        if len(sharers) > 1:
            places: dict[tuple[Any, ...], tuple[Key, Tensor]] = {}
            for pair in sharers:
                places.setdefault(_place(pair[1]), pair)
            sharers = list(places.values())
            storage_bytes = sharers[0][1].untyped_storage().nbytes()
            if sum(t.nbytes for _, t in sharers) > storage_bytes:
                sharers = [_all_of(sharers)]
        kept.update(sharers)
    return kept


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Which elements of its storage a tensor has."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _all_of(sharers: Sequence[tuple[Key, Tensor]]) -> tuple[Key, Tensor]:
    """Return one tensor in place of several of one storage."""
    first, tensor = sharers[0]
    key, largest = max(sharers, key=lambda pair: pair[1].nbytes)
    begin, end = _span(largest)
    spans = [_span(t) for _, t in sharers]
    if largest.is_contiguous() and all(begin <= b and e <= end for b, e in spans):
        return (key if key[0] in ("parameter", "state") else first), largest
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return first, whole.set_(tensor.untyped_storage())


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte in the storage, and that after the last; a view has no negative strides."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((int(size) - 1) * int(stride) for size, stride in pairs) if tensor.numel() else -1
    return begin, begin + (last + 1) * tensor.itemsize


def _once_each(tensor: Tensor) -> Tensor:
    """Drop repetitions of an expanded tensor: they could be read but not written."""
    if tensor.is_contiguous():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


SMALL_BYTES = 1 << 16  # copied before it was ever written: the first write may be a bad one
STATISTICS = ("running_mean", "running_var")  # their kernels write without a trace in ``_version``


def are_of_evaluation(module: Module) -> bool:
    """Return whether a layer keeps numbers for evaluation: a moving average that it trains without.

    So do norm layers with running statistics. Only a module without children: in one with children
    the mode may decide what forward returns.
    """
    if next(module.children(), None) is not None:
        return False
    return any(
        buffer is not None and (key in STATISTICS or isinstance(module, _NormBase))
        for key, buffer in module._buffers.items()
    )


Checked = tuple[Tensor, Tensor]
"""A buffer, and whether it held what it must not before training: a bool on its device."""


class BufferCopies:
    """Copies of a model's moving buffers: those of norm layers, and all that were ever written.

    A large buffer counts as moving from its second write on: the first may be a checkpoint that is
    loaded, and copying quantised weights in every step would cost more than it could save.

    Args:
        model: whose buffers.
        note: called with what could not be put back.

    Attributes:
        firsts: by name, small buffers that were found to move, as they were before their first
            write: every snapshot that does not hold them was taken before it.
        are_there: whether the model has buffers at all.
        num_late: how many large buffers were found to move; snapshots of before do not hold them.
    """

    def __init__(self, model: Module, note: Callable[[str], None] = lambda text: None) -> None:
        self.firsts: dict[str, Tensor] = {}
        self.num_late = 0
        self.are_there = False
        self._model = model
        self._note = note
        self._moving: dict[str, _Slot] = {}
        self._still: dict[str, _Slot] = {}
        self._groups: list[_Group] = []
        self._traced: list[Tensor] = []  # statistics, and how often each was written with a trace
        self._traces: list[int] = []
        self._has_begun = self._has_settled = False
        self.find()

    def find(self) -> None:
        """Notice buffers that came, went or moved. Walks through the modules; not every step."""
        if self._groups or self._still:
            self._look()
        known = {**self._moving, **self._still}
        found = {slot.name: slot for slot in _slots_of(self._model)}
        for name, slot in found.items():
            before = known.get(name)
            if before is not None and before.owner is slot.owner:
                continue
            if slot.is_statistic:
                slot.was_bad = slot.is_bad(torch.isfinite, self._has_settled)
                self._moving[name] = slot
            else:
                is_small = slot.buffer.nbytes <= SMALL_BYTES
                slot.copy = slot.buffer.detach().clone() if is_small else None
                if not self._has_settled:
                    slot.was_bad = slot.is_bad(_is_number)
                self._still[name] = slot
        for name in known.keys() - found.keys():
            self._moving.pop(name, None)
            self._still.pop(name, None)
        self._regroup()

    def is_moving(self, name: str) -> bool:
        """Return whether a buffer is one that steps may write, as far as was seen."""
        return name not in self._still

    def still(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that were never seen to be written."""
        return [(name, slot.buffer) for name, slot in self._still.items()]

    def statistics(self) -> dict[str, Checked]:
        """Return the buffers of norm layers, in which NaN and Inf are a fault."""
        return self._checked(are_statistics=True)

    def were_written(self) -> bool:
        """Return whether running statistics were written with a trace since the last call.

        Kernels of BatchNorm leave none: it was something else, such as ``copy_`` or ``fill_``.
        Some norm layers always leave one, and so does DDP where it broadcasts buffers.
        """
        if not self._traced:
            return False
        before = self._traces
        self._traces = [buffer._version for buffer in self._traced]
        return self._traces != before

    def without_nan(self) -> dict[str, Checked]:
        """Return the other moving buffers that NaN has no place in, though Inf may have.

        Not those that were made in a forward: what they are meant to hold is unknown.
        """
        return self._checked(are_statistics=False)

    def _checked(self, are_statistics: bool) -> dict[str, Checked]:
        return {
            name: (slot.buffer, slot.was_bad)
            for name, slot in self._moving.items()
            if slot.is_statistic == are_statistics and slot.was_bad is not None
        }

    def faults(self) -> list[Tensor]:
        """Return, per kind of moving buffers, 1 if one holds what it must not; on their devices.

        A finite loss may leave Inf in running statistics, and every later evaluation is NaN.
        """
        try:
            return [group.fault() for group in self._groups if group.was_bad is not None]
        except Exception as error:
            self._note(f"buffers are not checked for NaN in every step: {error!r}")
            return []

    def count_as_moving(self, name: str) -> None:
        """Note that a buffer was written though ``_version`` does not say so."""
        slot = self._still[name]
        slot.copy = None  # of a time that no snapshot need be of
        self._begin_moving(slot)
        self._regroup()

    def begin(self) -> None:
        """Copy what moves, before the first forward of a step."""
        self._contained(self.refresh)
        self._has_begun = True

    def refresh(self) -> None:
        """Copy what moves."""
        self._look()
        for group in self._groups:
            group.renew()

    def put_back(self) -> None:
        """Write the copies over what moves."""
        self._contained(self._put_back)

    def _put_back(self) -> None:
        for slot in self._look():
            self._note(
                f"buffer {slot.name} was written by a step that did not count, and there is no "
                "copy of it from before"
            )
        for group in self._groups:
            group.put_back()

    def restored(self) -> None:
        """Note that the model was given another state: what that wrote is not for putting back."""
        self._contained(self._restored)

    def _restored(self) -> None:
        for slot in self._still.values():
            slot.buffer = slot.owner.get(slot.key, slot.buffer)
            slot.version = version_of(slot.buffer)
            if slot.copy is not None:
                slot.copy = slot.buffer.detach().clone()
        self._regroup()
        self.refresh()
        self.were_written()  # by what has restored them

    def settle(self, skipped: "bool | Tensor", spares_finite: bool = False) -> None:
        """Put the buffers back if the step was skipped, else make their present state the copy.

        Args:
            skipped: a bool, or one 0-dim tensor on a device, which nothing waits for.
            spares_finite: a skipped step is routine, as under a scaler that still searches its
                scale; without healing its statistics would stay, so they do unless NaN or Inf.
        """
        if self.are_there:
            self._contained(self._settle, skipped, spares_finite)

    def _contained(self, action: Callable[..., None], *arguments: Any) -> None:
        """A buffer of a kind that cannot be copied must not end the run."""
        try:
            action(*arguments)
        except Exception as error:
            self._moving, self._still, self._groups = {}, {}, []
            self._regroup()
            self._note(f"buffers are not put back after skipped steps: {error!r}")

    def _settle(self, skipped: "bool | Tensor", spares_finite: bool) -> None:
        if not self._has_settled:  # the first forward made what is made lazily
            self._has_settled = True
            self.find()
        if isinstance(skipped, Tensor):
            self._look()
            blocked = skipped > 0
            if spares_finite:
                blocked &= ~self._is_finite(blocked)
            for group in self._groups:
                group.settle(blocked.to(group.flat.device, non_blocking=True))
        elif skipped and not (spares_finite and bool(self._is_finite(torch.tensor(True)))):
            self._put_back()
        elif not self._has_begun:  # else the next step copies before its forward
            self.refresh()
        self._has_begun = False

    def _is_finite(self, like: Tensor) -> Tensor:
        """Whether all moving buffers are, as a bool on the device of ``like``."""
        floating = [group for group in self._groups if group.flat.is_floating_point()]
        found = [group.present().isfinite().all() for group in floating]
        together = [one.to(like.device, non_blocking=True) for one in found]
        return torch.stack(together).all() if together else torch.ones_like(like)

    def _look(self) -> list["_Slot"]:
        """Notice buffers that were written or replaced; return those of which there was no copy."""
        same = all(map(is_, [owner.get(key) for owner, key in self._places], self._known))
        if same and [buffer._version for buffer in self._still_known] == self._versions:
            return []
        lost = []
        for slot in [*self._still.values(), *self._moving.values()]:
            now = slot.owner.get(slot.key)
            if now is None:
                self._moving.pop(slot.name, None)
                self._still.pop(slot.name, None)
                continue
            version = version_of(now)
            has_changed = now is not slot.buffer or version != slot.version
            slot.buffer, slot.version = now, version
            if has_changed and slot.name in self._still:
                slot.num_writes += 1
                if slot.copy is None:
                    lost.append(slot)
                if slot.copy is not None or slot.num_writes > 1:
                    self._begin_moving(slot)
        self._regroup()
        return lost

    def _begin_moving(self, slot: "_Slot") -> None:
        if slot.copy is not None:
            self.firsts[slot.name] = slot.copy.clone()
        else:
            self.num_late += 1
        self._moving[slot.name] = self._still.pop(slot.name)

    def _regroup(self) -> None:
        """Lay the copies out again; those that exist keep their contents."""
        self.are_there = bool(self._moving or self._still)
        kinds: dict[tuple[Any, ...], list[_Slot]] = {}
        for slot in self._moving.values():
            is_checked = slot.was_bad is not None
            kind = slot.buffer.device, slot.buffer.dtype, slot.is_statistic, is_checked
            kinds.setdefault(kind, []).append(slot)
        self._groups = [_Group(slots) for slots in kinds.values()]
        known = dict(zip(map(id, self._traced), self._traces, strict=True))
        statistics = [slot.buffer for slot in self._moving.values() if slot.is_statistic]
        self._traced = [s for s in statistics if s.is_floating_point() and not s.is_inference()]
        self._traces = [known.get(id(buffer), buffer._version) for buffer in self._traced]
        slots = [*self._moving.values(), *self._still.values()]
        self._places = [(slot.owner, slot.key) for slot in slots]
        self._known = [slot.buffer for slot in slots]
        counted = [slot for slot in self._still.values() if not slot.buffer.is_inference()]
        self._still_known = [slot.buffer for slot in counted]
        self._versions = [slot.version for slot in counted]


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for a buffer in a module, and what is known of it."""

    name: str
    owner: dict[str, Any]
    key: str
    is_statistic: bool
    buffer: Tensor
    version: int
    copy: Tensor | None = None
    num_writes: int = 0
    was_bad: Tensor | None = None  # before training, on the device; None: never checked

    def is_bad(self, is_good: Callable[[Tensor], Tensor], skip: bool = False) -> Tensor | None:
        """Return whether an element is not good, or no if that is to be skipped; on the device."""
        buffer = self.buffer
        if not buffer.is_floating_point() or buffer.itemsize < 2 or buffer.is_meta:
            return None
        if skip:
            return torch.zeros((), dtype=torch.bool, device=buffer.device)
        return is_good(buffer.detach()).all().logical_not()


class _Group:
    """Moving buffers of one device, dtype and kind; their copies lie in one tensor, end to end.

    So they are copied by one call, and chosen from by one more: a call for each would cost more
    than all else that healing does in a step.

    Attributes:
        was_bad: whether one of them held what it must not before training, on the device; None if
            that is not checked.
    """

    def __init__(self, slots: list[_Slot]) -> None:
        # Through .data, so that a graph which still needs a buffer does not take the same value
        # written again for a change.
        self._targets = [slot.buffer.data for slot in slots]
        are_flat = all(target.is_contiguous() for target in self._targets)
        self._sources = [t.view(-1) for t in self._targets] if are_flat else None
        fitting = [
            slot.copy
            if slot.copy is not None
            and slot.copy.shape == target.shape
            and slot.copy.dtype == target.dtype
            and slot.copy.device == target.device
            else target
            for slot, target in zip(slots, self._targets, strict=True)
        ]
        self.flat = torch.cat([tensor.reshape(-1) for tensor in fitting])
        pieces = self.flat.split([target.numel() for target in self._targets])
        self._pieces = [p.view(t.shape) for p, t in zip(pieces, self._targets, strict=True)]
        for slot, piece in zip(slots, self._pieces, strict=True):
            slot.copy = piece
        self._is_good = torch.isfinite if slots[0].is_statistic else _is_number
        known = [
            s.was_bad.to(self.flat.device, non_blocking=True)
            for s in slots
            if s.was_bad is not None
        ]
        self.was_bad = torch.stack(known).any() if known else None

    def fault(self) -> Tensor:
        """Return 1 if a buffer holds what it must not and none did before training, else 0."""
        assert self.was_bad is not None
        is_bad = self._is_good(self.present()).all().logical_not()
        return (is_bad & self.was_bad.logical_not()).float()

    def present(self) -> Tensor:
        """Return the buffers as they are, end to end."""
        return torch.cat(self._listed())

    def renew(self) -> None:
        """Copy the buffers."""
        torch.cat(self._listed(), out=self.flat)

    def put_back(self) -> None:
        """Write the copies over the buffers."""
        torch._foreach_copy_(self._targets, self._pieces)

    def settle(self, blocked: Tensor) -> None:
        """Make both what the copies are, if blocked, else what the buffers are; on the device."""
        torch.where(blocked, self.flat, self.present(), out=self.flat)
        torch._foreach_copy_(self._targets, self._pieces)

    def _listed(self) -> list[Tensor]:
        if self._sources is not None:
            return self._sources
        return [target.reshape(-1) for target in self._targets]


def _slots_of(model: Module) -> Iterator[_Slot]:
    """Every buffer once, under the name that ``named_buffers`` has for it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, _NormBase)
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or is_lazy(buffer) or not _is_plain(buffer):
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{key}" if prefix else key
            is_statistic = is_norm or key in STATISTICS
            yield _Slot(name, module._buffers, key, is_statistic, buffer, version_of(buffer))


def _is_number(tensor: Tensor) -> Tensor:
    return tensor.isnan().logical_not()


def _is_plain(buffer: Tensor) -> bool:
    """Whether it can be copied and written: no sparse one, none whose elements share memory."""
    if buffer.layout is not torch.strided or hasattr(buffer, "_local_tensor"):
        return False
    shape = zip(buffer.shape, buffer.stride(), strict=True)
    return not any(stride == 0 and size > 1 for size, stride in shape)


# Copies within host memory, in one read of it: hashed and checked for NaN and Inf on the way.


PLAIN = (Tensor, torch.nn.Parameter)  # whose bytes are all there is to them


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the host, shared; it must outlive them."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def is_run_of_bytes(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy from one to the other moves bytes and nothing else, in host memory."""
    return (
        type(target) in PLAIN
        and type(source) in PLAIN
        and target.is_cpu
        and source.is_cpu
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and not source.is_complex()  # which may be a conjugate that is yet to be taken
        and source.data_ptr() != target.data_ptr()
    )


@torch.no_grad()
def copy_and_hash(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Copy runs of bytes; see :func:`zclip.reference.copy_and_hash_`.

    Returns:
        int64 [N, 2]: the fingerprint of each source, and 1 where an element is not finite.
    """
    if not sources:
        return torch.empty(0, 2, dtype=torch.int64)
    rows: Tensor = torch.ops.zclip.copy_and_hash_(list(targets), list(sources))
    # To autograd an operator of ours is a stranger: a graph that still needs what was here before
    # must know of it, as it would of copy_().
    torch.autograd.graph.increment_version(list(targets))
    return rows
