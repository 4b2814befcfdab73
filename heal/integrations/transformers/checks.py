"""What can be known to be wrong before training begins, said clearly and with nothing touched."""

import os
import sys
from pathlib import Path
from typing import Any

NEEDED = ("train", "args", "accelerator", "callback_handler", "training_step")
"""What is used of a trainer. Any object that has it will do, whatever its class."""

LARGEST_LR_RAISE = 5.0
"""More than this at once and a run that was going nowhere goes to pieces."""


def checked_trainer(trainer: Any) -> Any:
    """Return the trainer if it is one.

    Raises:
        TypeError: it is a class, or lacks what healing needs.
    """
    if isinstance(trainer, type):
        raise TypeError(f"trainer is the class {trainer.__name__}; wanted one that is built")
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise TypeError(
            f"trainer is {type(trainer).__name__}, which lacks {', '.join(missing)}; wanted a "
            "transformers.Trainer or a trainer of TRL"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise TypeError("the trainer uses DeepSpeed, whose engine steps by itself: not supported")
    return trainer


def checked_factor(factor: float | None) -> float | None:
    """Return the factor on the LR at a plateau if it makes sense.

    Raises:
        ValueError: it would lower the learning rate, or raise it beyond what is known to be safe.
    """
    if factor is not None and not 1.0 < factor <= LARGEST_LR_RAISE:
        raise ValueError(
            f"plateau_lr_factor is {factor!r}; wanted more than 1 and at most {LARGEST_LR_RAISE}"
        )
    return factor


def check_ready(trainer: Any, callback: type) -> None:
    """Raise unless training can begin now.

    Raises:
        RuntimeError: the trainer is training already, or another wrapper heals it.
        PermissionError: its ``output_dir`` cannot be written, though it is to be.
    """
    if is_training(trainer):
        raise RuntimeError(
            f"{type(trainer).__name__} is training already; wait until its train() has returned"
        )
    others = [c for c in trainer.callback_handler.callbacks if isinstance(c, callback)]
    if others:
        raise RuntimeError(
            f"the trainer already has a {type(others[0]).__name__}; remove it with "
            "trainer.remove_callback, or call trainer.train() itself"
        )
    check_writable(trainer.args.output_dir)


def check_writable(folder: str | Path) -> None:
    """Raise unless files can be made in a folder, which is made if it is not there.

    Raises:
        PermissionError: says which folder, and why not.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"output_dir {folder} cannot be made: {error.strerror}; checkpoints and the "
            "postmortem go there. Nothing was trained yet"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"output_dir {folder} cannot be written; checkpoints and the postmortem go there. "
            "Nothing was trained yet"
        )


def is_training(trainer: Any) -> bool:
    """Tell whether ``train`` of this trainer is running, in whatever thread.

    ``trainer.is_in_train`` does not tell: it stays set when ``train`` raises.
    """
    for frame in sys._current_frames().values():
        caller = frame
        while caller is not None:
            is_train = caller.f_code.co_name in ("train", "_inner_training_loop")
            if is_train and caller.f_locals.get("self") is trainer:
                return True
            caller = caller.f_back  # type: ignore[assignment]
    return False
