"""Gives the tensors of a run names that outlive the process, and finds them again by these.

They do not depend on the order of parameters, on wrappers of the model, or on the number of ranks.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from heal.buffers import Key, local_part
from heal.checkpoint.encode import encode
from heal.checkpoint.files import CannotEncode, newest_folder
from heal.checkpoint.manifest import ITEM_BYTES, Chunk, Entry
from heal.checkpoint.reading import CheckpointReader, checksum_text
from heal.extra_state import plain_name
from heal.training_state import StateMismatch, TrainingState
from zclip.parallel.placement import is_dtensor

NAMED = {"parameter": 0, "buffer": 0, "state": 1}
"""Kinds of keys that hold the name of a parameter or buffer, and where after the kind."""


class Names:
    """Names of a run's tensors on disk: keys as text, without the wrappers around the model."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.parameters = state.named_parameters()
        self._parameters = {plain_name(name): name for name in self.parameters}
        self._buffers = {plain_name(name): name for name, _ in state.model.named_buffers()}
        self._optimized = [state.optimized_by_name(o) for o in range(len(state.optimizers))]

    def text(self, key: Key) -> str:
        """Return the name of a tensor of the run."""
        kind, *rest = key
        if kind in NAMED:
            rest[NAMED[kind]] = plain_name(str(rest[NAMED[kind]]))
        return "/".join([str(kind), *(quote(str(part), safe=".") for part in rest)])

    def key(self, text: str) -> Key | None:
        """Return the key of a name; None if the run has no such parameter or optimizer."""
        parts = [unquote(part) for part in text.split("/")]
        try:
            match parts:
                case ["parameter", name]:
                    return ("parameter", self._parameters[name])
                case ["buffer", name]:
                    return ("buffer", self._buffers.get(name, name))
                case ["state", o, name, slot]:
                    full = self._parameters[name]
                    has_it = full in self._optimized[int(o)]
                    return ("state", int(o), full, slot) if has_it else None
                case ["group", o, g, name]:
                    return ("group", int(o), int(g), name)
                case ["scaler" | "extra", *_]:
                    return tuple(parts)
        except (KeyError, ValueError, IndexError):
            pass
        return None

    def part_of(self, text: str) -> Chunk | None:
        """Return which part of a saved tensor this rank needs; None if that is not known.

        Moments that do not exist yet are cut as their parameter is.
        """
        match self.key(text):
            case ("parameter", name):
                live = self.parameters[str(name)]
            case ("state", int(o), name, slot):
                param = self._optimized[o][str(name)]
                live = self.state.optimizers[o].state.get(param, {}).get(slot, param)
            case _:
                return None
        return chunk_of(live) or Chunk.all_of(live.shape)


def chunk_of(tensor: Any) -> Chunk | None:
    """Return which part of a DTensor this rank has; None for a tensor that is no part."""
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if all(isinstance(p, Replicate) for p in tensor.placements):
        return Chunk.all_of(tensor.shape)
    for placement in tensor.placements:
        if not isinstance(placement, (Replicate, Shard)):
            raise NotImplementedError(f"a tensor with placement {placement} is in no single place")
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tuple(tensor._local_tensor.shape)
    if tuple(shape) != local:
        raise NotImplementedError(f"expected a part of shape {tuple(shape)}, got one of {local}")
    begins = (int(s) for s in start) if 0 not in local else (0 for _ in local)
    return Chunk(tuple(tensor.shape), tuple(begins), local)


