"""Where a trainer is: the counters, sums and buffers that it keeps beside weights and optimizer."""

import copy
from typing import Any

import torch
from torch import Tensor

SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""What the trainer adds up between two lines of its log."""

BEST = ("best_metric", "best_model_checkpoint", "best_global_step")
"""What the trainer's state holds of its best evaluation, which may be of a step that is undone."""

ONLINE = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_current_train_step_time",
    "_total_train_tokens",
)
"""What trainers of TRL keep from step to step: generations to train on, numbers to log."""


class TrainerPosition:
    """Saves the place of a trainer as plain values, and returns it to such a place.

    Args:
        trainer: whose ``state`` and sums are meant.
        replays: whether data are rewound as well, so that epochs are counted back.

    Attributes:
        replays: whether data are rewound as well.
        was_set_back: whether the trainer was returned since the last :meth:`settle`.
    """

    def __init__(self, trainer: Any, replays: bool) -> None:
        self._trainer = trainer
        self.replays = replays
        self._epochs_ahead = 0.0  # the loop's own count of epochs cannot be set back
        self._ahead = 0.0  # by the rollback of this step
        self.was_set_back = False

    def save(self) -> dict[str, Any]:
        """Return the place; a sum on the device is copied there."""
        trainer, state = self._trainer, self._trainer.state
        running = getattr(trainer, "_tr_loss", None)
        return {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "tokens": state.num_input_tokens_seen,
            "flos": state.total_flos,
            "logged": len(state.log_history),
            "best": {name: getattr(state, name) for name in BEST if hasattr(state, name)},
            "running_loss": running.detach().clone() if isinstance(running, Tensor) else None,
            "sums": {name: getattr(trainer, name) for name in SUMS if hasattr(trainer, name)},
            "online": {
                name: _copied(getattr(trainer, name)) for name in ONLINE if hasattr(trainer, name)
            },
        }

    @torch.no_grad()
    def put_back(self, saved: dict[str, Any]) -> None:
        """Return to a place. Lines of the log about steps that are undone are taken out."""
        trainer, state = self._trainer, self._trainer.state
        if self.replays and state.epoch is not None:
            self._ahead += state.epoch - (saved["epoch"] or 0.0)
        state.global_step, state.epoch = saved["global_step"], saved["epoch"]
        state.num_input_tokens_seen, state.total_flos = saved["tokens"], saved["flos"]
        del state.log_history[saved["logged"] :]
        for name, value in saved["best"].items():
            setattr(state, name, value)
        if saved["running_loss"] is not None:
            trainer._tr_loss.copy_(saved["running_loss"])
        for name, value in saved["sums"].items():
            setattr(trainer, name, value)
        for name, value in saved["online"].items():
            setattr(trainer, name, _copied(value))
        self.was_set_back = True

    def correct_epoch(self) -> None:
        """Count epochs by the data seen: the trainer's loop counts what was undone as well."""
        state = self._trainer.state
        self._epochs_ahead, self._ahead = self._epochs_ahead + self._ahead, 0.0
        if self._epochs_ahead and state.epoch is not None:
            state.epoch -= self._epochs_ahead

    def settle(self, control: Any, is_loop_set_back: bool = False) -> bool:
        """After a step: tell whether it was undone, and if so keep it from being logged or saved.

        A stop that the undone step had reached is taken back too.

        Args:
            control: of the trainer.
            is_loop_set_back: whether the trainer's loop follows, so that it counts epochs right.
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


def _copied(value: Any) -> Any:
    """Containers anew, tensors shared: buffered generations are replaced, never written to."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copied(item)) for key, item in value.items())
        return made
    return value
