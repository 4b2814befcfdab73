"""What cannot be healed under Lightning is said when training starts."""

from typing import Any

from heal.config import HealingConfig

FOREIGN_STEPS = ("DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy", "XLAFSDPStrategy")
"""Strategies that keep gradients or weights where they cannot be measured."""


def check_start(config: HealingConfig, trainer: Any, module: Any) -> None:
    """Raise if this run cannot be healed.

    Raises:
        ValueError: names what does not fit, what was wanted, and what to do.
    """
    if config.data == "replay":
        raise ValueError(
            'data is "replay", which needs to rewind the loader, and that is Lightning\'s; '
            'wanted data="skip", or Healer.run instead of the Trainer'
        )
    strategy = type(trainer.strategy).__name__
    if strategy in FOREIGN_STEPS:
        raise ValueError(
            f"strategy is {strategy}, which keeps gradients to itself; wanted a single device, "
            "DDPStrategy or ModelParallelStrategy (FSDP2)"
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"{len(trainer.optimizers)} optimizers step by themselves in manual optimization, and "
            "a rollback between them has no meaning; wanted one optimizer. To clip and refuse "
            "without rollback return zclip.wrap(optimizer) from configure_optimizers"
        )
    others = [type(c).__name__ for c in trainer.callbacks]
    if "ZClipLightningCallback" in others and config.zclip_enabled:
        raise ValueError(
            "ZClipLightningCallback would clip a second time; leave it out, or set "
            "zclip_enabled=False"
        )
    if others.count("SelfHealingLightningCallback") > 1:
        raise ValueError("SelfHealingLightningCallback is there twice; wanted one")
