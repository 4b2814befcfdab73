"""Schedulers and optimizers as healing sees them: what can be saved, and what is named instead."""

from collections.abc import Callable, Sequence
from typing import Any


def listed(scheduler: Any) -> list[Any]:
    """Return one, several or no schedulers as a list."""
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]


def has_state(scheduler: Any) -> bool:
    """Return whether a scheduler can be saved, and returned to what was saved."""
    return callable(getattr(scheduler, "state_dict", None)) and callable(
        getattr(scheduler, "load_state_dict", None)
    )


def state_of(scheduler: Any) -> Any:
    """Return what a scheduler saves, None if it cannot."""
    return scheduler.state_dict() if has_state(scheduler) else None


def note_stateless(schedulers: Sequence[Any], note: Callable[[str], None]) -> None:
    """Tell of schedulers that a rollback and a checkpoint cannot return."""
    for scheduler in schedulers:
        if not has_state(scheduler):
            note(
                f"the scheduler is a {type(scheduler).__name__} without state_dict and "
                "load_state_dict: snapshots hold the learning rate but not its place in the "
                "schedule, which goes on as if no step were taken back"
            )


def note_rewriting(optimizers: Sequence[Any], note: Callable[[str], None]) -> None:
    """Name optimizers that rewrite the weights for an evaluation, as schedule-free ones do."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner", optimizer)
        if callable(getattr(inner, "eval", None)) and callable(getattr(inner, "train", None)):
            note(
                f"{type(inner).__name__} rewrites the weights in eval() and train(), which rounds "
                "them; a replay after a rollback does so only where your loop evaluates again, and "
                "may differ from the run that never failed in the last bits"
            )
