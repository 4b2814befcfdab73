"""Learning rate schedules that Lightning steps and a rollback returns."""

import copy
from collections.abc import Callable
from typing import Any

from heal.step.joint_rates import number_of


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
