"""Small questions about a trainer that is ready to train, and small answers for it."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from heal.actions import CannotHeal, Plan, ScaleLr
from heal.causes import Cause
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.treatment import Hook


def batches_passed_over(trainer: Any) -> int:
    """Return how many batches of its first epoch a trainer leaves out because it was resumed."""
    args = trainer.args
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    if args.ignore_data_skip or not trainer.state.global_step:
        return 0
    try:
        steps = max(1, -(-len(loader) // args.gradient_accumulation_steps))
    except TypeError:  # a loader without a length has one long epoch
        steps = trainer.state.max_steps
    return int(trainer.state.global_step % steps * args.gradient_accumulation_steps)


def batches_of_steps(trainer: Any, steps: int) -> int | None:
    """Return how many batches so many steps take from the first one on; None if nobody can say."""
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    try:
        length = len(loader)
    except TypeError:
        return None
    per_step = trainer.args.gradient_accumulation_steps
    epochs, rest = divmod(steps, max(1, -(-length // per_step)))
    return int(epochs * length + rest * per_step)


def raise_lr_at_chance(factor: float, config: HealingConfig) -> Hook:
    """Return a hook that answers a plateau at chance with a higher learning rate."""

    def hook(diagnosis: Diagnosis, plan: Plan) -> Plan | None:
        if diagnosis.cause is Cause.PLATEAU and diagnosis.evidence.get("at_chance"):
            return (ScaleLr(factor, config.lr_floor, config.lr_ramp_steps),)
        return None

    return hook


def known_to_schedulers(step: Callable[..., None]) -> Callable[..., None]:
    """Mark a step as one that notes that it was called, or schedulers warn that it does not."""

    def noted(closure: Any = None) -> None:
        step(closure)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return noted


def inner_optimizer(trainer: Any) -> Optimizer:
    """Return the torch optimizer within what accelerate made of it.

    Raises:
        TypeError: it is not one that can be guarded.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the trainer's optimizer is {type(optimizer).__name__}; wanted a torch Optimizer, "
            "whose steps can be refused. DeepSpeed steps by itself and cannot be healed"
        )
    return optimizer


def is_preemption(error: BaseException | None) -> bool:
    """Tell whether a run was stopped from outside and would go on if started again."""
    return isinstance(error, CannotHeal) and error.exit_code == int(ExitCode.PREEMPTED)
