"""Takes the place of a strategy's ``optimizer_step``: backward by Lightning, step by the healer."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from heal.actions import HealingError
from heal.data.stream import own_copy
from heal.healer import Healer
from heal.integrations.patches import Patches
from heal.lr_schedules import number_of
from heal.training_state import RngState


class HealedSteps:
    """One optimizer step of Lightning's after another.

    What forward and backward raise is healed where the step can be repeated: in one process, with
    automatic optimization and no accumulation. Elsewhere it goes on to Lightning.

    Args:
        trainer: Lightning's.
        module: the LightningModule.
        healer: steps the optimizer.

    Attributes:
        phase: "forward" or "backward", for the diagnosis of what is raised.
        has_stepped: whether the batch under way has stepped the optimizer.
        uncounted: steps that Lightning counts although neither it nor the healer took them.
    """

    def __init__(self, trainer: Any, module: Module, healer: Healer) -> None:
        self.phase = "forward"
        self.has_stepped = False
        self.uncounted = 0
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
        self._buffers = healer.guarded.buffers
        self._sum: Tensor | None = None  # of the losses of batches that were only accumulated
        self._num_summed = 0
        self._clips_before = self._watched.steps

    @property
    def _watched(self) -> Any:
        return self._healer.optimizers[0]

    def is_before_step(self) -> bool:
        """Return whether the optimizer has yet to take the step under way."""
        return bool(self._watched.steps == self._clips_before)

    def add_loss(self, loss: Tensor | None) -> None:
        """Hear the loss of a batch that was accumulated; Lightning has divided it already."""
        if loss is not None:
            self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
            self._num_summed += 1

    def __call__(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute gradients, call Lightning's hooks, and have the healer take the step.

        Args:
            optimizer: the user's; the healer has it, wrapped.
            closure: forward, ``zero_grad`` and backward; does nothing in manual optimization.
            model: not used; the LightningModule is known.
            kwargs: for optimizers with arguments of their own; not passed on.
        """
        self.has_stepped = True
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
            self.uncounted += 1
            return None
        self._step(self._mean(loss))
        return loss

    def _backward(self, closure: Any) -> tuple[bool, Any]:
        """Return whether there are gradients, and the loss; False if the batch was given up."""
        if self._healer.experiment.is_due and hasattr(closure, "_step_fn"):
            self._try_old_weights(closure._step_fn.args[0])
        if not self._heals_errors or not hasattr(closure, "_step_fn"):
            return True, closure()
        attempts, micro = self._healer.retries, self._healer.micro
        arguments = closure._step_fn.args[0]
        # The first attempt has the batch itself: hooks may look for what it wrote there.
        as_it_came = own_copy(arguments.get("batch"))
        while True:
            rng = RngState.now()
            self._buffers.begin()
            self.phase = "forward"
            try:
                if micro.pieces == 1:
                    return True, closure()
                return True, self._in_pieces(closure)
            except Exception as error:
                failure = attempts.judge(error, self.phase)
            # The except block is left: nothing holds the frames whose tensors must be freed.
            self._watched.zero_grad()
            self._buffers.put_back()
            rng.put_back()
            with self._healer.halting():
                is_cured = attempts.heal(*failure)
            if not is_cured:
                loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
                closure._result = loop.output_result_cls(None)
                return False, None
            if "batch" in arguments:  # not if training_step draws from the loader itself
                arguments["batch"] = own_copy(as_it_came)

    def _try_old_weights(self, arguments: Mapping[str, Any]) -> None:
        """Compare old weights with today's on this batch; nothing is logged meanwhile."""
        experiment, module = self._healer.experiment, self._module
        strategy = self._trainer.strategy
        if "batch" not in arguments:
            return  # training_step draws from the loader itself

        def compute() -> Tensor:
            output = strategy.training_step(*own_copy(list(arguments.values())))
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
            return loss

        patches = Patches()
        for name in ("log", "log_dict"):
            patches.set(module, name, lambda *args, **kwargs: None)
        try:
            with experiment.trial() as trial:
                old = trial.forward(compute)
                trial.put_back()
                now = trial.forward(compute)
        finally:
            patches.put_back()
        experiment.note_losses(old, now)

    def _in_pieces(self, closure: Any) -> Tensor:
        """Forward and backward of a batch that does not fit whole, with Lightning's hooks."""
        micro, step_fn = self._healer.micro, closure._step_fn
        arguments = step_fn.args[0]
        batch = arguments["batch"]
        outputs = []

        def train_step(piece: Any) -> Tensor:
            self.phase = "forward"
            arguments["batch"] = piece
            outputs.append(step_fn())
            loss: Tensor = outputs[-1].closure_loss
            return loss

        closure._zero_grad_fn()
        backward: Any = lambda loss: _Backward(closure._backward_fn, loss)  # noqa: E731
        try:
            loss = micro.backward([batch], train_step, backward)
        finally:
            arguments["batch"] = batch
        closure._result, closure._result.loss = outputs[-1], loss
        return loss

    def _step(self, loss: Tensor | None) -> None:
        try:
            self._healer.step(loss)
        except HealingError:
            raise
        except Exception as error:
            if not self._heals_errors:
                raise
            attempts = self._healer.retries
            with self._healer.halting():
                attempts.heal(*attempts.judge(error, "step"))
        else:
            self._healer.micro.note_clean()

    def _mean(self, loss: Tensor | None) -> Tensor | None:
        """Return the mean loss of all batches of the step, computed on the device."""
        earlier, count = self._sum, self._num_summed + 1
        self._sum, self._num_summed = None, 0
        if loss is None or not self._is_automatic:
            return None
        whole = loss if earlier is None else loss + earlier
        return whole if self._accumulate == 1 else whole * (self._accumulate / count)


