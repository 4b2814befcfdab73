"""The callback: builds a healer when training starts, and follows what it does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heal.actions import HealingError
from heal.config import HealingConfig
from heal.exit_codes import ExitCode
from heal.healer import Healer
from heal.integrations.lightning.steps import HealedSteps, LightningSchedule
from heal.integrations.patches import hold_models_of
from heal.integrations.trackers import Level, make_trackers
from zclip.integrations.lightning import Callback

# The Trainer's own loggers as a tracker.


class LoggersTracker:
    """Sends numbers to Lightning's loggers, which have no alerts; Python's log has those.

    Args:
        loggers: those of the Trainer; begun and ended by it.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the Trainer has started them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers, with the healer's count of steps."""
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Do nothing: the journal logs every recovery and alert by itself."""

    def close(self) -> None:
        """Do nothing: the Trainer ends them."""


# What cannot be healed under Lightning is said when training starts.


FOREIGN_STEPS = ("DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy", "XLAFSDPStrategy")
"""Strategies that keep gradients or weights where they cannot be measured."""


def check_start(config: HealingConfig, trainer: Any, module: Any) -> None:
    """Raise if this run cannot be healed.

    Raises:
        ValueError: names what does not fit, what was wanted, and what to do.
    """
    if config.after_rollback == "replay_data":
        raise ValueError(
            'after_rollback: expected "skip_data", got "replay_data", which rewinds the loader; '
            "Lightning owns that, so use Healer.run instead of the Trainer to replay data"
        )
    strategy = type(trainer.strategy).__name__
    if strategy in FOREIGN_STEPS:
        raise ValueError(
            f"strategy is {strategy}, which keeps gradients to itself; expected a single device, "
            "DDPStrategy or ModelParallelStrategy (FSDP2)"
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"{len(trainer.optimizers)} optimizers step by themselves in manual optimization, and "
            "a rollback between them has no meaning; expected one optimizer. To clip and refuse "
            "without rollback return zclip.wrap(optimizer) from configure_optimizers"
        )
    others = [type(c).__name__ for c in trainer.callbacks]
    if "ZClipLightningCallback" in others and config.zclip_enabled:
        raise ValueError(
            "ZClipLightningCallback would clip a second time; leave it out, or set "
            "zclip_enabled=False"
        )
    if others.count("SelfHealingLightningCallback") > 1:
        raise ValueError("SelfHealingLightningCallback is there twice; expected one")


class SelfHealingLightningCallback(Callback):  # type: ignore[misc]  # its type is left open
    """Clips, refuses NaN and Inf on the device, rolls back, lowers the LR, writes a postmortem.

    With ``zclip_enabled=False`` an undisturbed run is the bare one, bit by bit; a healthy step
    waits for nothing. After a rollback data goes on and ``global_step`` goes back with the
    weights, so that ``max_steps`` counts steps that are in them. Checkpoints of Lightning carry the
    state of clipping and healing.

    Args:
        config: how patient to be; ``data="replay"`` is not for Lightning, who owns the loader.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        trackers: names or objects, see :func:`heal.integrations.trackers.make_trackers`.
        log_to_loggers: send our numbers to the Trainer's loggers as well.
        eval_loss: the metric of validation that is compared with the training loss.

    Attributes:
        healer: of the present or last fit; None before the first.

    Raises:
        ValueError: when training starts: a setting, a strategy or another callback does not fit.

    Example:
        >>> trainer = Trainer(callbacks=[SelfHealingLightningCallback(run_dir="runs/a")])
        >>> trainer.fit(module, loader)
    """

    def __init__(
        self,
        config: HealingConfig | None = None,
        *,
        run_dir: str | Path | None = None,
        trackers: Any = None,
        log_to_loggers: bool = True,
        eval_loss: str = "val_loss",
    ) -> None:
        super().__init__()
        self.config = config if config is not None else HealingConfig()
        self.run_dir = run_dir
        self.trackers = make_trackers(trackers)
        self.log_to_loggers = log_to_loggers
        self.eval_loss = eval_loss
        self.healer: Healer | None = None
        self._steps: HealedSteps | None = None
        self._schedules: list[LightningSchedule] = []
        self._strategy: Any = None
        self._saved: dict[str, Any] | None = None
        self._first_step = 0  # of Lightning's count, where ours is 0

    # The fit begins and ends.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the healer, and have the strategy's optimizer steps taken by it."""
        check_start(self.config, trainer, pl_module)
        self._schedules = [
            LightningSchedule(config, lambda: self._steps is None or self._steps.is_before_step())
            for config in trainer.lr_scheduler_configs
        ]
        loggers = [LoggersTracker(trainer.loggers)] if self.log_to_loggers else []
        self.healer = Healer(
            pl_module,
            trainer.optimizers[0],
            self._schedules,
            self.config,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            run_dir=self.run_dir,
            rank=trainer.global_rank,
            trackers=[*self.trackers, *loggers],
        )
        self.healer.exits.enter()
        hold_models_of(trainer.callbacks, self.healer)
        if self._saved is not None:
            self._resume(self.healer, self._saved)
            self._saved = None
        self._first_step = trainer.global_step - (self.healer.last_step + 1)
        self._steps = HealedSteps(trainer, pl_module, self.healer)
        for _ in self.healer.batches(()):  # no batch: only the snapshot that comes before the first
            pass
        self._strategy = trainer.strategy
        self._strategy.optimizer_step = self._steps

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the postmortem of a run that finished."""
        self._finish(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the postmortem of a run that did not."""
        if type(exception).__name__ == "SIGTERMException":  # a SystemExit without a code
            exception = HealingError("told to stop by SIGTERM", ExitCode.PREEMPTED)
        self._finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the strategy as it was."""
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self._strategy is None or self.healer is None:
            return
        self._strategy.__dict__.pop("optimizer_step", None)
        self._strategy = None
        self.healer.close(error)
        self.healer.exits.leave()

    # Every batch.

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Note that what is raised from here on is raised by backward."""
        if self._steps is not None:
            self._steps.phase = "backward"

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follow a rollback: schedules and the count of steps."""
        if self._strategy is None or self._steps is None:
            return
        if not self._steps.has_stepped:
            self._steps.add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else None)
            return
        self._steps.has_stepped = False
        for schedule in self._schedules:
            schedule.settle()
        self._set_global_step(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the loss of validation with that of training; reads one number."""
        found = trainer.callback_metrics.get(self.eval_loss)
        if found is not None and self._strategy is not None and self.healer is not None:
            self.healer.observe_eval(float(found))

    def _set_global_step(self, trainer: Any, module: Any) -> None:
        """Count for Lightning the steps that are in the weights."""
        assert self.healer is not None
        assert self._steps is not None
        loop = trainer.fit_loop.epoch_loop
        if module.automatic_optimization:
            progress = loop.automatic_optimization.optim_progress.optimizer.step
        else:
            progress = loop.manual_optimization.optim_step_progress
        taken = self._first_step + self._steps.uncounted + self.healer.last_step + 1
        undone = progress.total.completed - taken
        for count in (progress.total, progress.current) if undone else ():
            count.ready = max(0, count.ready - undone)
            count.completed = max(0, count.completed - undone)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of clipping and healing, for Lightning's checkpoint."""
        if self.healer is None:
            return self._saved or {}
        return self.healer.memory.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._saved = state_dict or None

    @staticmethod
    def _resume(healer: Healer, saved: dict[str, Any]) -> None:
        """Go on with what is known; of what cannot be read healing learns anew, and says so."""
        try:
            healer.memory.load_state_dict(saved)
        except Exception as error:
            healer.note(f"the checkpoint's state of healing cannot be used: {error!r}")
