"""Watches a trainer from within: what its hooks tell goes to the healer."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from heal.config import HealingConfig
from heal.healer.arguments import checked_config
from heal.integrations.patches import Patches
from heal.integrations.transformers.checkpoint import load_healing, save_healing
from heal.integrations.transformers.checks import checked_factor, checked_trainer
from heal.integrations.transformers.session import Session
from heal.integrations.transformers.undone_checkpoints import checkpoint_folder
from heal.loop import Healer


class SelfHealingCallback(TrainerCallback):
    """Detection, clipping and refusal for a trainer, without the retry loop.

    Gradients are measured before they are clipped; a step with NaN or Inf is refused on the
    device; loss, gradients, weights and evaluations are watched; damage that was accepted is
    rolled back in memory. Exceptions pass: for these take :class:`SelfHealingTrainer`.

    Args:
        trainer: the one that it is added to: hooks are told neither of losses nor of gradients
            before clipping.
        config: how patient to be; a dict of settings will do.
        run_dir: where the journal goes; the trainer's ``output_dir`` if None.
        plateau_lr_factor: what the learning rate is multiplied by when preference training stays
            at chance, from 1 to 5; None for an alert and no more.
        sleep: waits between retries.

    Attributes:
        session: the run that is under way, or the last one; None before.
        resumed_from: the checkpoint whose healing state is to be taken up; None for none.
        trackers: told of every decision; None for none.

    Raises:
        TypeError: the trainer is none.
        ConfigError: a setting is unknown or wrong.

    Example:
        >>> trainer.add_callback(SelfHealingCallback(trainer))
        >>> trainer.train()
    """

    _retries = False

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig | Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        *,
        plateau_lr_factor: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plateau_lr_factor = checked_factor(plateau_lr_factor)
        self.config = checked_config(config)
        self.session: Session | None = None
        self.resumed_from: str | None = None
        self.trackers: Any = None
        self._trainer = checked_trainer(trainer)
        self._run_dir = run_dir
        self._sleep = sleep
        self._patches = Patches()

    @property
    def healer(self) -> Healer | None:
        """The healer of the run, None before the first."""
        return None if self.session is None else self.session.healer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()
        folder = args.output_dir if self._run_dir is None else self._run_dir
        self.session = Session(
            self._trainer,
            self.config,
            folder,
            self._retries,
            self._sleep,
            self._patches,
            self._plateau_lr_factor,
            self.trackers,
        )
        trouble = load_healing(self.session, self.resumed_from) if self.resumed_from else ""
        if trouble:
            self.session.healer.parts.notes.add(trouble)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.end_step(control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        loss = (metrics or {}).get("eval_loss")
        if self.session is not None and loss is not None:
            self.session.healer.observe_eval(float(loss))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.session is not None and logs:
            self.session.observe_log(logs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self.session
        if session is None:
            return
        folder = checkpoint_folder(self._trainer, state.global_step)
        if args.should_save and folder.is_dir():
            session.healer.parts.notes.contain(lambda: save_healing(session, folder))
        session.note_save()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()
        if self.session is not None:
            self.session.close()

    def detach(self) -> None:
        """Give the trainer back as it was; done at the end of training."""
        self._patches.put_back()


class RetryingCallback(SelfHealingCallback):
    """What :class:`SelfHealingTrainer` adds to its trainer for the time of ``train``."""

    _retries = True
    planned_epochs: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.planned_epochs is not None:
            state.num_train_epochs = self.planned_epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on after an epoch of which nothing was given out; the trainer takes it for the end."""
        session = self.session
        if session is None or session.batches is None or session.stopped is not None:
            return
        if session.batches.has_lost_epoch and state.global_step < state.max_steps:
            control.should_training_stop = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the end to the wrapper: a stop that was asked for is told by an exception."""
        self.detach()


class TrackedNumbers(TrainerCallback):
    """Stands before the trainer's trackers, and adds what healing measured to their numbers.

    The trainer's own log was written by then and stays as it is.
    """

    def __init__(self, numbers: Callable[[], dict[str, float]]) -> None:
        self._numbers = numbers

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None:
            logs.update(self._numbers())