def entry_of(tensor: Tensor, name: str, chunk: Chunk | None = None) -> Entry:
    """Return the entry of a tensor, without its checksum and place; raise if it cannot be saved."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or tensor.layout is not torch.strided:
        raise CannotEncode(
            f"{name}: expected a dense tensor of numbers, got a {tensor.layout} one of "
            f"{tensor.dtype}"
        )
    whole, start = (None, None) if chunk is None else (chunk.whole, chunk.start)
    return Entry(0, dtype, tuple(tensor.shape), whole, start, checksum_text(0))


def collect(
    state: TrainingState, extra: Mapping[str, Any]
) -> tuple[dict[str, Entry], dict[str, Tensor], Any]:
    """Return everything that a run needs to continue elsewhere; nothing is copied, nothing waits.

    That is, of this rank: entries, the tensors as they are in the run, and values as JSON.
    """
    state.notice_changes()
    names = Names(state)
    originals = dict(state.named_tensors(all_buffers=True))
    local = state.everything()
    for name, param in names.parameters.items():
        if not state.is_trainable(param):
            originals["parameter", name] = param
            local["parameter", name] = local_part(param)
    training = state.values()
    for name, value in list(training["modules"].items()):
        try:
            encode(value)
        except CannotEncode:  # an odd object must not cost the checkpoint
            del training["modules"][name]
    values, encoded = encode({"training": training, "names": _names_for_torch(names), **extra})
    entries: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in local.items():
        text, chunk = names.text(key), chunk_of(originals[key])
        is_part = chunk is not None and chunk.shape == tuple(tensor.shape)
        entries[text] = entry_of(tensor, text, chunk if is_part else None)
        tensors[text] = tensor
    entries |= {text: entry_of(tensor, text) for text, tensor in encoded.items()}
    return entries, tensors | encoded, values


def _names_for_torch(names: Names) -> dict[str, Any]:
    """What a state_dict of torch has and our names do not: order, aliases, what it leaves out."""
    model = names.state.model
    by_id = {id(p): plain_name(name) for name, p in names.parameters.items()}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {plain_name(name): by_id[id(p)] for name, p in named}
    return {
        "optimizers": _kinds(names.state),
        "groups": [
            [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in names.state.optimizers
        ],
        "aliases": {name: target for name, target in aliases.items() if name != target},
        "non_persistent": [
            plain_name(f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name in sorted(module._non_persistent_buffers_set)
        ],
    }


def _kinds(state: TrainingState) -> list[str]:
    """The classes of the optimizers: fused or not, in this package or in torch, they are alike."""
    return [type(optimizer.inner).__name__ for optimizer in state.optimizers]


@torch.no_grad()
def put_back(names: Names, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write saved tensors and values over those of a run, or raise StateMismatch before that."""
    _check_optimizers(names.state, values)
    saved, frozen = matched(names, tensors)
    _check_counts(names.state, values["training"])
    for param, tensor in frozen:
        local_part(param).copy_(tensor)
    names.state.restore(saved, values["training"])


