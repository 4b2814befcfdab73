"""ZClip as a Lightning callback, with the name and arguments of the published package."""

from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from zclip.clippers import ZClip

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning is published; the first that is installed is used."""


def lightning() -> Any:
    """Return the module of Lightning.

    Its type is left open: whether it is installed, and under which name, must not change what a
    type checker says about us.

    Raises:
        ImportError: neither package is installed.
    """
    for name in PACKAGES:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # installed, but broken: say what it misses
    raise ImportError("this callback needs Lightning: pip install 'zclip-heal[lightning]'")


Callback: Any = lightning().Callback


class ZClipLightningCallback(Callback):  # type: ignore[misc]  # its type is left open, see above
    """Clip before every optimizer step, after accumulation and unscaling.

    The statistics are saved in Lightning's checkpoints and come back on resume.

    Args:
        zclip_kwargs: the arguments of :class:`zclip.ZClip`.
    """

    def __init__(self, **zclip_kwargs: Any) -> None:
        super().__init__()
        self.zclip = ZClip(**zclip_kwargs)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        self.zclip.step(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return self.zclip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.zclip.load_state_dict(state_dict)
