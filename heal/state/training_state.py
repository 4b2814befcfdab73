"""What a training run is made of: every tensor and every plain value that a step may change.

Tensors are listed under keys, so that a copy of them can be matched with the run later, when
optimizer state may have come, gone or been replaced. This file copies nothing.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.state.buffer_copies import BufferCopies
from heal.state.distinct import Key, version_of, without_duplicates
from heal.state.extra_state import extra_states, set_extra_states
from heal.state.host_copy import copy_and_hash, is_run_of_bytes
from heal.state.scheduler_state import state_of
from zclip import ClippedOptimizer

_PLAIN = (int, float, str, bool, type(None))
_REQUIRES_GRAD = attrgetter("requires_grad")
_SCALER_TENSORS = ("_scale", "_growth_tracker")


class StateMismatch(RuntimeError):
    """The saved state does not fit the run any more; nothing was changed."""


class TrainingState:
    """The model, its optimizers and what goes with them.

    Args:
        model: its parameters and all its buffers count, the non-persistent ones too.
        optimizers: their state, and every setting of their parameter groups.
        schedulers: saved and loaded through their own ``state_dict``, where they have one.
        scaler: a GradScaler, or None.
        extra: further tensors that belong to the run, under names of their own.
        buffers: tells which buffers move; the others are not among the tensors. Made if None.
        note: told of modules whose extra state cannot be had.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[ClippedOptimizer],
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extra: Mapping[str, Tensor] | None = None,
        buffers: BufferCopies | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.scaler = scaler
        self.extra = dict(extra or {})
        self.buffers = BufferCopies(model) if buffers is None else buffers
        self._note = note
        self._frozen_versions: dict[int, int] = {}
        self._changed_though_frozen: set[int] = set()
        self._was_trainable: set[int] = set()
        self._flags = b""
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
        if id(param) in self._changed_though_frozen or id(param) in self._was_trainable:
            return True
        return any(param in optimizer.state for optimizer in self.optimizers)

    def constants(self) -> list[tuple[Key, Tensor]]:
        """Return frozen parameters and still buffers: what no snapshot holds."""
        params = enumerate(self.parameters())
        frozen: list[tuple[Key, Tensor]] = [
            (("parameter", i), param) for i, param in params if not self.is_trainable(param)
        ]
        return frozen + [(("buffer", name), buffer) for name, buffer in self.buffers.still()]

    def name_of(self, key: Key) -> str:
        """Return what people call a tensor."""
        if key[0] != "parameter":
            return " ".join(map(str, key))
        param = self.parameters()[int(key[1])]
        found = (name for name, p in self.model.named_parameters() if p is param)
        return f"parameter {next(found, key[1])}"

    def count_as_changing(self, key: Key) -> None:
        """Hear that something was written that seemed constant: it belongs to the state now."""
        if key[0] == "buffer":
            self.buffers.count_as_moving(str(key[1]))
        else:
            self._changed_though_frozen.add(id(self.parameters()[int(key[1])]))

    def notice_changes(self) -> None:
        """Count frozen parameters that are written in place, as moving averages are, as trainable.

        Writes through ``.data`` leave no trace here; checksums find these.
        """
        self.buffers.find()
        for param in self.parameters():
            if self.is_trainable(param):
                # Until others are trained: an optimizer that lost its state must not make a
                # parameter look as if it had never been trained.
                self._was_trainable.add(id(param))
                continue
            version = version_of(param)
            if version != self._frozen_versions.setdefault(id(param), version):
                self._changed_though_frozen.add(id(param))

    def signature(self) -> tuple[Any, ...]:
        """Return what changes when parameters are added, frozen or unfrozen.

        This runs in every step, so it walks through nothing but a list. A parameter that no
        optimizer was told of is not trained and not looked for.
        """
        sizes = []
        for optimizer in self.optimizers:
            for group in optimizer.inner.param_groups:
                sizes.append(len(group["params"]))
        if sizes != self._sizes:  # walking through the modules takes longer than all the rest
            self._sizes = sizes
            self._known = self.parameters()
        trainable = bytes(map(_REQUIRES_GRAD, self._known))
        if trainable != self._flags:
            self._flags = trainable
            self._was_trainable.clear()
        return (trainable, len(self._changed_though_frozen), self.buffers.num_late, *sizes)

    def tensors(self) -> dict[Key, Tensor]:
        """Return all tensors that steps may change, each part of memory once."""
        return without_duplicates(self._named_tensors())

    def everything(self) -> dict[Key, Tensor]:
        """Return the same and all other buffers, as a checkpoint has them."""
        return without_duplicates(self._named_tensors(all_buffers=True))

    def values(self) -> dict[str, Any]:
        """Return copies of all plain values; clip statistics stay tensors on the device."""
        return {
            "groups": [[_settings(g) for g in o.param_groups] for o in self.optimizers],
            "state": [self._plain_state(o) for o in self.optimizers],
            "clip": [o.clipper.state_dict() for o in self.optimizers],
            "schedulers": [copied(state_of(s)) for s in self.schedulers],
            "modules": copied(extra_states(self.model, self._note)),
        }

    def check(self, saved: Mapping[Key, Tensor]) -> None:
        """Raise unless :meth:`restore` can write these; nothing is changed.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
        """
        self._check(saved, self.everything())

    @torch.no_grad()
    def restore(self, saved: Mapping[Key, Tensor], values: Mapping[str, Any]) -> None:
        """Write saved tensors and values over those of the run, in place.

        What was not there when they were saved, such as moments before the first step, is removed;
        what has gone since is made again.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
        """
        live = self.everything()
        created = self._check(saved, live)
        live.update(created)
        _copy_groups([live[key] for key in saved], list(saved.values()))
        for key, tensor in created.items():
            self._attach(key, tensor)
        for name, first in self.buffers.firsts.items():
            there = live.get(("buffer", name))
            if ("buffer", name) not in saved and there is not None and there.shape == first.shape:
                there.data.copy_(first)  # so that one of inference mode can be written
        for o, optimizer in enumerate(self.optimizers):
            self._restore_plain_state(o, optimizer, saved, values["state"][o])
            for group, settings in zip(optimizer.param_groups, values["groups"][o], strict=True):
                group.update(copied(settings))
            optimizer.clipper.load_state_dict(values["clip"][o])
            optimizer.forget_momentum()
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            if state is not None:
                scheduler.load_state_dict(copied(state))
        extra = values.get("modules", {})  # not in the first checkpoints
        set_extra_states(self.model, copied(extra), self._note)
        self._forget_young_scaler(saved)
        self.buffers.restored()

    def _named_tensors(self, all_buffers: bool = False) -> Iterator[tuple[Key, Tensor]]:
        for i, param in enumerate(self.parameters()):
            if self.is_trainable(param):
                yield ("parameter", i), param
        for name, buffer in _all_buffers(self.model):
            if all_buffers or self.buffers.is_moving(name):
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

        Buffers that are new since then are left alone: caches are made in the first forward. One
        that was made again in inference mode cannot be written, and so is replaced.
        """
        created: dict[Key, Tensor] = {}
        for key, tensor in saved.items():
            there = live.get(key)
            fits = (
                there is not None
                and there.shape == tensor.shape
                and there.dtype == tensor.dtype
                and not there.is_inference()
            )
            if fits:
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
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple and all(isinstance(element, _PLAIN) for element in value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # better than no snapshot at all
        return value


def _shown(key: Key) -> str:
    return " ".join(str(part) for part in key)
