"""The wrapper: an already built trainer, trained under healing."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heal.config import HealingConfig
from heal.integrations.transformers.callback import RetryingCallback
from heal.integrations.transformers.patches import Patches
from heal.loop import Healer

MORE_EPOCHS = 10**6
"""Passes over the data beyond the planned ones: steps that were undone need batches too.

The trainer stops by its number of steps, which stays what it was.
"""


class SelfHealingTrainer:
    """Trains a ``transformers.Trainer``, or any trainer of TRL, and heals what goes wrong.

    Args:
        trainer: already built; it is changed only while :meth:`train` runs, and put back after.
        config: how patient to be, and how hard to push back.
        run_dir: where journal and postmortem go; the trainer's ``output_dir`` if None.
        trackers: names or objects that are shown alerts and numbers.
        sleep: waits between retries of what the network refused.

    Example:
        >>> trainer = SFTTrainer(model, args=args, train_dataset=dataset)
        >>> result = SelfHealingTrainer(trainer, HealingConfig()).train()
        >>> result.metrics["healing/recovery_attempts"]
    """

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig | None = None,
        run_dir: str | Path | None = None,
        trackers: Any = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.trainer = trainer
        self.config = config if config is not None else HealingConfig()
        self._callback = RetryingCallback(trainer, self.config, run_dir, sleep=sleep)
        self._trackers = trackers

    @property
    def healer(self) -> Healer | None:
        """The healer of the run, None before :meth:`train`."""
        return self._callback.healer

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as the trainer does, healing on the way.

        Returns:
            What the trainer's own ``train`` returns; its ``metrics`` also hold a summary of
            healing.

        Raises:
            CannotHeal: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
        """
        trainer, patches = self.trainer, Patches()
        patches.set(trainer, "set_initial_training_values", self._more_epochs())
        trainer.add_callback(self._callback)
        error: BaseException | None = None
        try:
            output = trainer.train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._callback.detach()
            trainer.remove_callback(self._callback)
            patches.put_back()
            trainer.is_in_train = False
            if self._callback.session is not None:
                self._callback.session.close(error)
        output.metrics.update(self._summary())
        return output

    def _more_epochs(self) -> Callable[..., Any]:
        planned = self.trainer.set_initial_training_values

        def values(*args: Any, **kwargs: Any) -> Any:
            epochs, *rest = planned(*args, **kwargs)
            self._callback.planned_epochs = epochs
            return (min(epochs + MORE_EPOCHS, 2**62), *rest)

        return values

    def _summary(self) -> dict[str, float]:
        return {} if self.healer is None else self.healer.metrics()
