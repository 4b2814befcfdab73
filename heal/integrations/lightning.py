"""Healing under Lightning's loop: one callback.

Needs Lightning (``pip install 'zclip-heal[lightning]'``), which is imported with this module.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module

from heal.actions import HealingError
from heal.config import HealingConfig
from heal.data.split import own_copy
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.healer import Healer, checked_config
from heal.integrations.patches import Patches, hold_models_of
from heal.integrations.trackers import Level, make_trackers
from heal.lr_schedules import number_of
from zclip.integrations.lightning import Callback

__all__ = ["SelfHealingLightningCallback"]


class SelfHealingLightningCallback(Callback):  # type: ignore[misc]  # its type is left open
    """Clips, skips NaN and Inf on the device, rolls back, lowers the LR, writes a postmortem.

    With ``zclip_enabled=False`` a healthy run is bit-identical to the bare one; a healthy step
    waits for nothing. After a rollback data goes on and ``global_step`` goes back with the
    weights, so that ``max_steps`` counts steps that are in them. Checkpoints of Lightning carry the
    state of clipping and healing.

    Args:
        config: settings, or a dict of some; ``after_rollback="replay_data"`` is not possible,
            because Lightning owns the loader.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        trackers: names or objects, see :func:`heal.integrations.trackers.make_trackers`.
        log_to_loggers: send our numbers to the Trainer's loggers as well.
        eval_loss: the metric of validation that is compared with the training loss.

    Attributes:
        healer: of the present or last fit; None before the first.

    Raises:
        ConfigError: a setting has an unknown name or a wrong value.
        ValueError: when training starts: a setting, a strategy or another callback does not fit.

    Example:
        >>> trainer = Trainer(callbacks=[SelfHealingLightningCallback(run_dir="runs/a")])
        >>> trainer.fit(module, loader)
    """

    def __init__(
        self,
        config: HealingConfig | Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path | None = None,
        trackers: Any = None,
        log_to_loggers: bool = True,
        eval_loss: str = "val_loss",
    ) -> None:
        super().__init__()
        self.config = checked_config(config)
        self.run_dir = run_dir
        self.trackers = make_trackers(trackers)
        self.log_to_loggers = log_to_loggers
        self.eval_loss = eval_loss
        self.healer: Healer | None = None
        self._steps: HealedSteps | None = None  # None unless a fit is under way
        self._patches = Patches()
        self._saved: dict[str, Any] | None = None

    # The fit begins and ends.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the healer, and have it take the strategy's optimizer steps."""
        check_start(self.config, trainer)
        schedules = [
            LightningSchedule(config, lambda: self._steps is None or self._steps.is_before_step())
            for config in trainer.lr_scheduler_configs
        ]
        loggers = [LoggersTracker(trainer.loggers)] if self.log_to_loggers else []
        self.healer = healer = Healer(
            pl_module,
            trainer.optimizers[0],
            schedules,
            self.config,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            run_dir=self.run_dir,
            rank=trainer.global_rank,
            trackers=[*self.trackers, *loggers],
        )
        healer.enter(catches_signals=False)
        hold_models_of(trainer.callbacks, healer)
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                healer.memory.load_state_dict(saved)
                healer.journal.event("resumed", healer.last_step + 1)
            except Exception as error:  # healing learns it again
                healer.note(f"the checkpoint's state of healing cannot be used: {error!r}")
        self._steps = HealedSteps(trainer, pl_module, healer, schedules)
        for _ in healer.batches(()):  # no batch: only the snapshot that comes before the first
            pass
        self._patches.set(trainer.strategy, "optimizer_step", self._steps)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if type(exception).__name__ == "SIGTERMException":  # a SystemExit without a code
            exception = HealingError("stopped by SIGTERM", ExitCode.PREEMPTED)
        self._finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self._steps is not None and self.healer is not None:
            self._steps = None
            self._patches.put_back()
            self.healer.leave(error)

    # Every batch.

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.healer is not None:
            self.healer.micro.note_backward()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is not None:
            self._steps.end_batch(outputs.get("loss") if isinstance(outputs, Mapping) else None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the loss of validation with that of training; reads one number."""
        found = trainer.callback_metrics.get(self.eval_loss)
        if found is not None and self._steps is not None and self.healer is not None:
            self.healer.observe_eval(float(found))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of clipping and healing, for Lightning's checkpoint."""
        if self.healer is None:
            return self._saved or {}
        return self.healer.memory.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._saved = state_dict or None


FOREIGN_STEPS = ("DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy", "XLAFSDPStrategy")
"""Strategies that keep gradients or weights where they cannot be measured."""


def check_start(config: HealingConfig, trainer: Any) -> None:
    """Raise if this run cannot be healed.

    Raises:
        ValueError: names what does not fit, what is expected, and what to do.
    """
    if config.after_rollback == "replay_data":
        raise ValueError(
            'after_rollback: expected "skip_data", got "replay_data", which rewinds the loader; '
            "Lightning owns that, so use Healer.run instead of the Trainer to replay data"
        )
    strategy = type(trainer.strategy).__name__
    if strategy in FOREIGN_STEPS:
        raise ValueError(
            "strategy: expected a single device, DDPStrategy or ModelParallelStrategy (FSDP2), "
            f"got {strategy}, whose gradients cannot be measured"
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            "optimizers: expected one, because a rollback between the steps of several in manual "
            f"optimization has no meaning, got {len(trainer.optimizers)}; to clip and skip without "
            "rollback, return zclip.wrap(optimizer) from configure_optimizers"
        )
    callbacks = [type(c).__name__ for c in trainer.callbacks]
    if "ZClipLightningCallback" in callbacks and config.zclip_enabled:
        raise ValueError(
            "ZClipLightningCallback would clip a second time; leave it out, or set "
            "zclip_enabled=False"
        )
    num_healing = callbacks.count("SelfHealingLightningCallback")
    if num_healing > 1:
        raise ValueError(
            f"callbacks: expected one SelfHealingLightningCallback, got {num_healing}; leave out "
            "all but one"
        )


class LoggersTracker:
    """Sends numbers to Lightning's loggers, which the Trainer starts and ends.

    They have no alerts; the journal writes those to Python's log.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)

    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step)

    def alert(self, level: Level, title: str, text: str) -> None: ...

    def close(self) -> None: ...


class HealedSteps:
    """Replaces a strategy's ``optimizer_step``: backward by Lightning, step by the healer.

    What forward and backward raise is healed where the step can be repeated: in one process, with
    automatic optimization and no accumulation. Elsewhere Lightning gets it.
    """

    def __init__(
        self, trainer: Any, module: Module, healer: Healer, schedules: "list[LightningSchedule]"
    ) -> None:
        self._has_stepped = False
        self._schedules = schedules
        self._first_step = trainer.global_step - (healer.last_step + 1)  # where ours is 0
        self._trainer = trainer
        self._module = module
        self._healer = healer
        self._precision = trainer.precision_plugin
        self._scaler = getattr(self._precision, "scaler", None)
        self._is_automatic = bool(module.automatic_optimization)
        self._accumulate = int(trainer.accumulate_grad_batches)
        self._heals_errors = (
            self._is_automatic and self._accumulate == 1 and trainer.world_size == 1
        )
        self._uncounted = 0  # steps that Lightning counts although neither it nor we took them
        self._sum: Tensor | None = None  # of the losses of batches that were only accumulated
        self._num_summed = 0
        self._clips_before = self._watched.steps

    @property
    def _watched(self) -> Any:
        return self._healer.optimizers[0]

    def is_before_step(self) -> bool:
        """Return whether the optimizer has yet to take the step under way."""
        return bool(self._watched.steps == self._clips_before)

    def end_batch(self, loss: Tensor | None) -> None:
        """Add the loss of a batch that was only accumulated; after a step, follow a rollback."""
        if self._has_stepped:
            self._has_stepped = False
            for schedule in self._schedules:
                schedule.settle()
            self._correct_count()
        elif loss is not None:  # Lightning has divided it already
            self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
            self._num_summed += 1

    def __call__(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute gradients, call Lightning's hooks, and have the healer take the step.

        ``closure`` is forward, ``zero_grad`` and backward; it does nothing in manual optimization.
        """
        self._has_stepped = True
        self._clips_before = self._watched.steps
        is_done, loss = self._backward(closure)
        if not is_done:
            return None
        is_skipped = self._scaler is not None and self._is_automatic and loss is None
        handles_unscaling = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._scaler is not None and not handles_unscaling and not is_skipped:
            self._scaler.unscale_(self._watched)
        self._precision._after_closure(self._module, optimizer)
        if is_skipped:  # training_step returned None: under a scaler Lightning does not step
            self._uncounted += 1
            return None
        self._step(self._mean(loss))
        return loss

    def _correct_count(self) -> None:
        """Have Lightning count the steps that are in the weights, of all that it has taken."""
        loop = self._trainer.fit_loop.epoch_loop
        if self._is_automatic:
            progress = loop.automatic_optimization.optim_progress.optimizer.step
        else:
            progress = loop.manual_optimization.optim_step_progress
        taken = self._first_step + self._uncounted + self._healer.last_step + 1
        undone = progress.total.completed - taken
        for count in (progress.total, progress.current) if undone else ():
            count.ready = max(0, count.ready - undone)
            count.completed = max(0, count.completed - undone)

    def _backward(self, closure: Any) -> tuple[bool, Any]:
        """Return whether there are gradients, and the loss; False if the batch was given up."""
        step_fn = getattr(closure, "_step_fn", None)  # only in automatic optimization
        if step_fn is not None and self._healer.experiment.is_due:
            self._try_old_weights(step_fn.args[0])
        if step_fn is None or not self._heals_errors:
            return True, closure()
        micro, arguments = self._healer.micro, step_fn.args[0]
        # The first attempt gets the batch itself: hooks may look for what it wrote there.
        as_it_came = own_copy(arguments.get("batch"))

        def compute() -> Any:
            if micro.pieces > 1:
                return self._in_pieces(closure)
            micro.begin()
            return closure()

        def failed(diagnosis: Diagnosis) -> None:
            if "batch" in arguments:  # not if training_step draws from the loader itself
                arguments["batch"] = own_copy(as_it_came)

        is_done, loss = self._healer.repeat(compute, failed)
        if not is_done:
            loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
            closure._result = loop.output_result_cls(None)
        return is_done, loss

    def _try_old_weights(self, arguments: Mapping[str, Any]) -> None:
        """Compare old weights with today's on this batch; nothing is logged meanwhile."""
        if "batch" not in arguments:
            return  # training_step draws from the loader itself

        def compute() -> Tensor:
            output = self._trainer.strategy.training_step(*own_copy(list(arguments.values())))
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
            return loss

        with Patches() as patches:
            for name in ("log", "log_dict"):
                patches.set(self._module, name, lambda *args, **kwargs: None)
            self._healer.experiment.compare(compute)

    def _in_pieces(self, closure: Any) -> Tensor:
        """Forward and backward of a batch that does not fit whole, with Lightning's hooks."""
        micro, step_fn = self._healer.micro, closure._step_fn
        arguments = step_fn.args[0]
        batch = arguments["batch"]
        outputs = []

        def train_step(piece: Any) -> Tensor:
            arguments["batch"] = piece
            outputs.append(step_fn())
            loss: Tensor = outputs[-1].closure_loss
            return loss

        closure._zero_grad_fn()

        def with_hooks(loss: Tensor) -> Any:
            """Return what a MicroBatcher can call ``backward`` of: that of Lightning."""
            return SimpleNamespace(backward=lambda: closure._backward_fn(loss))

        try:
            loss = micro.backward([batch], train_step, with_hooks)
        finally:
            arguments["batch"] = batch
        closure._result, closure._result.loss = outputs[-1], loss
        return loss

    def _step(self, loss: Tensor | None) -> None:
        take = self._healer.try_step if self._heals_errors else self._healer.step
        take(loss)

    def _mean(self, loss: Tensor | None) -> Tensor | None:
        """Return the mean loss of all batches of the step, computed on the device."""
        earlier, count = self._sum, self._num_summed + 1
        self._sum, self._num_summed = None, 0
        if loss is None or not self._is_automatic:
            return None
        whole = loss if earlier is None else loss + earlier
        return whole if self._accumulate == 1 else whole * (self._accumulate / count)


class LightningSchedule:
    """A scheduler as the healer sees it: saved and returned with the weights, never stepped.

    Lightning steps a schedule after the optimizer, hence after the healer's step. A snapshot
    taken after a step and a rollback after a later one agree about that. A snapshot taken before
    the first step does not: there the schedule is returned once more when Lightning has stepped it.

    A schedule that counts epochs goes on, because epochs go on: only its learning rate is put back.
    Not so where another schedule drives the optimizer too, whose changes are newer.

    ``is_before_step`` returns whether the optimizer has yet to take the step under way.
    """

    def __init__(self, config: Any, is_before_step: Callable[[], bool]) -> None:
        self.scheduler = config.scheduler
        self.counts_epochs = config.interval == "epoch" or bool(config.reduce_on_plateau)
        self._is_before_step = is_before_step
        self._to_return: dict[str, Any] | None = None

    def step(self) -> None:
        """Leave that to Lightning."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a rollback needs."""
        if self.counts_epochs:
            return {"is_followed": self._is_followed()}
        return {
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "lr": [group["lr"] for group in self.scheduler.optimizer.param_groups],
            "is_before_step": self._is_before_step(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a state, or, counting epochs, to its own present learning rate."""
        if self.counts_epochs:
            if state.get("is_followed", True):
                self._set_lr(getattr(self.scheduler, "_last_lr", []))
            return
        self.scheduler.load_state_dict(state["scheduler"])
        self._to_return = state if state["is_before_step"] else None

    def settle(self) -> None:
        """Return once more what Lightning has stepped since, if it must be."""
        state, self._to_return = self._to_return, None
        if state is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
            self._set_lr(state["lr"])

    def _is_followed(self) -> bool:
        """Return whether the groups have the rates that it set, if known without a wait."""
        groups = self.scheduler.optimizer.param_groups
        pairs = zip(groups, getattr(self.scheduler, "_last_lr", []), strict=False)
        numbers = [(number_of(group["lr"]), number_of(lr)) for group, lr in pairs]
        return not any(now < own or now > own for now, own in numbers)

    def _set_lr(self, rates: list[Any]) -> None:
        for group, lr in zip(self.scheduler.optimizer.param_groups, rates, strict=False):
            group["lr"] = lr

    def __getattr__(self, name: str) -> Any:
        """Take anything else from the scheduler."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