def matched(
    names: Names, tensors: Mapping[str, Tensor]
) -> tuple[dict[Key, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return saved tensors under the keys of a run, and frozen parameters with what was saved."""
    saved: dict[Key, Tensor] = {
        names.key(text) or (text,): tensor
        for text, tensor in tensors.items()
        if not text.startswith("value/")
    }
    live = names.state.tensors()
    storages = {tensor.untyped_storage()._cdata for tensor in live.values()}
    frozen: list[tuple[Tensor, Tensor]] = []
    for full_name, param in names.parameters.items():
        key: Key = ("parameter", full_name)
        name = plain_name(full_name)
        is_trained = key in live
        there = live.get(key, local_part(param))
        if key not in saved:
            if is_trained or there.untyped_storage()._cdata not in storages:
                raise StateMismatch(f"parameter {name!r} is not in the checkpoint")
            continue
        if there.shape != saved[key].shape or there.dtype != saved[key].dtype:
            raise StateMismatch(
                f"parameter {name!r}: expected {there.dtype} {tuple(there.shape)} as in this run, "
                f"got {saved[key].dtype} {tuple(saved[key].shape)} in the checkpoint; build the "
                "model as it was when it was saved"
            )
        if not is_trained:
            frozen.append((param, saved.pop(key)))
    strange = next((key[0] for key in saved if "/" in str(key[0])), None)
    if strange is not None:
        raise StateMismatch(f"the checkpoint holds {strange!r}, which this run does not have")
    return saved, frozen


def _check_optimizers(state: TrainingState, values: Mapping[str, Any]) -> None:
    """Raise if the checkpoint is of other optimizers: settings of one name, as lr, would mix."""
    saved, here = values.get("names", {}).get("optimizers"), _kinds(state)
    if saved == here:
        return
    if saved is None:  # one of the first checkpoints: judged by its settings
        of_each = zip(here, state.optimizers, values["training"]["groups"], strict=False)
        lacking = [
            # lr may be a tensor, which is not among the settings.
            (kind, sorted(set(optimizer.inner.defaults) - set(group) - {"lr"}))
            for kind, optimizer, groups in of_each
            for group in groups
        ]
        expected, missing = next((pair for pair in lacking if pair[1]), ("", []))
        if not missing:
            return
        got = f"one with no {', '.join(missing)}"
    else:
        expected, got = ", ".join(here), ", ".join(saved)
    raise StateMismatch(
        f"optimizers of the checkpoint: expected {expected}, as in this run, got {got}; to go on "
        "with another optimizer, load the weights alone and start a new checkpoint_dir"
    )


def _check_counts(state: TrainingState, training: Mapping[str, Any]) -> None:
    groups = training["groups"]
    counts = {
        "optimizers": (len(groups), len(state.optimizers)),
        "schedulers": (len(training["schedulers"]), len(state.schedulers)),
    }
    for o, optimizer in enumerate(state.optimizers):
        saved = len(groups[o]) if o < len(groups) else 0
        counts[f"parameter groups of optimizer {o}"] = (saved, len(optimizer.param_groups))
    for what, (saved, here) in counts.items():
        if saved != here:
            raise StateMismatch(
                f"{what}: expected {here} as in this run, got {saved} in the checkpoint; give the "
                "Healer what it had when the checkpoint was saved"
            )


def state_dicts(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Return the checkpoint of a step, the newest if None, as state dicts of torch; no pickle.

    Returns:
        ``step``, ``model``, ``optimizers`` (a list), ``schedulers`` (a list) and ``extra``: what
        ``load_state_dict`` of each takes; ``parameter_names``, by optimizer and
        number. Parts that ranks saved are put together.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    restored = CheckpointReader(newest_folder(Path(directory), step).path).read_whole()
    names, training = restored.values["names"], restored.values["training"]
    ordered = [[name for group in groups for name in group] for groups in names["groups"]]
    number = [{name: i for i, name in enumerate(params)} for params in ordered]
    model: dict[str, Tensor] = {}
    optimizers: list[dict[str, Any]] = []
    for o in range(len(ordered)):
        groups = [
            {**settings, "params": [number[o][name] for name in group]}
            for group, settings in zip(names["groups"][o], training["groups"][o], strict=True)
        ]
        plain = enumerate(training["state"][o])
        state = {i: dict(values) for i, values in plain if values is not None}
        optimizers.append({"state": state, "param_groups": groups})
    for text, tensor in restored.tensors.items():
        kind, *rest = (unquote(part) for part in text.split("/"))
        if kind in ("parameter", "buffer"):
            model[rest[0]] = tensor
        elif kind == "state":
            o = int(rest[0])
            optimizers[o]["state"].setdefault(number[o][rest[1]], {})[rest[2]] = tensor
        elif kind == "group":
            optimizers[int(rest[0])]["param_groups"][int(rest[1])][rest[2]] = tensor
    for alias, target in names["aliases"].items():
        model[alias] = model[target]
    for name in names["non_persistent"]:
        model.pop(name, None)
    return {
        "step": restored.step,
        "model": model,
        "optimizers": optimizers,
        "schedulers": training["schedulers"],
        "parameter_names": ordered,
        "extra": restored.values.get("extra"),
    }
