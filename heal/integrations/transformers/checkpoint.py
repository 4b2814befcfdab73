"""What healing has learned, beside the trainer's checkpoints, so that a resumed run is the same."""

import os
from pathlib import Path
from typing import Any

import torch

from heal.integrations.transformers.session import Session

FILE = "healing.pt"


def save_healing(session: Session, folder: str | Path) -> None:
    """Write what was tried, what is remembered and what was changed into a checkpoint."""
    unwanted = [] if session.batches is None else session.batches.unwanted()
    log, memory = session.log_watch.state(), session.healer.parts.memory
    state = {**memory.state_dict(), "log": log, "unwanted": unwanted}
    beside = Path(folder) / f"{FILE}.partial"
    torch.save(state, beside)
    os.replace(beside, Path(folder) / FILE)


def load_healing(session: Session, folder: str | Path) -> str:
    """Return to what was saved; nothing if the checkpoint was made without healing.

    Returns:
        Why it could not be read, empty if it could. Training goes on, and learns anew what is lost.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return ""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        session.healer.parts.memory.load_state_dict(state)
        session.log_watch.load_state(state["log"])
        if session.batches is not None:
            session.batches.leave_out(state["unwanted"])
    except Exception as error:  # a torn file raises almost anything
        return f"{path} cannot be read: {error!r}"
    return ""
