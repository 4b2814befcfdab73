"""Save a run, and go on with it: two functions, for loops that have no healer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.nn import Module
from torch.optim import Optimizer

from heal.checkpoint.contents import restore_rng
from heal.checkpoint.store import CheckpointStore
from heal.training_state import RngState, TrainingState
from zclip import ClippedOptimizer

KEEP = 3


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was loaded.

    Attributes:
        step: the step that comes next.
        extra: what was given to :func:`save` under this name.
        notes: checkpoints that were passed over, and why.
    """

    step: int
    extra: Any
    notes: tuple[str, ...] = ()


def save(
    directory: str | os.PathLike[str],
    step: int,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    scaler: Any = None,
    extra: Any = None,
    keep: int = KEEP,
    allow_nonfinite: bool = False,
) -> Path:
    """Save all that a run needs to go on, bit by bit; return the folder.

    Parameters, all buffers, optimizer state, settings of parameter groups, schedulers, scaler and
    random generators of every rank. Every rank has to call this. Returns when all is on the disk;
    :class:`CheckpointStore` can write beside the training.

    Args:
        directory: of the checkpoints; all ranks see it.
        step: the step that comes next.
        model: may be wrapped in DDP or compiled, or be sharded by FSDP2.
        optimizer: one, several or none.
        scheduler: one, several or None.
        scaler: a GradScaler.
        extra: plain values and tensors of your own, such as the position in the data.
        keep: checkpoints to keep.
        allow_nonfinite: save parameters with NaN or Inf in them too.

    Raises:
        SaveFailed: nothing was saved; what was saved before is untouched.

    Example:
        >>> heal.checkpoint.save("checkpoints", step, model, optimizer)
    """
    store = CheckpointStore(directory, keep=keep)
    state = _state(model, optimizer, scheduler, scaler)
    own = {"rng": RngState.now(), "extra": extra}
    return store.save_state(step, state, own, allow_nonfinite=allow_nonfinite)


def load(
    directory: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    scaler: Any = None,
    most: int | None = None,
) -> Resumed | None:
    """Return a run to its newest checkpoint that is whole on every rank; None if there is none.

    Nothing is changed before every byte was read and compared with its checksum. The number of
    ranks may differ from that which saved. Every rank has to call this.

    Args:
        directory: of the checkpoints.
        model: built as it was.
        optimizer: built as it was; it need not have taken a step.
        scheduler: built as it was.
        scaler: a GradScaler.
        most: the latest step that will do.

    Raises:
        StateMismatch: the checkpoint is of another model or optimizer; nothing was changed.

    Example:
        >>> resumed = heal.checkpoint.load("checkpoints", model, optimizer)
        >>> step = resumed.step if resumed else 0
    """
    store = CheckpointStore(directory)
    restored = store.load_state(_state(model, optimizer, scheduler, scaler), most=most)
    if restored is None:
        return None
    restore_rng(restored, store.ranks)
    return Resumed(restored.step, restored.values.get("extra"), tuple(store.notes))


class _Bare:
    """An optimizer without a clipper, in the shape that the training state expects."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.clipper = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)

    def forget_momentum(self) -> None:
        """It has none that it would have to look for."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


def _state(model: Module, optimizer: Any, scheduler: Any, scaler: Any) -> TrainingState:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    schedulers = [] if scheduler is None else scheduler
    return TrainingState(
        model,
        [
            o if isinstance(o, ClippedOptimizer) else cast(ClippedOptimizer, _Bare(o))
            for o in optimizers
        ],
        list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers],
        scaler,
    )
