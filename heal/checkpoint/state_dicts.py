"""A checkpoint as torch's own state dicts, for whoever has no healer; no pickle is involved."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from heal.checkpoint.errors import CheckpointError
from heal.checkpoint.folders import committed
from heal.checkpoint.reading import CheckpointReader, Restored


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
