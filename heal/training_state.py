"""What a training run is made of: every tensor and every plain value that a step may change.

Tensors are listed under keys, so that a copy of them can be matched with the run later, when
optimizer state may have come, gone or been replaced.
"""

import copy
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.buffers import (
    BufferCopies,
    Key,
    copy_and_hash,
    is_run_of_bytes,
    local_part,
    version_of,
    without_duplicates,
)
from heal.extra_state import AddedStates, extra_states, set_extra_states, state_of
from zclip import ClippedOptimizer
from zclip.parallel.placement import is_dtensor

UNDO_FREE_SHARE = 0.5  # of the memory now free, that a copy may take
Loader = tuple[Callable[[Any], None], Any]
"""A function that sets a state, and the state to call it with."""

_PLAIN = (int, float, str, bool, type(None))
_REQUIRES_GRAD = attrgetter("requires_grad")
_SCALER_TENSORS = ("_scale", "_growth_tracker")


class StateMismatch(RuntimeError):
    """The saved state does not fit the run any more; nothing was changed."""


class RestoreFailed(RuntimeError):
    """A saved state could not be written over the run.

    Attributes:
        is_mixed: whether parts of it were written and could not be undone; else the run is what it
            was before.
    """

    def __init__(self, reason: str, is_mixed: bool = False) -> None:
        super().__init__(reason)
        self.is_mixed = is_mixed


class Undo:
    """The present state of a run, to return to if a restore fails half-way.

    A restore calls schedulers, modules and functions of the user, and copies across devices; any of
    these may raise. Weights of one step beside moments of another are a state that no run had.
    ``tensors``, which it overwrites, are copied to host memory; if there is no room for that,
    :attr:`is_whole` is False. It may replace entries of ``mappings``, and ``loaders`` put back what
    other objects keep.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        mappings: Iterable[MutableMapping[Any, Any]],
        loaders: Sequence[Loader],
    ) -> None:
        free = available_bytes()
        # Asked first: Linux grants memory that it does not have, and then kills the process.
        self.is_whole = free is None or sum(t.nbytes for t in tensors) <= UNDO_FREE_SHARE * free
        copies: list[Tensor] = []
        if self.is_whole:
            try:
                copies = [t.detach().to("cpu", copy=True) for t in tensors]
            except (RuntimeError, MemoryError):  # torch has no error of its own for the host
                self.is_whole = False
        self._tensors = list(zip(tensors, copies, strict=True)) if self.is_whole else []
        self._mappings = [(mapping, dict(mapping)) for mapping in mappings]
        self._loaders = loaders

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Return to the state that was; return what could not be put back."""
        failures = [] if self.is_whole else ["tensors: there was no host memory for a copy of them"]
        for target, before in self._tensors:
            try:
                target.copy_(before)
            except Exception as error:
                failures.append(f"a tensor of shape {tuple(target.shape)}: {error!r}")
        for load, state in self._loaders:
            try:
                load(state)
            except Exception as error:
                failures.append(f"{getattr(load, '__qualname__', load)}: {error!r}")
        # Last, because a scheduler may write parameter groups when it is loaded. The mappings
        # themselves stay, because other objects hold them.
        for mapping, entries in self._mappings:
            for key in [k for k in mapping if k not in entries]:
                del mapping[key]
            mapping.update(entries)
        return failures


