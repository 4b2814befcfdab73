"""What a training run is made of: every tensor and every plain value that a step may change.

Tensors are listed under keys, so that a copy of them can be matched with the run later, when
optimizer state may have come, gone or been replaced. This file copies nothing.
"""

import copy
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.buffers import (
    BufferCopies,
    Key,
    copy_and_hash,
    is_run_of_bytes,
    version_of,
    without_duplicates,
)
from heal.extra_state import AddedStates, extra_states, set_extra_states, state_of
from zclip import ClippedOptimizer

# How much memory the host has to give.


def available_bytes() -> int | None:
    """Return how much memory the system could give without swapping; None if it does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


# What a restore overwrites, kept until the restore has succeeded.
#
# A restore runs code of others (schedulers, modules, ``add_state``) and copies across devices; any
# of it may raise half-way. Weights of one step beside moments of another are a state that no run
# had.


UNDO_FREE_SHARE = 0.5  # of the memory now free, that a copy may take


class Undo:
    """The present state of a run, to return to if a restore fails.

    Tensors are copied to host memory. Where there is no room for that, only plain values can be put
    back, and :attr:`is_whole` is False.

    Args:
        tensors: all that the restore will overwrite.
        model: its buffers may be replaced.
        optimizers: their state and groups may be replaced.
        schedulers: loaded through their own ``state_dict``.
        owners: objects and the names of their attributes that may be replaced.
        loaders: pairs of a function and what to call it with, for state that others keep.
        copied: returns a copy of plain values that nobody else changes.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        model: Module,
        optimizers: Sequence[ClippedOptimizer],
        schedulers: Sequence[Any],
        owners: Sequence[tuple[Any, Sequence[str]]],
        loaders: Sequence[tuple[Callable[[Any], None], Any]],
        copied: Callable[[Any], Any],
    ) -> None:
        free = available_bytes()
        # Asked first: Linux grants memory that it does not have, and then kills the process.
        self.is_whole = free is None or sum(t.nbytes for t in tensors) <= UNDO_FREE_SHARE * free
        self._tensors: list[tuple[Tensor, Tensor]] = []
        if self.is_whole:
            try:
                self._tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
            except (RuntimeError, MemoryError):  # torch has no error of its own for the host
                self.is_whole = False
        self._buffers = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
        self._states = [(o.state, {p: dict(s) for p, s in o.state.items()}) for o in optimizers]
        self._groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
        self._attributes = [
            (owner, name, getattr(owner, name))
            for owner, names in owners
            for name in names
            if hasattr(owner, name)
        ]
        states = [(s, state_of(s)) for s in schedulers]
        self._loaders: list[tuple[Callable[[Any], None], Any]] = [
            (s.load_state_dict, copied(state)) for s, state in states if state is not None
        ]
        self._loaders += loaders

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Return to the state that was; return what could not be put back."""
        failures = [] if self.is_whole else ["tensors: there was no host memory for a copy of them"]
        for mapping, before in [*self._buffers, *self._groups]:
            _replace(mapping, before)
        for states, known in self._states:
            for param in [p for p in states if p not in known]:
                del states[param]
            for param, before in known.items():
                _replace(states[param], before)
        for owner, name, value in self._attributes:
            setattr(owner, name, value)
        for target, kept in self._tensors:
            try:
                target.copy_(kept)
            except Exception as error:
                failures.append(f"a tensor of shape {tuple(target.shape)}: {error!r}")
        for load, state in self._loaders:
            try:
                load(state)
            except Exception as error:
                failures.append(f"{getattr(load, '__qualname__', load)}: {error!r}")
        # A scheduler may write the groups when it is loaded.
        for mapping, before in self._groups:
            _replace(mapping, before)
        return failures


def _replace(mapping: Any, before: Mapping[Any, Any]) -> None:
    """Give a mapping its entries again; the object stays, because others hold it."""
    for key in [k for k in mapping if k not in before]:
        del mapping[key]
    mapping.update(before)


_PLAIN = (int, float, str, bool, type(None))
_REQUIRES_GRAD = attrgetter("requires_grad")
_SCALER_TENSORS = ("_scale", "_growth_tracker")


class StateMismatch(RuntimeError):
    """The saved state does not fit the run any more; nothing was changed."""


class RestoreFailed(RuntimeError):
    """A saved state could not be written over the run.

    Attributes:
        is_mixed: whether parts of it were written and could not be taken back; else the run is what
            it was before.
    """

    def __init__(self, reason: str, is_mixed: bool = False) -> None:
        super().__init__(reason)
        self.is_mixed = is_mixed


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

    Attributes:
        added: state that the user keeps beside the model, see :meth:`heal.Healer.add_state`.
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
        self.added = AddedStates(note)
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
        return without_duplicates(self.named_tensors())

    def without_nan(self) -> dict[Key, Tensor]:
        """Return the keys of buffers that NaN has no place in, and whether they held it before."""
        named = self.buffers.without_nan().items()
        return {("buffer", name): was_bad for name, (_, was_bad) in named}

    def everything(self) -> dict[Key, Tensor]:
        """Return the same and all other buffers, as a checkpoint has them."""
        return without_duplicates(self.named_tensors(all_buffers=True))

    def values(self) -> dict[str, Any]:
        """Return copies of all plain values; clip statistics stay tensors on the device."""
        return {
            "groups": [[_settings(g) for g in o.param_groups] for o in self.optimizers],
            "state": [self._plain_state(o) for o in self.optimizers],
            "clip": [o.clipper.state_dict() for o in self.optimizers],
            "schedulers": [copied(state_of(s)) for s in self.schedulers],
            "modules": copied(extra_states(self.model, self._note)),
            "added": self.added.saved(),
        }

    def check(self, saved: Mapping[Key, Tensor]) -> None:
        """Raise unless :meth:`restore` can write these; nothing is changed.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
        """
        self._check(saved, self.everything())

    @torch.no_grad()
    def restore(
        self,
        saved: Mapping[Key, Tensor],
        values: Mapping[str, Any],
        settle: Callable[[], None] = lambda: None,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Write saved tensors and values over those of the run, in place: all of them or none.

        What was not there when they were saved, such as moments before the first step, is removed;
        what has gone since is made again.

        Args:
            saved: the tensors, by key.
            values: what :meth:`values` returned.
            settle: called once all is written; if it raises, all is taken back.
            all_agree: asks every rank whether it succeeded. If one did not, all take it back.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
            RestoreFailed: something raised while it was written; all was taken back.
        """
        live = self.everything()
        created = self._check(saved, live)
        undo, problem = self._undo(saved, live), None
        try:
            self._write(saved, values, live, created)
            settle()
        except Exception as error:
            problem = error
        if not all_agree(problem is None):
            failures = undo.put_back()
            self.buffers.restored()
            why = "another rank failed" if problem is None else repr(problem)
            told = f"; could not take back {failures[0]}" if failures else ""
            raise RestoreFailed(f"{why}{told}", bool(failures)) from problem
        for o, optimizer in enumerate(self.optimizers):
            # Where ranks add up this is a message to all: it comes once every rank has succeeded.
            optimizer.clipper.load_state_dict(values["clip"][o])
            optimizer.forget_momentum()
        self.buffers.restored()

    def _undo(self, saved: Mapping[Key, Tensor], live: Mapping[Key, Tensor]) -> Undo:
        firsts = (("buffer", name) for name in self.buffers.firsts)
        keys = dict.fromkeys([*saved, *firsts])
        owners = [] if self.scaler is None else [(self.scaler, _SCALER_TENSORS)]
        modules = copied(extra_states(self.model, self._note))
        kept: list[tuple[Callable[[Any], None], Any]] = [
            (lambda states: set_extra_states(self.model, states, self._note), modules),
            (self.added.load, self.added.saved()),
        ]
        return Undo(
            [live[key] for key in keys if key in live and not live[key].is_inference()],
            self.model,
            self.optimizers,
            self.schedulers,
            owners,
            kept,
            copied,
        )

    def _write(
        self,
        saved: Mapping[Key, Tensor],
        values: Mapping[str, Any],
        live: dict[Key, Tensor],
        created: Mapping[Key, Tensor],
    ) -> None:
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
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            if state is not None:
                scheduler.load_state_dict(copied(state))
        extra = values.get("modules", {})  # not in the first checkpoints
        set_extra_states(self.model, copied(extra), self._note)
        self.added.load(values.get("added", {}))
        self._forget_young_scaler(saved)

    def keys_of(self, optimizer: int | None, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` that forward reads: moving buffers, and trained parameters.

        Args:
            optimizer: only the parameters of this one, and no buffers; all if None.
            keys: of a snapshot.
        """
        chosen = self.optimizers if optimizer is None else [self.optimizers[optimizer]]
        trained = {id(p) for o in chosen for p in _optimized(o)}
        params = self.parameters()
        return [
            key
            for key in keys
            if (key[0] == "parameter" and id(params[int(key[1])]) in trained)
            or (key[0] == "buffer" and optimizer is None)
        ]

    def restore_settings(self, values: Mapping[str, Any]) -> None:
        """Put back parameter groups, schedulers and state beside the model; no tensor is written.

        Args:
            values: what :meth:`values` returned, of this very state but for these.
        """
        for optimizer, groups in zip(self.optimizers, values["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(copied(settings))
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            if state is not None:
                scheduler.load_state_dict(copied(state))
        set_extra_states(self.model, copied(values.get("modules", {})), self._note)
        self.added.load(values.get("added", {}))

    def named_tensors(self, all_buffers: bool = False) -> Iterator[tuple[Key, Tensor]]:
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
            device = self.device_of(key) if there is None else there.device
            created[key] = torch.empty_like(tensor, device=device)
        for key in live:
            if key[0] == "parameter" and key not in saved:
                raise StateMismatch(f"{_shown(key)} is new since the state was saved")
        return created

    def device_of(self, key: Key) -> torch.device:
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


# The random number generators of a process, read and put back without drawing from them.


@dataclass(frozen=True, slots=True)
class RngState:
    """Python, numpy if it is in use, torch on the CPU and on every accelerator that was used."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> "RngState":
        """Read all generators. Nothing waits: accelerator generators keep their state here."""
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else (),
        )

    def put_back(self) -> None:
        """Set all generators to this state."""
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda and _cuda_in_use():
            torch.cuda.set_rng_state_all(self.cuda)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
