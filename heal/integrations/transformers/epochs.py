"""The trainer's loop over an epoch, begun again at the place that a rollback returned to.

How many batches a step has, when gradients are synchronised and when an epoch is over follows from
counters that are local to that loop. With ``data = "replay"`` the data goes back, and so must they:
else a step of the replay would have other batches than it had the first time.
"""

from collections.abc import Callable
from typing import Any

from heal.integrations.patches import Patches

RESUMED = "a rollback"  # where a path of a checkpoint would stand; nothing is read from it


class ReplayedEpochs:
    """Stands in for ``trainer._run_epoch``; after a rollback it runs the epochs since once more.

    Args:
        trainer: whose loop it is.
        patches: where changes to the trainer are noted, to be undone by the owner.
    """

    def __init__(self, trainer: Any, patches: Patches) -> None:
        self._trainer = trainer
        self._run_epoch: Callable[..., None] = trainer._run_epoch
        self._on_epoch_end: Callable[..., Any] = trainer.callback_handler.on_epoch_end
        self._returns = False
        patches.set(trainer, "_run_epoch", self.run)
        patches.set(trainer.callback_handler, "on_epoch_end", self.on_epoch_end)

    def leave(self, control: Any) -> None:
        """Leave the loop after this step, because the trainer was returned to an earlier one."""
        self._returns = control.should_epoch_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> Any:
        """Tell the callbacks, unless the epoch was left for a replay and did not end."""
        return control if self._returns else self._on_epoch_end(args, state, control)

    def run(self, *, epoch: int, steps_in_epoch: int, **given: Any) -> None:
        """Run an epoch, and those before it that a rollback took back, to their ends."""
        trainer = self._trainer
        self._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **given)
        while self._returns and not trainer.control.should_training_stop:
            self._returns = trainer.control.should_epoch_stop = False
            place = trainer.state.epoch or 0.0
            first = int(place)
            passed = round((place - first) * steps_in_epoch)
            self._run_rest(first, passed, steps_in_epoch, given)
            for number in range(first + 1, epoch + 1):
                if self._returns or trainer.control.should_training_stop:
                    break
                trainer.control = trainer.callback_handler.on_epoch_begin(
                    trainer.args, trainer.state, trainer.control
                )
                self._run_rest(number, 0, steps_in_epoch, given)
        self._returns = False

    def _run_rest(self, epoch: int, passed: int, steps_in_epoch: int, given: Any) -> None:
        """Run an epoch from a batch on, as a trainer does that was resumed there."""
        patches = Patches()
        patches.set(self._trainer, "_load_rng_state", lambda checkpoint: None)  # we put it back
        patches.set(self._trainer.args, "ignore_data_skip", False)
        own = {
            "resume_from_checkpoint": RESUMED if passed else None,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": passed,
        }
        try:
            self._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **{**given, **own})
        finally:
            patches.put_back()
