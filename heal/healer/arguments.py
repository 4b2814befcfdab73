"""What a Healer is given, checked before anything is made of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from heal.config import HealingConfig


def checked_config(config: HealingConfig | Mapping[str, Any] | None) -> HealingConfig:
    """Return settings; plain values are looked through.

    Raises:
        ConfigError: a name is unknown or a value is wrong.
        TypeError: neither settings nor plain values.
    """
    if config is None:
        return HealingConfig()
    if isinstance(config, HealingConfig):
        return config
    if isinstance(config, Mapping):
        return HealingConfig.from_dict(config)
    raise TypeError(f"config is {type(config).__name__}; wanted a HealingConfig or a dict")


def checked_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list.

    Raises:
        TypeError: one of them is none.
        ValueError: there is none, or one is given twice and would be stepped twice.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ValueError("optimizer is an empty list; wanted one optimizer or more")
    for i, one in enumerate(optimizers):
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer[{i}] is {type(one).__name__}; wanted a torch Optimizer")
        if any(one is other for other in optimizers[:i]):
            raise ValueError(
                f"optimizer[{i}], {type(one).__name__}, is given twice; wanted each one once"
            )
    return optimizers


def refuse_config_as_scheduler(scheduler: Any) -> None:
    """Find the settings in the wrong place: the third argument is the scheduler.

    Raises:
        TypeError: says where they belong.
    """
    if isinstance(scheduler, HealingConfig):
        raise TypeError(
            "scheduler is a HealingConfig; wanted a scheduler or None there, and the settings as "
            "Healer(model, optimizer, config=...)"
        )
