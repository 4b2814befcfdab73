"""What a training run is made of: every tensor and every plain value that a step may change.

Tensors are listed under keys, so that a copy of them can be matched with the run later, when
optimizer state may have come, gone or been replaced. This file copies nothing.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.host_copy import copy_and_hash, is_run_of_bytes
from zclip import ClippedOptimizer

Key = tuple[str | int, ...]

_SCALER_TENSORS = ("_scale", "_growth_tracker")


class StateMismatch(RuntimeError):
    """The saved state does not fit the run any more; nothing was changed."""


class TrainingState:
    """The model, its optimizers and what goes with them.

    Args:
        model: its parameters and all its buffers count, the non-persistent ones too.
        optimizers: their state, and every setting of their parameter groups.
        schedulers: saved and loaded through their own ``state_dict``.
        scaler: a GradScaler, or None.
        extra: further tensors that belong to the run, under names of their own.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[ClippedOptimizer],
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.scaler = scaler
        self.extra = dict(extra or {})
        self._frozen_versions: dict[int, int] = {}
        self._changed_though_frozen: set[int] = set()
        self._sizes: list[int] = []
        self._known: list[Tensor] = []

    def parameters(self) -> list[Tensor]:
        """Return every parameter of model and optimizers, once."""
        found = {id(p): p for p in self.model.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update((id(p), p) for p in group["params"])
        return list(found.values())

    def is_trainable(self, param: Tensor) -> bool:
        """Return whether steps may change a parameter, as far as can be seen."""
        if param.requires_grad or param.grad is not None:
            return True
        if id(param) in self._changed_though_frozen:
            return True
        return any(param in optimizer.state for optimizer in self.optimizers)

    def frozen(self) -> list[Tensor]:
        """Return the parameters that steps do not change."""
        return [_local(p) for p in self.parameters() if not self.is_trainable(p)]

    def notice_changes(self) -> None:
        """Count frozen parameters that are written in place, as moving averages are, as trainable.

        Writes through ``.data`` leave no trace here; checksums find these.
        """
        for param in self.parameters():
            if self.is_trainable(param):
                continue
            seen = self._frozen_versions.setdefault(id(param), param._version)
            if param._version != seen:
                self._changed_though_frozen.add(id(param))

    def signature(self) -> tuple[int, ...]:
        """Return numbers that change when parameters are added, frozen or unfrozen.

        This runs in every step, so it counts and does not compare. A parameter that no optimizer
        was told of is not trained and not looked for.
        """
        sizes = [len(group["params"]) for o in self.optimizers for group in o.param_groups]
        if sizes != self._sizes:  # walking through the modules takes longer than all the rest
            self._sizes = sizes
            self._known = self.parameters()
        trainable = sum([p.requires_grad for p in self._known])
        return (trainable, len(self._changed_though_frozen), *sizes)

    def tensors(self) -> dict[Key, Tensor]:
        """Return all tensors that steps may change, each part of memory once."""
        return _without_duplicates(self._named_tensors())

    def values(self) -> dict[str, Any]:
        """Return copies of all plain values; clip statistics stay tensors on the device."""
        return {
            "groups": [[_settings(g) for g in o.param_groups] for o in self.optimizers],
            "state": [self._plain_state(o) for o in self.optimizers],
            "clip": [o.clipper.state_dict() for o in self.optimizers],
            "schedulers": [copied(s.state_dict()) for s in self.schedulers],
        }

    def check(self, saved: Mapping[Key, Tensor]) -> None:
        """Raise unless :meth:`restore` can write these; nothing is changed.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
        """
        self._check(saved, self.tensors())

    @torch.no_grad()
    def restore(self, saved: Mapping[Key, Tensor], values: Mapping[str, Any]) -> None:
        """Write saved tensors and values over those of the run, in place.

        What was not there when they were saved, such as moments before the first step, is removed;
        what has gone since is made again.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
        """
        live = self.tensors()
        created = self._check(saved, live)
        live.update(created)
        _copy_groups([live[key] for key in saved], list(saved.values()))
        for key, tensor in created.items():
            self._attach(key, tensor)
        for o, optimizer in enumerate(self.optimizers):
            self._restore_plain_state(o, optimizer, saved, values["state"][o])
            for group, settings in zip(optimizer.param_groups, values["groups"][o], strict=True):
                group.update(copied(settings))
            optimizer.clipper.load_state_dict(values["clip"][o])
            optimizer._momentum.forget()
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(copied(state))
        self._forget_young_scaler(saved)

    def _named_tensors(self) -> Iterator[tuple[Key, Tensor]]:
        for i, param in enumerate(self.parameters()):
            if self.is_trainable(param):
                yield ("parameter", i), param
        for name, buffer in _all_buffers(self.model):
            yield ("buffer", name), buffer
        for o, optimizer in enumerate(self.optimizers):
            for i, param in enumerate(_optimized(optimizer)):
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        yield ("state", o, i, name), value
            for g, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, Tensor):
                        yield ("group", o, g, name), value
        for name in _SCALER_TENSORS:
            value = getattr(self.scaler, name, None)
            if isinstance(value, Tensor):
                yield ("scaler", name), value
        for name, tensor in self.extra.items():
            yield ("extra", name), tensor

    def _check(self, saved: Mapping[Key, Tensor], live: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return new tensors for what has gone or was replaced; raise if a parameter was.

        Buffers that are new since then are left alone: caches are made in the first forward.
        """
        created: dict[Key, Tensor] = {}
        for key, tensor in saved.items():
            there = live.get(key)
            if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype:
                continue
            if key[0] in ("parameter", "extra"):
                now = "gone" if there is None else f"{there.dtype} {tuple(there.shape)}"
                raise StateMismatch(
                    f"{_shown(key)} was {tensor.dtype} {tuple(tensor.shape)} when it was saved "
                    f"and is {now}"
                )
            device = self._device_of(key) if there is None else there.device
            created[key] = torch.empty_like(tensor, device=device)
        for key in live:
            if key[0] == "parameter" and key not in saved:
                raise StateMismatch(f"{_shown(key)} is new since the state was saved")
        return created

    def _device_of(self, key: Key) -> torch.device:
        """Moments live beside their parameter; ``step`` does only where the optimizer wants it."""
        if key[0] == "buffer":
            return next((p.device for p in self.parameters()), torch.device("cpu"))
        if key[0] != "state":
            return torch.device("cpu")
        optimizer = self.optimizers[int(key[1])]
        param = _optimized(optimizer)[int(key[2])]
        if key[3] != "step":
            return param.device
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        on_device = group.get("capturable") or group.get("fused")
        return param.device if on_device else torch.device("cpu")

    def _attach(self, key: Key, tensor: Tensor) -> None:
        if key[0] == "scaler":
            setattr(self.scaler, str(key[1]), tensor)
            return
        if key[0] == "buffer":
            owner, _, name = str(key[1]).rpartition(".")
            self.model.get_submodule(owner)._buffers[name] = tensor
            return
        optimizer = self.optimizers[int(key[1])]
        if key[0] == "group":
            optimizer.param_groups[int(key[2])][str(key[3])] = tensor
        else:
            optimizer.state[_optimized(optimizer)[int(key[2])]][key[3]] = tensor

    def _plain_state(self, optimizer: ClippedOptimizer) -> list[dict[str, Any] | None]:
        """Per parameter, the state that is no tensor; None if there is none at all."""
        return [
            {k: copied(v) for k, v in optimizer.state[p].items() if not isinstance(v, Tensor)}
            if p in optimizer.state
            else None
            for p in _optimized(optimizer)
        ]

    def _restore_plain_state(
        self,
        o: int,
        optimizer: ClippedOptimizer,
        saved: Mapping[Key, Tensor],
        plain: Sequence[dict[str, Any] | None],
    ) -> None:
        for i, param in enumerate(_optimized(optimizer)):
            known = plain[i] if i < len(plain) else None
            if known is None:
                optimizer.state.pop(param, None)
                continue
            state = optimizer.state[param]
            for name in list(state):
                if name not in known and ("state", o, i, name) not in saved:
                    del state[name]
            state.update(copied(known))

    def _forget_young_scaler(self, saved: Mapping[Key, Tensor]) -> None:
        """A scale that did not exist yet begins again from the scaler's own start value."""
        if self.scaler is None:
            return
        for name in _SCALER_TENSORS:
            if hasattr(self.scaler, name) and ("scaler", name) not in saved:
                setattr(self.scaler, name, None)


def copy_by_kind(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool) -> None:
    """Copy lists of tensors, one call for each pair of devices and dtype."""
    kinds: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    runs: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if is_run_of_bytes(target, source):
            runs.append((target, source))
            continue
        kind = kinds.setdefault((target.device, source.device, target.dtype), ([], []))
        kind[0].append(target)
        kind[1].append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of, non_blocking=non_blocking)
    copy_and_hash([target for target, _ in runs], [source for _, source in runs])


