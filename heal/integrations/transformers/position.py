"""Where a trainer is, beside weights and optimizer, and which of its checkpoints still count."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from heal.checkpoint.files import put_aside
from heal.data.split import own_copy

COUNTS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos")
BEST = ("best_metric", "best_model_checkpoint", "best_global_step")
"""What the trainer's state holds of its best evaluation, which may be of a step that is undone."""

SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""What the trainer adds up between two lines of its log."""

ONLINE = (
    *("_step", "_buffered_inputs", "_metrics"),
    *("_current_train_step_time", "_total_train_tokens"),
)
"""What trainers of TRL keep from step to step: generations to train on, numbers to log."""


class TrainerPosition:
    """Saves the place of a trainer as plain values, and returns it to such a place.

    Attributes:
        replays: whether data are rewound as well, so that epochs are counted back.
        was_set_back: whether the trainer was returned since the last :meth:`settle`.
    """

    def __init__(self, trainer: Any, replays: bool) -> None:
        self._trainer = trainer
        self.replays = replays
        self._epochs_ahead = 0.0  # the loop's own count of epochs cannot be set back
        self._ahead = 0.0  # by the rollback of this step
        self.was_set_back = False

    def save(self) -> dict[str, Any]:
        """Return the place; a sum on the device is copied there, buffered tensors are shared."""
        trainer, state = self._trainer, self._trainer.state
        running = getattr(trainer, "_tr_loss", None)
        return {
            "state": {name: getattr(state, name) for name in COUNTS + BEST if hasattr(state, name)},
            "logged": len(state.log_history),
            "running_loss": running.detach().clone() if isinstance(running, Tensor) else None,
            "sums": {name: getattr(trainer, name) for name in SUMS if hasattr(trainer, name)},
            "online": {
                name: own_copy(getattr(trainer, name)) for name in ONLINE if hasattr(trainer, name)
            },
        }

    @torch.no_grad()
    def put_back(self, saved: dict[str, Any]) -> None:
        """Return to a place. Lines of the log about steps that are undone are taken out."""
        trainer, state = self._trainer, self._trainer.state
        if self.replays and state.epoch is not None:
            self._ahead += state.epoch - (saved["state"]["epoch"] or 0.0)
        for name, value in saved["state"].items():
            setattr(state, name, value)
        del state.log_history[saved["logged"] :]
        if saved["running_loss"] is not None:
            trainer._tr_loss.copy_(saved["running_loss"])
        for name, value in {**saved["sums"], **own_copy(saved["online"])}.items():
            setattr(trainer, name, value)
        self.was_set_back = True

    def correct_epoch(self) -> None:
        """Count epochs by the data seen: the trainer's loop counts what was undone as well."""
        state = self._trainer.state
        self._epochs_ahead, self._ahead = self._epochs_ahead + self._ahead, 0.0
        if self._epochs_ahead and state.epoch is not None:
            state.epoch -= self._epochs_ahead

    def settle(self, control: Any, is_loop_set_back: bool = False) -> bool:
        """Return whether the step just taken was undone; if so it is neither logged nor saved.

        A stop that the undone step had reached is undone too. ``is_loop_set_back``: the trainer's
        loop follows, so that it counts epochs right.
        """
        if not self.was_set_back:
            return False
        self.was_set_back = False
        if is_loop_set_back:
            self._ahead = 0.0
        control.should_log = control.should_save = control.should_evaluate = False
        if self._trainer.state.global_step < self._trainer.state.max_steps:
            control.should_training_stop = False
        return True


# What becomes of a trainer's checkpoints whose steps were undone: no resume begins with them.
#
# At least one sound checkpoint stays, if there was one, whatever kills the run next.

ABANDONED = "abandoned-"
"""Before the name: what begins with ``checkpoint-`` the trainer counts, keeps and removes."""


def checkpoint_folder(trainer: Any, step: int) -> Path:
    """Return where the trainer saves its checkpoint of a step."""
    return Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


class UndoneCheckpoints:
    """Keeps a list of what a run has saved, and puts aside what it undid.

    What cannot be renamed or removed is noted and left.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._note = note
        # Of this run only, with what it was resumed from: a folder may hold those of other runs.
        self._steps: set[int] = {trainer.state.global_step}
        self._bad_step = 0

    def after_save(self) -> list[Path]:
        """Count a checkpoint of the trainer's present step, and put aside what it replaces.

        As many of those put aside stay, for the post-mortem, as the trainer keeps good ones.
        Returns the new names.
        """
        self._steps.add(self._trainer.state.global_step)
        renamed = self.put_aside(self._bad_step)
        limit = self._trainer.args.save_total_limit
        if limit and limit > 0 and self._trainer.args.should_save:
            self._remove_abandoned(limit)
        return renamed

    def put_aside(self, bad_step: int) -> list[Path]:
        """Rename checkpoints of steps after the trainer's present one; return their new names.

        If none of the steps before is left, the newest from before ``bad_step``, the first that may
        have done damage, stays until the trainer has saved again: a kill before that would leave
        nothing to resume from. If the best one is renamed, there is none until the next best.
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
                self._note(f"{there[step]} was undone, and cannot be renamed: {error}")
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
