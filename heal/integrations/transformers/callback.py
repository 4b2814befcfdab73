"""Watches a trainer from within: what its hooks tell goes to the healer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from heal.config import HealingConfig
from heal.integrations.transformers.patches import Patches
from heal.integrations.transformers.session import Session
from heal.loop import Healer


class SelfHealingCallback(TrainerCallback):
    """Detection, clipping and refusal for a trainer, without the retry loop.

    Gradients are measured before they are clipped; a step with NaN or Inf is refused on the
    device; loss, gradients, weights and evaluations are watched; damage that was accepted is
    rolled back in memory. Exceptions pass: for these take :class:`SelfHealingTrainer`.

    Args:
        trainer: the one that it is added to: hooks are told neither of losses nor of gradients
            before clipping.
        config: how patient to be.
        run_dir: where the journal goes; the trainer's ``output_dir`` if None.
        sleep: waits between retries.

    Attributes:
        session: the run that is under way, or the last one; None before.

    Example:
        >>> trainer.add_callback(SelfHealingCallback(trainer))
        >>> trainer.train()
    """

    _retries = False

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig | None = None,
        run_dir: str | Path | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config if config is not None else HealingConfig()
        self.session: Session | None = None
        self._trainer = trainer
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
            self._trainer, self.config, folder, self._retries, self._sleep, self._patches
        )

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