class _Backward:
    """Lets a :class:`heal.micro_batch.MicroBatcher` backpropagate by Lightning, with hooks."""

    def __init__(self, backward_fn: Callable[[Tensor], None], loss: Tensor) -> None:
        self._backward_fn = backward_fn
        self._loss = loss

    def backward(self) -> None:
        self._backward_fn(self._loss)


# Learning rate schedules that Lightning steps and a rollback returns.


class LightningSchedule:
    """A scheduler as the healer sees it: saved and returned with the weights, never stepped.

    Lightning steps a schedule after the optimizer, hence after the healer has listened. A snapshot
    taken after a step and a rollback after a later one agree about that. A snapshot taken before
    the first step does not: there the schedule is returned once more when Lightning has stepped it.

    A schedule that counts epochs goes on, for epochs go on: only its learning rate is put back. Not
    so where another drives the optimizer too: what it remembers is older than the other's turns.

    Args:
        config: Lightning's, with the scheduler and its interval.
        is_before_step: whether the optimizer has yet to take the step under way.
    """

    def __init__(self, config: Any, is_before_step: Callable[[], bool]) -> None:
        self.scheduler = config.scheduler
        self.counts_epochs = config.interval == "epoch" or bool(config.reduce_on_plateau)
        self._is_before_step = is_before_step
        self._to_return: dict[str, Any] | None = None

    def step(self) -> None:
        """Do nothing: Lightning steps it."""

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
        """Hear that Lightning has done its part of the step."""
        state, self._to_return = self._to_return, None
        if state is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
            self._set_lr(state["lr"])

    def _is_followed(self) -> bool:
        """Whether the groups have the rates that it set, as far as can be known without a wait."""
        groups = self.scheduler.optimizer.param_groups
        pairs = zip(groups, getattr(self.scheduler, "_last_lr", []), strict=False)
        numbers = [(number_of(group["lr"]), number_of(lr)) for group, lr in pairs]
        return not any(now < told or now > told for now, told in numbers)

    def _set_lr(self, rates: list[Any]) -> None:
        for group, lr in zip(self.scheduler.optimizer.param_groups, rates, strict=False):
            group["lr"] = lr

    def __getattr__(self, name: str) -> Any:
        """Anything else is the scheduler's."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
