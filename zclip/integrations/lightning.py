"""ZClip as a Lightning callback, with the name and arguments of the published package."""

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError:
        raise ImportError(
            "ZClipLightningCallback needs Lightning: pip install 'zclip-heal[lightning]'"
        ) from None

from torch.optim import Optimizer

from zclip.clippers import ZClip


class ZClipLightningCallback(Callback):  # type: ignore[misc]  # Lightning may be untyped or absent
    """Clip before every optimizer step, after accumulation and unscaling.

    The statistics are saved in Lightning's checkpoints and come back on resume.

    Args:
        zclip_kwargs: the arguments of :class:`zclip.ZClip`.
    """

    def __init__(self, **zclip_kwargs: Any) -> None:
        super().__init__()
        self.zclip = ZClip(**zclip_kwargs)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.zclip.step(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return self.zclip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.zclip.load_state_dict(state_dict)
