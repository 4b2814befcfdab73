"""To and from other formats: ``torch.save`` and torch.distributed.checkpoint (DCP).

Export is safe. Import is for files that you trust: both formats are pickle, and loading a pickle
runs whatever its author put into it. So every import requires ``trusted=True``. Nothing else in
this package imports this module.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal.checkpoint.contents import state_dicts
from heal.checkpoint.files import CheckpointError, whole_file
from heal.checkpoint.store import save
from heal.extra_state import listed, plain_name

EXPORT_MODE = 0o666  # as of any other file; checkpoints are private
MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizers", "optimizer", "optimizer_state_dict", "optim")
SCHEDULER_KEYS = ("schedulers", "scheduler", "lr_scheduler", "scheduler_state_dict")
"""Names that other programs use for these, in the order in which they are tried."""


class NotTrusted(CheckpointError):
    """A file that can run code was to be loaded without ``trusted=True``."""


def export_torch(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], step: int | None = None
) -> None:
    """Write a checkpoint as one file that ``torch.load`` reads; see :func:`state_dicts`."""
    dicts = state_dicts(directory, step)
    with (
        whole_file(Path(target), EXPORT_MODE) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        torch.save(dicts, file)


def export_dcp(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], step: int | None = None
) -> None:
    """Write a checkpoint as a folder that ``torch.distributed.checkpoint.load`` reads.

    Moments are under the names of their parameters, as that format has them.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    dicts = state_dicts(directory, step)
    for optimizer, known in zip(dicts["optimizers"], dicts["parameter_names"], strict=True):
        optimizer["state"] = {known[i]: state for i, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [known[i] for i in group["params"]]
    tree = {
        "model": dicts["model"],
        "optimizers": {str(o): optimizer for o, optimizer in enumerate(dicts["optimizers"])},
        "schedulers": {str(s): state for s, state in enumerate(dicts["schedulers"])},
        "step": dicts["step"],
    }
    save_dcp(tree, checkpoint_id=target, no_dist=True)


def import_torch(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    step: int,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    trusted: bool = False,
) -> Path:
    """Load a file of ``torch.save`` into a run, and save that as a checkpoint of ours.

    Args:
        source: a file with state dicts under common names, or that of a model alone.
        directory: of the checkpoints.
        step: the step that comes next.
        model: as it was when the file was made.
        optimizer: one, several or none.
        scheduler: one, several or None.
        trusted: that you would run a program of the file's author.

    Raises:
        NotTrusted: ``trusted`` is not True.
        CheckpointError: the file has no state dict for what was given.
    """
    _require_trust(source, trusted)
    try:
        tree = torch.load(source, map_location="cpu", weights_only=True)
    except Exception:  # it holds more than tensors: what runs now may be anything
        tree = torch.load(source, map_location="cpu", weights_only=False)
    return _take_over(tree, source, directory, step, model, optimizer, scheduler)


def import_dcp(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    step: int,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    trusted: bool = False,
) -> Path:
    """Load a folder of torch.distributed.checkpoint into a run; see :func:`import_torch`."""
    _require_trust(source, trusted)
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    _load_state_dict(
        tree,
        storage_reader=FileSystemReader(source),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return _take_over(tree, source, directory, step, model, optimizer, scheduler)


def _require_trust(source: object, trusted: bool) -> None:
    if trusted is not True:
        raise NotTrusted(
            f"{source} is a pickle, and loading it runs what its author put into it; give "
            "trusted=True if you would run a program of theirs"
        )


def _take_over(
    tree: Any,
    source: object,
    directory: str | os.PathLike[str],
    step: int,
    model: Module,
    optimizer: Any,
    scheduler: Any,
) -> Path:
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{source}: expected state dicts, got a {type(tree).__name__}")
    # A file of nothing but tensors is the state dict of a model.
    is_weights = bool(tree) and all(isinstance(value, Tensor) for value in tree.values())
    weights = _first(tree, MODEL_KEYS, tree if is_weights else None)
    if weights is None:
        raise CheckpointError(f"{source}: expected one of {', '.join(MODEL_KEYS)}, got {[*tree]}")
    optimizers, schedulers = listed(optimizer), listed(scheduler)
    saved_optimizers = _numbered(_first(tree, OPTIMIZER_KEYS, ()))
    saved_schedulers = _numbered(_first(tree, SCHEDULER_KEYS, ()))
    for what, given, saved in (
        ("optimizers", optimizers, saved_optimizers),
        ("schedulers", schedulers, saved_schedulers),
    ):
        if len(given) > len(saved):
            raise CheckpointError(f"{source}: expected {len(given)} {what}, got {len(saved)}")
    own = {plain_name(name): str(name) for name in model.state_dict()}
    plain = {own.get(plain_name(name), str(name)): tensor for name, tensor in weights.items()}
    model.load_state_dict(plain)
    for o, state in zip(optimizers, saved_optimizers, strict=False):
        o.load_state_dict(_by_number(state, o, model))
    for s, state in zip(schedulers, saved_schedulers, strict=False):
        if state is not None:  # it had none
            s.load_state_dict(dict(state))
    return save(directory, step, model, optimizers, schedulers)


def _by_number(state: Any, optimizer: Optimizer, model: Module) -> dict[str, Any]:
    """Moments under the names of parameters, put under their numbers in the optimizer."""
    if all(isinstance(key, int) for key in state["state"]):
        return dict(state)
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    groups = [
        {**group, "params": [number[plain_name(n)] for n in group["params"]]}
        for group in state["param_groups"]
    ]
    moments = {number[plain_name(name)]: entry for name, entry in state["state"].items()}
    return {"state": moments, "param_groups": groups}


def _first(tree: Mapping[str, Any], keys: Sequence[str], otherwise: Any) -> Any:
    return next((tree[key] for key in keys if tree.get(key) is not None), otherwise)


def _numbered(found: Any) -> list[Any]:
    """Return one state dict, or several in a list or under their numbers, as a list."""
    if not isinstance(found, Mapping):
        return list(found)
    if found and all(str(key).isdecimal() for key in found):
        return [found[key] for key in sorted(found, key=str)]
    return [found]
