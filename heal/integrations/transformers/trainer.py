"""The wrapper: an already built trainer, trained under healing."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from heal.config import HealingConfig
from heal.healer.dry_run import DryRunReport
from heal.integrations.patches import Patches
from heal.integrations.trackers import make_trackers
from heal.integrations.transformers.callback import (
    RetryingCallback,
    SelfHealingCallback,
    TrackedNumbers,
)
from heal.integrations.transformers.checks import check_ready
from heal.integrations.transformers.dry_run import dry_run
from heal.integrations.transformers.summary import summary
from heal.loop import Healer

MORE_EPOCHS = 10**6
"""Passes over the data beyond the planned ones: steps that were undone need batches too.

The trainer stops by its number of steps, which stays what it was.
"""


class SelfHealingTrainer:
    """Trains a ``transformers.Trainer``, or any trainer of TRL, and heals what goes wrong.

    Args:
        trainer: already built; it is changed only while :meth:`train` runs, and put back after.
        config: how patient to be, and how hard to push back; a dict of settings will do. With
            ``zclip_enabled`` our clipper takes the place of the trainer's, with the trainer's
            ``max_grad_norm`` for its limit.
        run_dir: where journal and postmortem go; the trainer's ``output_dir`` if None.
        trackers: names or objects that are shown alerts and numbers, beside the trainer's own
            ``report_to``, which is shown the numbers anyhow.
        plateau_lr_factor: what the learning rate is multiplied by when preference training stays
            at chance, from 1 to 5; None for an alert and no more.
        sleep: waits between retries of what the network refused.

    Raises:
        TypeError: the trainer is none.
        ConfigError: a setting is unknown or wrong.
        ValueError: a tracker is not known, or the factor makes no sense.

    Example:
        >>> trainer = SFTTrainer(model, args=args, train_dataset=dataset)
        >>> result = SelfHealingTrainer(trainer, HealingConfig()).train()
        >>> result.metrics["healing/recovery_attempts"]
    """

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig | Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        trackers: Any = None,
        *,
        plateau_lr_factor: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._callback = RetryingCallback(
            trainer, config, run_dir, plateau_lr_factor=plateau_lr_factor, sleep=sleep
        )
        self.trainer = trainer
        self.config = self._callback.config
        self._callback.trackers = make_trackers(trackers) or None

    @property
    def healer(self) -> Healer | None:
        """The healer of the run, None before :meth:`train`."""
        return self._callback.healer

    def dry_run(self, num_steps: int = 2) -> DryRunReport:
        """Try some steps on the trainer's own data and take them back: all is as it was before.

        Returns:
            Losses, seconds and problems; ``is_ok`` if training can begin.
        """
        check_ready(self.trainer, SelfHealingCallback)
        return dry_run(self.trainer, num_steps)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as the trainer does, healing on the way.

        Args:
            resume_from_checkpoint: as the trainer takes it; what healing had learned by then is in
                the checkpoint too.
            kwargs: passed on.

        Returns:
            What the trainer's own ``train`` returns; its ``metrics`` also hold a summary of
            healing.

        Raises:
            CannotHeal: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
            RuntimeError: the trainer is training already.
            PermissionError: its ``output_dir`` cannot be written.
        """
        trainer, callback, patches = self.trainer, self._callback, Patches()
        check_ready(trainer, SelfHealingCallback)
        if resume_from_checkpoint:
            kwargs["resume_from_checkpoint"] = resume_from_checkpoint
        callback.session = None
        callback.resumed_from = _checkpoint(trainer, resume_from_checkpoint)
        numbers = TrackedNumbers(lambda: {} if self.healer is None else self.healer.metrics())
        error: BaseException | None = None
        try:
            if hasattr(trainer, "set_initial_training_values"):
                patches.set(trainer, "set_initial_training_values", self._more_epochs())
            trainer.callback_handler.callbacks.insert(0, numbers)
            trainer.add_callback(callback)
            output = trainer.train(**kwargs)
            if callback.session is not None and callback.session.stopped is not None:
                raise callback.session.stopped
        except BaseException as raised:
            error = raised
            raise
        finally:
            callback.detach()
            for added in (callback, numbers):
                trainer.remove_callback(added)
            patches.put_back()
            trainer.is_in_train = False
            if callback.session is not None:
                callback.session.close(error)
        if self.healer is not None and hasattr(output, "metrics"):
            output.metrics.update(summary(self.healer))
        return output

    def _more_epochs(self) -> Callable[..., Any]:
        planned = self.trainer.set_initial_training_values

        def values(*args: Any, **kwargs: Any) -> Any:
            epochs, *rest = planned(*args, **kwargs)
            self._callback.planned_epochs = epochs
            if _steps_done(self._callback.resumed_from) >= rest[-1]:
                return (epochs, *rest)  # all were taken: one epoch more would be one step more
            return (min(epochs + MORE_EPOCHS, 2**62), *rest)

        return values


def _steps_done(checkpoint: str | None) -> int:
    """Return how many steps a trainer had taken when it saved a checkpoint."""
    path = Path(checkpoint or "") / TRAINER_STATE_NAME
    if checkpoint is None or not path.is_file():
        return 0  # the trainer will say what is wrong with it
    return int(TrainerState.load_from_json(str(path)).global_step)


def _checkpoint(trainer: Any, resume: str | bool | None) -> str | None:
    if resume is True:
        found: str | None = get_last_checkpoint(trainer.args.output_dir)
        return found
    return str(resume) if resume else None