class TrainingState:
    """The model, its optimizers and what goes with them.

    Args:
        model: its parameters and all its buffers count, the non-persistent ones too.
        optimizers: their state, and every setting of their parameter groups.
        schedulers: saved and loaded through their own ``state_dict``, where they have one.
        extra: further tensors that belong to the run, under names of their own.
        buffers: knows which buffers move; the others are not among the tensors. Made if None.
        note: called with a text for each module whose extra state cannot be read or set.

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
        self._signature: object = None
        self._sizes: list[int] = []
        self._known: list[Tensor] = []

    def named_parameters(self) -> dict[str, Tensor]:
        """Return every parameter of model and optimizers once, by name."""
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        known = {id(p) for p in named.values()}
        for optimizer in self.optimizers:
            for param in optimized(optimizer):
                if id(param) not in known:
                    known.add(id(param))
                    named[f"unnamed.{len(named)}"] = param
        return named

    def parameters(self) -> list[Tensor]:
        """Return every parameter of model and optimizers, once."""
        return list(self.named_parameters().values())

    def optimized_by_name(self, optimizer: int) -> dict[str, Tensor]:
        """Return the parameters of an optimizer, in its own order."""
        names = {id(p): name for name, p in self.named_parameters().items()}
        return {names[id(p)]: p for p in optimized(self.optimizers[optimizer])}

    def is_trainable(self, param: Tensor) -> bool:
        """Return whether steps may change a parameter, as far as can be seen."""
        if param.requires_grad or param.grad is not None:
            return True
        if id(param) in self._changed_though_frozen or id(param) in self._was_trainable:
            return True
        return any(param in optimizer.state for optimizer in self.optimizers)

    def constants(self) -> list[tuple[Key, Tensor]]:
        """Return frozen parameters and still buffers: what no snapshot holds."""
        frozen: list[tuple[Key, Tensor]] = [
            (("parameter", name), param)
            for name, param in self.named_parameters().items()
            if not self.is_trainable(param)
        ]
        return frozen + [(("buffer", name), buffer) for name, buffer in self.buffers.still()]

    def name_of(self, key: Key) -> str:
        """Return what people call a tensor."""
        return " ".join(map(str, key))

    def count_as_changing(self, key: Key) -> None:
        """Make what seemed constant, and was written, a part of the state."""
        if key[0] == "buffer":
            self.buffers.count_as_moving(str(key[1]))
        else:
            self._changed_though_frozen.add(id(self.named_parameters()[str(key[1])]))

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

    def has_changed_shape(self) -> bool:
        """Return whether parameters came, went, froze or thawed since last asked.

        This runs in every step, so it walks through nothing but a list. A parameter that no
        optimizer has is not trained and not looked for.
        """
        sizes = [len(g["params"]) for o in self.optimizers for g in o.inner.param_groups]
        if sizes != self._sizes:  # walking through the modules takes longer than all the rest
            self._sizes = sizes
            self._known = self.parameters()
        trainable = bytes(map(_REQUIRES_GRAD, self._known))
        if trainable != self._flags:
            self._flags = trainable
            self._was_trainable.clear()
        before = self._signature
        late = len(self._changed_though_frozen), self.buffers.num_late
        self._signature = (trainable, late, sizes)
        return self._signature != before

    def tensors(self) -> dict[Key, Tensor]:
        """Return all tensors that steps may change, each part of memory once."""
        return without_duplicates(self.named_tensors())

    def everything(self) -> dict[Key, Tensor]:
        """Return the same and all other buffers, as a checkpoint has them."""
        return without_duplicates(self.named_tensors(all_buffers=True))

    def without_nan(self) -> dict[Key, Tensor]:
        """Return the keys of buffers that NaN has no place in, and whether they held it before."""
        named = self.buffers.without_nan().items()
        return {("buffer", name): was_bad for name, (_, was_bad) in named}

    def keys_of(self, optimizer: int | None, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` that forward reads: moving buffers, and trained parameters.

        With the number of an optimizer only its parameters, and no buffers.
        """
        chosen = range(len(self.optimizers)) if optimizer is None else [optimizer]
        trained = {name for o in chosen for name in self.optimized_by_name(o)}
        return [
            key
            for key in keys
            if (key[0] == "parameter" and key[1] in trained)
            or (key[0] == "buffer" and optimizer is None)
        ]

    def named_tensors(self, all_buffers: bool = False) -> Iterator[tuple[Key, Tensor]]:
        """Yield all tensors that steps may change; also still buffers if ``all_buffers``."""
        params = self.named_parameters()
        names = {id(param): name for name, param in params.items()}
        for name, param in params.items():
            if self.is_trainable(param):
                yield ("parameter", name), param
        for name, buffer in self.model.named_buffers():
            if buffer.layout is torch.strided and (all_buffers or self.buffers.is_moving(name)):
                yield ("buffer", name), buffer
        for o, optimizer in enumerate(self.optimizers):
            for param in optimized(optimizer):
                for slot, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        yield ("state", o, names[id(param)], slot), value
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

    def values(self) -> dict[str, Any]:
        """Return copies of all plain values; clip statistics stay tensors on the device."""
        return {
            "groups": [[_settings(g) for g in o.param_groups] for o in self.optimizers],
            "state": [_plain_state(o) for o in self.optimizers],
            "clip": [o.clipper.state_dict() for o in self.optimizers],
            "schedulers": [copied(state_of(s)) for s in self.schedulers],
            "modules": copied(extra_states(self.model, self._note)),
            "added": self.added.saved(),
        }

    def check(self, saved: Mapping[Key, Tensor]) -> None:
        """Raise StateMismatch unless :meth:`restore` can write these; nothing is changed."""
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

        What did not exist when they were saved, such as moments before the first step, is removed;
        what has gone since is made again.

        Args:
            settle: called once all is written; if it raises, all is undone.
            all_agree: whether every rank succeeded, given whether this one did. If one did not, all
                undo the restore.

        Raises:
            StateMismatch: a parameter is missing or has another shape or dtype.
            RestoreFailed: something raised while it was written; all was undone.
        """
        live = self.everything()
        self._check(saved, live)
        undo, problem = self._undo(saved, live), None
        try:
            self._write(saved, values, live)
            settle()
        except Exception as error:
            problem = error
        if not all_agree(problem is None):
            failures = undo.put_back()
            self.buffers.restored()
            why = "another rank failed" if problem is None else repr(problem)
            what = f"; could not take back {failures[0]}" if failures else ""
            raise RestoreFailed(f"{why}{what}", bool(failures)) from problem
        for o, optimizer in enumerate(self.optimizers):
            # Where ranks add up this is a message to all: it comes once every rank has succeeded.
            optimizer.clipper.load_state_dict(values["clip"][o])
            optimizer.forget_momentum()
        self.buffers.restored()

    def restore_settings(self, values: Mapping[str, Any]) -> None:
        """Put back parameter groups, schedulers and state beside the model, but no tensors."""
        for optimizer, groups in zip(self.optimizers, values["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(copied(settings))
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            if state is not None:
                scheduler.load_state_dict(copied(state))
        modules = copied(values.get("modules", {}))  # not in the first checkpoints
        set_extra_states(self.model, modules, self._note)
        self.added.load(values.get("added", {}))

    def _undo(self, saved: Mapping[Key, Tensor], live: Mapping[Key, Tensor]) -> Undo:
        """Return what the restore of ``saved`` may change, as it is now."""
        firsts = (("buffer", name) for name in self.buffers.firsts)
        keys = dict.fromkeys([*saved, *firsts])
        tensors = [live[key] for key in keys if key in live and not live[key].is_inference()]
        mappings: list[MutableMapping[Any, Any]] = [m._buffers for m in self.model.modules()]
        for optimizer in self.optimizers:
            mappings += [*optimizer.param_groups, optimizer.state, *optimizer.state.values()]
        if self.scaler is not None:
            mappings.append(vars(self.scaler))
        states = [(s, copied(state_of(s))) for s in self.schedulers]
        loaders: list[Loader] = [(s.load_state_dict, x) for s, x in states if x is not None]
        loaders += [
            (
                lambda states: set_extra_states(self.model, states, self._note),
                copied(extra_states(self.model, self._note)),
            ),
            (self.added.load, self.added.saved()),
        ]
        return Undo(tensors, mappings, loaders)

    def _check(self, saved: Mapping[Key, Tensor], live: Mapping[Key, Tensor]) -> None:
        """Raise unless parameters are what they were. Other tensors are made again if need be."""
        for key, tensor in saved.items():
            now = live.get(key)
            if key[0] in ("parameter", "extra") and not _fits(now, tensor):
                found = "gone" if now is None else f"{now.dtype} {tuple(now.shape)}"
                raise StateMismatch(
                    f"{self.name_of(key)} was {tensor.dtype} {tuple(tensor.shape)} when it was "
                    f"saved and is {found}"
                )
        for key in live:
            if key[0] == "parameter" and key not in saved:
                raise StateMismatch(f"{self.name_of(key)} is new since the state was saved")

    def _write(
        self, saved: Mapping[Key, Tensor], values: Mapping[str, Any], live: dict[Key, Tensor]
    ) -> None:
        params = self.named_parameters()
        for key, tensor in saved.items():
            now = live.get(key)
            if not _fits(now, tensor):
                device = self._device_of(key, params) if now is None else now.device
                live[key] = torch.empty_like(tensor, device=device)
                self._attach(key, live[key], params)
        copy_by_kind([live[key] for key in saved], list(saved.values()), non_blocking=False)
        # Buffers that are new since then are left alone: caches are made in the first forward.
        for name, first in self.buffers.firsts.items():
            now = live.get(("buffer", name))
            if ("buffer", name) not in saved and now is not None and now.shape == first.shape:
                now.data.copy_(first)  # so that one of inference mode can be written
        for o in range(len(self.optimizers)):
            self._write_plain_state(o, saved, values["state"][o])
        self.restore_settings(values)
        for name in _SCALER_TENSORS:
            # A scale that did not exist yet begins again from the scaler's own start value.
            if hasattr(self.scaler, name) and ("scaler", name) not in saved:
                setattr(self.scaler, name, None)

    def _device_of(self, key: Key, params: Mapping[str, Tensor]) -> torch.device:
        """Return where a tensor that is not there yet belongs: moments beside their parameter."""
        if key[0] == "buffer":
            return next((p.device for p in params.values()), torch.device("cpu"))
        if key[0] != "state":
            return torch.device("cpu")
        param = params[str(key[2])]
        if key[3] != "step":
            return param.device
        groups = self.optimizers[int(key[1])].param_groups
        group = next(g for g in groups if any(p is param for p in g["params"]))
        on_device = group.get("capturable") or group.get("fused")
        return param.device if on_device else torch.device("cpu")

    def _attach(self, key: Key, tensor: Tensor, params: Mapping[str, Tensor]) -> None:
        if key[0] == "scaler":
            setattr(self.scaler, str(key[1]), tensor)
        elif key[0] == "buffer":
            owner, _, name = str(key[1]).rpartition(".")
            self.model.get_submodule(owner)._buffers[name] = tensor
        elif key[0] == "group":
            self.optimizers[int(key[1])].param_groups[int(key[2])][str(key[3])] = tensor
        else:
            param: Any = params[str(key[2])]
            if is_dtensor(param) and tensor.dim() and tensor.shape == local_part(param).shape:
                # The optimizer does not accept plain moments of a sharded parameter.
                tensor = type(param).from_local(
                    tensor,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
            self.optimizers[int(key[1])].state[param][key[3]] = tensor

    def _write_plain_state(
        self, o: int, saved: Mapping[Key, Tensor], plain: Sequence[dict[str, Any] | None]
    ) -> None:
        states = self.optimizers[o].state
        for i, (param_name, param) in enumerate(self.optimized_by_name(o).items()):
            known = plain[i] if i < len(plain) else None
            if known is None:
                states.pop(param, None)
                continue
            state = states[param]
            for name in list(state):
                if name not in known and ("state", o, param_name, name) not in saved:
                    del state[name]
            state.update(copied(known))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory the system could give without swapping; None if it does not say."""
    try:
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return min([int(line.split()[1]) * 1024, *_left_in_containers(root)])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _left_in_containers(root: Path) -> Iterator[int]:
    """Yield what the memory limits of our control groups leave: the system itself may have more.

    File cache counts as free, because it makes way.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, limit, used = "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"
        elif not controllers:  # version 2
            mount, limit, used = "sys/fs/cgroup", "max", "current"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in {root / mount / part for part in (group, *group.parents)}:
            most, now = (_lines(folder / f"memory.{name}") for name in (limit, used))
            if most and now and most[0].isdigit():
                stat = dict(row.split() for row in _lines(folder / "memory.stat"))
                cache = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
                yield int(most[0]) - int(now[0]) + int(cache)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the system; none if it is not there."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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


def _fits(now: Tensor | None, saved: Tensor) -> bool:
    """Return whether a saved tensor can be written over one of the run."""
    if now is None or now.is_inference():  # one of inference mode cannot be written
        return False
    return now.shape == saved.shape and now.dtype == saved.dtype


def optimized(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plain_state(optimizer: ClippedOptimizer) -> list[dict[str, Any] | None]:
    """Per parameter, the state that is no tensor; None if there is none at all."""
    return [
        {k: copied(v) for k, v in optimizer.state[p].items() if not isinstance(v, Tensor)}
        if p in optimizer.state
        else None
        for p in optimized(optimizer)
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a parameter group; its tensors are listed among the tensors."""
    return {
        name: copied(value)
        for name, value in group.items()
        if name not in ("params", "param_names") and not isinstance(value, Tensor)
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
