"""Gives the tensors of a run names that outlive the process, and finds them again by these.

:class:`heal.training_state.TrainingState` says what a run is made of; here it gets names that
do not hang on the order of parameters, on wrappers around the model, or on the number of ranks.
"""

import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from heal.buffers import Key
from heal.checkpoint.encode import Chunk, all_of, chunk_of, encode
from heal.checkpoint.files import CannotEncode, CheckpointError
from heal.checkpoint.manifest import committed
from heal.checkpoint.plan import Ranks
from heal.checkpoint.reading import CheckpointReader, Restored
from heal.plain_values import plain_name
from heal.training_state import StateMismatch, TrainingState


@dataclass(slots=True)
class Contents:
    """What one rank saves.

    Attributes:
        tensors: by name, as they are in the run, or copies of these.
        chunks: of those that are part of a larger tensor.
        values: everything else, as JSON.
    """

    tensors: dict[str, Tensor]
    chunks: dict[str, Chunk] = field(default_factory=dict)
    values: Any = None


class Names:
    """The names of a run's parameters.

    Attributes:
        parameters: of model and optimizers, each once.
        names: of these, in the same order.
        optimized: the parameters of each optimizer, in its own order.
    """

    def __init__(self, state: TrainingState) -> None:
        known = {id(p): plain_name(name) for name, p in state.model.named_parameters()}
        self.parameters = state.parameters()
        self.names = [known.get(id(p), f"unnamed.{i}") for i, p in enumerate(self.parameters)]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.optimized: list[list[Tensor]] = [
            [p for group in optimizer.param_groups for p in group["params"]]
            for optimizer in state.optimizers
        ]
        name_of = {id(p): name for p, name in zip(self.parameters, self.names, strict=True)}
        self._optimized_names = [[name_of[id(p)] for p in params] for params in self.optimized]
        self._optimized_index = [
            {name: i for i, name in enumerate(names)} for names in self._optimized_names
        ]

    def text(self, key: Key) -> str:
        """Return the name of a tensor of the run."""
        kind, *rest = key
        if kind == "parameter":
            rest = [self.names[int(rest[0])]]
        elif kind == "buffer":
            rest = [plain_name(str(rest[0]))]
        elif kind == "state":
            o, i, name = rest
            rest = [o, self._optimized_names[int(o)][int(i)], name]
        return "/".join([str(kind), *(quote(str(part), safe=".") for part in rest)])

    def key(self, text: str, buffers: Mapping[str, str]) -> Key | None:
        """Return the key of a name; None if the run has no such parameter, optimizer or buffer."""
        kind, *rest = (unquote(part) for part in text.split("/"))
        try:
            if kind == "parameter":
                return (kind, self.index[rest[0]])
            if kind == "buffer":
                return (kind, buffers.get(rest[0], rest[0]))
            if kind == "state":
                o, name, what = rest
                return (kind, int(o), self._optimized_index[int(o)][name], what)
            if kind == "group":
                return (kind, int(rest[0]), int(rest[1]), rest[2])
        except (KeyError, ValueError, IndexError):
            return None
        return (kind, *rest) if kind in ("scaler", "extra") else None


def collect(state: TrainingState, extra: Mapping[str, Any]) -> Contents:
    """Return all that a run needs to go on elsewhere; nothing is copied, nothing waits.

    Args:
        state: the run.
        extra: further plain values, such as the position in the data.

    Raises:
        CannotEncode: a value has no safe form on disk; names it.
    """
    state.notice_changes()
    names = Names(state)
    originals: dict[Key, Tensor] = dict(state._named_tensors(all_buffers=True))
    local = state.everything()
    for i, param in enumerate(names.parameters):
        if not state.is_trainable(param):
            originals["parameter", i] = param
            local["parameter", i] = getattr(param, "_local_tensor", param).detach()
    contents = Contents({})
    for key, tensor in local.items():
        name = names.text(key)
        contents.tensors[name] = tensor
        chunk = chunk_of(originals[key])
        if chunk is not None and chunk.shape == tuple(tensor.shape):
            contents.chunks[name] = chunk
    training = state.values()
    training["modules"] = _extra_states_for_disk(training["modules"])
    own = {"training": training, "names": _names_for_others(state, names)}
    contents.values, inside = encode({**own, **extra})
    contents.tensors.update(inside)
    return contents