def _copy_groups(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    copy_by_kind(targets, sources, non_blocking=False)


def _optimized(optimizer: ClippedOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _all_buffers(model: Module) -> Iterable[tuple[str, Tensor]]:
    return ((n, b) for n, b in model.named_buffers() if b.layout is torch.strided)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a parameter group; its tensors are listed among the tensors."""
    left_out = ("params", "param_names")
    return {
        name: copied(value)
        for name, value in group.items()
        if name not in left_out and not isinstance(value, Tensor)
    }


def copied(value: Any) -> Any:
    """Return a copy that later steps cannot change; what cannot be copied is shared."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # better than no snapshot at all
        return value


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, else the tensor; detached."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def _without_duplicates(named: Iterable[tuple[Key, Tensor]]) -> dict[Key, Tensor]:
    """Keep one tensor for each place in memory, and one view of storage that many overlap in."""
    by_storage: dict[int, list[tuple[Key, Tensor]]] = {}
    places: set[tuple[Any, ...]] = set()
    for key, tensor in named:
        tensor = _once_each(_local(tensor))
        storage = tensor.untyped_storage()._cdata
        place = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in places:
            places.add(place)
            by_storage.setdefault(storage, []).append((key, tensor))
    kept: dict[Key, Tensor] = {}
    for sharers in by_storage.values():
        if len(sharers) > 1:
            storage_bytes = sharers[0][1].untyped_storage().nbytes()
            if sum(t.nbytes for _, t in sharers) > storage_bytes:
                key, tensor = sharers[0]
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                sharers = [(key, whole.set_(tensor.untyped_storage()))]
        kept.update(sharers)
    return kept


def _once_each(tensor: Tensor) -> Tensor:
    """Drop repetitions of an expanded tensor: they could be read but not written."""
    if tensor.is_contiguous():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _shown(key: Key) -> str:
    return " ".join(str(part) for part in key)
