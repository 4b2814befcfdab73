"""Puts checkpoints aside whose steps were taken back, so that no resume begins with them."""

import os
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from heal.checkpoint.files import put_aside

ABANDONED = "abandoned-"
"""Before the name: what begins with ``checkpoint-`` the trainer counts, keeps and removes."""


def checkpoint_folder(trainer: Any, step: int) -> Path:
    """Return where the trainer saves its checkpoint of a step."""
    return Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def put_undone_aside(trainer: Any, steps: set[int]) -> list[Path]:
    """Rename the checkpoints of those steps that are after the trainer's present one.

    The best one may be among them: then there is none, until a better one is found.

    Args:
        trainer: where it went back to.
        steps: those that this run has saved; a folder may hold what others left there.

    Returns:
        What they are called now.

    Raises:
        OSError: one cannot be renamed.
    """
    state, renamed = trainer.state, []
    for step in sorted(step for step in steps if step > state.global_step):
        path = checkpoint_folder(trainer, step)
        if trainer.args.should_save and path.is_dir():
            renamed.append(put_aside(path, ABANDONED + path.name))
    best = state.best_model_checkpoint
    if best is not None and not os.path.isdir(best):
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
    return renamed