def _extra_states_for_disk(states: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what has no safe form on disk: an odd object must not cost the checkpoint."""
    kept = {}
    for name, value in states.items():
        with contextlib.suppress(CannotEncode):
            encode(value)
            kept[name] = value
    return kept


def _names_for_others(state: TrainingState, names: Names) -> dict[str, Any]:
    """What a state_dict of torch has and our names do not: order, aliases, what it leaves out."""
    known = {id(p): name for p, name in zip(names.parameters, names.names, strict=True)}
    groups = [
        [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in state.optimizers
    ]
    named = state.model.named_parameters(remove_duplicate=False)
    aliases = {plain_name(name): known[id(p)] for name, p in named}
    passing = [
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in state.model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]
    return {
        "optimizers": _kinds(state),
        "groups": groups,
        "aliases": {name: target for name, target in aliases.items() if name != target},
        "non_persistent": passing,
    }


def wanted_chunk(state: TrainingState, names: Names, text: str) -> Chunk | None:
    """Return which part of a saved tensor this rank needs; None if that is not known.

    Moments that are not there yet are cut as their parameter is.
    """
    key = names.key(text, {})
    if key is None or key[0] not in ("parameter", "state"):
        return None
    if key[0] == "parameter":
        there = names.parameters[int(key[1])]
    else:
        param = names.optimized[int(key[1])][int(key[2])]
        there = state.optimizers[int(key[1])].state.get(param, {}).get(key[3], param)
    return chunk_of(there) or all_of(there)


@torch.no_grad()
def put_back(
    state: TrainingState, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Write saved tensors and values over those of a run, in place.

    Raises:
        StateMismatch: the run is made of other parameters, groups or schedulers; nothing was
            changed.
    """
    names = Names(state)
    saved = _by_key(state, names, tensors)
    frozen = _check_parameters(state, names, saved)
    _check_known(saved)
    _check_values(state, values)
    _make_sharded_state(state, names, saved)
    for param, tensor in frozen:
        getattr(param, "_local_tensor", param).copy_(tensor)
    state.restore(saved, values)


def keyed(state: TrainingState, names: Names, tensors: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Return saved tensors under the keys of a run, without those of frozen parameters.

    Raises:
        StateMismatch: the run is made of other parameters.
    """
    saved = _by_key(state, names, tensors)
    _check_parameters(state, names, saved)
    _check_known(saved)
    return saved


def _by_key(state: TrainingState, names: Names, tensors: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """What the run does not have stays under its name."""
    buffers = {plain_name(name): name for name, _ in state.model.named_buffers()}
    return {
        names.key(text, buffers) or (text,): tensor
        for text, tensor in tensors.items()
        if not text.startswith("value/")
    }


def _check_known(saved: Mapping[Key, Tensor]) -> None:
    strange = next((key[0] for key in saved if "/" in str(key[0])), None)
    if strange is not None:
        raise StateMismatch(f"the checkpoint holds {strange!r}, which this run does not have")


def _check_parameters(
    state: TrainingState, names: Names, saved: dict[Key, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Take frozen parameters out of ``saved`` and return them with what is saved of each."""
    live = state.tensors()
    frozen: list[tuple[Tensor, Tensor]] = []
    for i, param in enumerate(names.parameters):
        key: Key = ("parameter", i)
        is_trained = key in live
        there = live.get(key, getattr(param, "_local_tensor", param))
        if key not in saved:
            if is_trained or not _shares_memory(there, live):
                raise StateMismatch(f"parameter {names.names[i]!r} is not in the checkpoint")
            continue
        if there.shape != saved[key].shape or there.dtype != saved[key].dtype:
            raise StateMismatch(
                f"parameter {names.names[i]!r} is {there.dtype} {tuple(there.shape)} and was "
                f"{saved[key].dtype} {tuple(saved[key].shape)} when it was saved"
            )
        if not is_trained:
            frozen.append((param, saved.pop(key)))
    return frozen


def _kinds(state: TrainingState) -> list[str]:
    """The classes of the optimizers: fused or not, in this package or in torch, they are alike."""
    return [type(optimizer.inner).__name__ for optimizer in state.optimizers]


def check_kinds(state: TrainingState, values: Mapping[str, Any]) -> None:
    """Compare the optimizers of a checkpoint with those of a run, before anything is changed.

    Their settings would be loaded over each other where they have the same name, such as ``lr``.

    Raises:
        StateMismatch: an optimizer is of another kind, or has settings that were not saved.
    """
    saved, here = values.get("names", {}).get("optimizers"), _kinds(state)
    if saved is not None and saved != here:  # not in the first checkpoints
        raise StateMismatch(
            f"the checkpoint is of {', '.join(saved)}, this run has {', '.join(here)}; expected "
            "the same optimizers in the same order. To go on with another optimizer, load the "
            "weights alone and start a new checkpoint_dir"
        )
    for kind, optimizer, groups in zip(
        here, state.optimizers, values["training"]["groups"], strict=False
    ):
        for group in groups:
            lacking = sorted(set(optimizer.inner.defaults) - set(group) - {"lr"})  # may be a tensor
            if lacking and saved is None:
                raise StateMismatch(
                    f"the checkpoint has no {', '.join(lacking)} for {kind}: it is of another "
                    "optimizer; expected the same one"
                )


def _shares_memory(tensor: Tensor, live: Mapping[Key, Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(t.untyped_storage()._cdata == storage for t in live.values())


def _check_values(state: TrainingState, values: Mapping[str, Any]) -> None:
    counts = {
        "optimizers": (len(values["groups"]), len(state.optimizers)),
        "schedulers": (len(values["schedulers"]), len(state.schedulers)),
    }
    for o, optimizer in enumerate(state.optimizers):
        saved = len(values["groups"][o]) if o < len(values["groups"]) else 0
        counts[f"parameter groups of optimizer {o}"] = (saved, len(optimizer.param_groups))
    for what, (there, here) in counts.items():
        if there != here:
            raise StateMismatch(f"the checkpoint has {there} {what}, this run {here}")


def _make_sharded_state(state: TrainingState, names: Names, saved: Mapping[Key, Tensor]) -> None:
    """Make the moments of sharded parameters: as plain tensors the optimizer would refuse them."""
    for key, tensor in saved.items():
        if key[0] != "state":
            continue
        optimizer = state.optimizers[int(key[1])]
        param: Any = names.optimized[int(key[1])][int(key[2])]
        local = getattr(param, "_local_tensor", None)
        if local is None or key[3] in optimizer.state.get(param, {}):
            continue
        made: Any = torch.empty_like(tensor, device=state._device_of(key))
        if tensor.shape == local.shape and tensor.dim():
            from torch.distributed.tensor import DTensor

            made = DTensor.from_local(
                made,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        optimizer.state[param][key[3]] = made


# A checkpoint as torch's own state dicts, for whoever has no healer; no pickle is involved.


def state_dicts(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Return a checkpoint as torch's own state dicts; no pickle is involved.

    Args:
        directory: of the checkpoints.
        step: which one; the newest if None.

    Returns:
        ``step``, ``model``, ``optimizers`` (a list), ``schedulers`` (a list) and ``extra``: what
        ``load_state_dict`` of each takes; ``parameter_names``, by optimizer and
        number. Parts that ranks saved are put together.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    restored = _read(directory, step)
    names = restored.values["names"]
    model = {
        _name_of(text): tensor
        for text, tensor in restored.tensors.items()
        if text.startswith(("parameter/", "buffer/"))
    }
    for alias, target in names["aliases"].items():
        model[alias] = model[target]
    for name in names["non_persistent"]:
        model.pop(name, None)
    return {
        "step": restored.step,
        "model": model,
        "optimizers": [_optimizer(restored, o) for o in range(len(names["groups"]))],
        "schedulers": restored.values["training"]["schedulers"],
        "parameter_names": [[n for g in groups for n in g] for groups in names["groups"]],
        "extra": restored.values.get("extra"),
    }


def _optimizer(restored: Restored, o: int) -> dict[str, Any]:
    training, groups = restored.values["training"], restored.values["names"]["groups"][o]
    number = {name: i for i, name in enumerate([n for group in groups for n in group])}
    state: dict[int, dict[str, Any]] = {
        i: dict(plain) for i, plain in enumerate(training["state"][o]) if plain is not None
    }
    listed = []
    for g, (names, settings) in enumerate(zip(groups, training["groups"][o], strict=True)):
        listed.append({**settings, "params": [number[name] for name in names]})
        prefix = f"group/{o}/{g}/"
        listed[-1].update(
            {t[len(prefix) :]: v for t, v in restored.tensors.items() if t.startswith(prefix)}
        )
    for text, tensor in restored.tensors.items():
        kind, *rest = text.split("/")
        if kind == "state" and int(rest[0]) == o:
            state.setdefault(number[unquote(rest[1])], {})[unquote(rest[2])] = tensor
    return {"state": state, "param_groups": listed}


def _read(directory: str | os.PathLike[str], step: int | None) -> Restored:
    found = [f for f in committed(Path(directory)) if step is None or f.step == step]
    if not found:
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{directory} has no finished checkpoint{which}")
    return CheckpointReader(found[-1].path).read_whole()


def _name_of(text: str) -> str:
    return unquote(text.split("/", 1)[1])


# Random generators after a load, also where there are more ranks than were saved.


def restore_rng(restored: Restored, ranks: Ranks) -> None:
    """Set the generators as they were; a rank that is new gets a stream of its own.

    The state of another rank would give it the same random numbers, and so the same dropout, as
    that rank has.
    """
    if ranks.rank == restored.rank:
        restored.values["rng"].put_back()
        return
    text = f"{restored.save_id} {ranks.rank}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
    torch.manual_seed(seed)  # of all devices
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
