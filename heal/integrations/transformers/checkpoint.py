"""What healing has learned, beside the trainer's checkpoints, so that a resumed run is the same."""

import os
from pathlib import Path
from typing import Any

import torch

from heal.loop import Healer

FILE = "healing.pt"
VERSION = 1


def save_healing(healer: Healer, folder: str | Path) -> None:
    """Write clip statistics, detectors and the factor on the learning rate into a checkpoint."""
    run = healer._run
    state = {
        "version": VERSION,
        "clip": [optimizer.clipper.state_dict() for optimizer in healer.optimizers],
        "loss": healer._guarded.watch.state,
        "detectors": healer._listener.watch.state(),
        "lr_scale": run.lr_scale,
        "lr_ramp": run._ramp,
        "micro_batches": run.micro_batches,
    }
    beside = Path(folder) / f"{FILE}.partial"
    torch.save(state, beside)
    os.replace(beside, Path(folder) / FILE)


def load_healing(healer: Healer, folder: str | Path) -> str:
    """Return to what was saved; nothing if the checkpoint was made without healing.

    Returns:
        Why it could not be read, empty if it could. Training then goes on and learns anew.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return ""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if state["version"] != VERSION:
            return f"{path} is of version {state['version']}; wanted {VERSION}"
        for optimizer, clip in zip(healer.optimizers, state["clip"], strict=True):
            optimizer.clipper.load_state_dict(clip)
        healer._guarded.watch.state.copy_(state["loss"])
        healer._listener.watch.load_state(state["detectors"])
        healer._run.lr_scale = state["lr_scale"]
        healer._run._ramp = state["lr_ramp"]
        healer._run.micro_batches = state["micro_batches"]
    except Exception as error:  # a torn file raises almost anything
        return f"{path} cannot be read: {error!r}"
    return ""
