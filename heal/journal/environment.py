"""Where a run runs and what it trains, for the first event of the journal.

Nothing of the command line or of the environment but what is named here: these hold secrets.
"""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from heal.config import HealingConfig

VARIABLES = ("WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT")
"""What launchers tell of a process."""


def describe_machine() -> dict[str, Any]:
    """Return versions, host and launcher; torch only if somebody has imported it already."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "interactive",
        "pid": os.getpid(),
        "zclip-heal": _version("zclip-heal"),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        found["device"] = _device(torch)
    found.update({name.lower(): os.environ[name] for name in VARIABLES if name in os.environ})
    return found


def describe_training(
    model: Any, optimizers: Iterable[Any], config: HealingConfig
) -> dict[str, Any]:
    """Return what is trained by what, and the settings that differ from the defaults."""
    usual = asdict(HealingConfig())
    changed = {name: value for name, value in asdict(config).items() if value != usual[name]}
    found: dict[str, Any] = {
        "model": type(model).__name__,
        "optimizer": ", ".join(type(getattr(o, "inner", o)).__name__ for o in optimizers),
        "settings": changed,
        "zclip_z_threshold": config.zclip_z_threshold,
    }
    try:
        found["parameters"] = sum(p.numel() for p in model.parameters())
        found["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    except Exception as error:  # lazy modules have no shape yet
        found["parameters"] = f"unknown: {error}"
    return found


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _device(torch: Any) -> str:
    cuda = torch.cuda
    if cuda.is_available() and cuda.is_initialized():  # asking must not claim a GPU
        return f"{cuda.get_device_name()} (CUDA {torch.version.cuda})"
    return f"cpu, {torch.get_num_threads()} threads"
