"""What becomes of a trainer's checkpoints whose steps were taken back: no resume begins with them.

At least one sound checkpoint stays, if there was one, whatever kills the run next.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from heal.checkpoint.files import put_aside

ABANDONED = "abandoned-"
"""Before the name: what begins with ``checkpoint-`` the trainer counts, keeps and removes."""


def checkpoint_folder(trainer: Any, step: int) -> Path:
    """Return where the trainer saves its checkpoint of a step."""
    return Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


class UndoneCheckpoints:
    """Knows what a run has saved, and puts aside what it took back.

    Args:
        trainer: about to take its first step.
        note: told of what cannot be renamed or removed; it is left.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._note = note
        # Of this run only, with what it was resumed from: a folder may hold what others left there.
        self._steps: set[int] = {trainer.state.global_step}
        self._bad_step = 0

    def after_save(self) -> list[Path]:
        """Count a checkpoint of the trainer's present step; what it replaces is put aside.

        As many of those put aside stay, for the post-mortem, as the trainer keeps good ones.

        Returns:
            What was put aside, by its present name.
        """
        self._steps.add(self._trainer.state.global_step)
        renamed = self.put_aside(self._bad_step)
        limit = self._trainer.args.save_total_limit
        if limit and limit > 0 and self._trainer.args.should_save:
            self._remove_abandoned(limit)
        return renamed

    def put_aside(self, bad_step: int) -> list[Path]:
        """Rename checkpoints of steps after the trainer's present one.

        If none of the steps before is left, the newest of a sound state stays until the trainer has
        saved again: a kill before that would leave nothing to resume from. The best one may be
        among those renamed: then there is none, until a better one is found.

        Args:
            bad_step: the first step that may have done damage.

        Returns:
            What they are called now.
        """
        self._bad_step = bad_step
        state, renamed = self._trainer.state, []
        there = {s: p for s in self._steps if (p := checkpoint_folder(self._trainer, s)).is_dir()}
        undone = sorted(step for step in there if step > state.global_step)
        if len(undone) == len(there):
            # A checkpoint of a step is what the step began with.
            kept = max((step for step in undone if step <= bad_step), default=None)
            undone = [step for step in undone if step != kept]
        for step in undone if self._trainer.args.should_save else ():
            try:
                renamed.append(put_aside(there[step], ABANDONED + there[step].name))
            except OSError as error:
                self._note(f"{there[step]} was taken back, and cannot be renamed: {error}")
        best = state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        return renamed

    def _remove_abandoned(self, keep: int) -> None:
        folder = Path(self._trainer.args.output_dir)
        found = [p for p in folder.glob(f"{ABANDONED}{PREFIX_CHECKPOINT_DIR}-*") if p.is_dir()]
        found.sort(key=lambda path: (path.stat().st_mtime, path.name))  # when it was saved
        for path in found[: max(0, len(found) - keep)]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._note(f"cannot remove {path}: {error}")
