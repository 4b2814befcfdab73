"""The faults: what each does to a run. When they strike is in :mod:`heal.testing.chaos`.

A fault strikes where the real one would: in the loader, in forward or backward, between two steps
or in the memory of a snapshot.
"""

import copy
import dataclasses
import os
import signal
import time
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heal.actions import check_number
from heal.buffers import Key
from heal.testing import slow_faults

if TYPE_CHECKING:
    from heal.testing.chaos import Chaos


# Every tensor of a batch, whatever kind of container it is in.


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``change`` applied to its tensors; containers stay what they are.

    Dicts, dataclasses, lists, tuples, named tuples and mappings like BatchEncoding; the batch that
    was given is not touched, for a loader may give it again. What is not understood is left as it
    is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _change_mapping(value, {k: change_tensors(v, change) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        entries = [change_tensors(entry, change) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            entry = change_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, entry)  # past frozen
        return changed
    return value


def _change_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if isinstance(value, UserDict):
        changed: Any = copy.copy(value)  # a constructor may want other things: BatchEncoding
        changed.data = entries  # the copy shares its data with the original
        return changed
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        changed.update(entries)
        return changed
    return type(value)(entries)  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a run.

    Args:
        kind: a key of :data:`KINDS`.
        at: the attempt at which it strikes first, counted from 0; None to strike by rate.
        times: how many attempts in a row it strikes.
        rate: probability to strike at each attempt, if ``at`` is None.
        size: how hard, in the unit of its kind; None for that kind's default.
        rank: the only rank that is struck; every one if None, and for "slow_rank" the first.
    """

    kind: str
    at: int | None = None
    times: int = 1
    rate: float = 0.0
    size: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.kind!r} is unknown; expected one of {', '.join(KINDS)}")
        if self.at is not None:
            check_number(self, "at", int)
        elif not isinstance(self.rate, (int, float)) or not 0 < self.rate <= 1:
            raise ValueError(
                f"fault {self.kind}: rate is {self.rate!r}; expected a step, or a rate above 0 and "
                "at most 1"
            )
        check_number(self, "times", int, least=1)
        if self.size is not None and not isinstance(self.size, (int, float)):
            raise ValueError(f"fault {self.kind}: size is {self.size!r}; expected a number or None")
        if self.rank is not None:
            check_number(self, "rank", int)

    def __str__(self) -> str:
        """As the command line has it."""
        if self.at is None:
            return f"{self.kind}~{self.rate:g}"
        return f"{self.kind}@{self.at}" + (f"x{self.times}" if self.times > 1 else "")


class NothingToBreak(Exception):
    """A fault found nothing to change: it did not happen, and nobody could find it."""


@dataclass(slots=True)
class Strike:
    """A fault that happened: which, at which attempt, and which step came next then."""

    fault: Fault
    attempt: int
    step: int
    seconds: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class BatchFault:
    """A change to every tensor of the batch, instead of to the loss."""

    change: Callable[[Tensor], Tensor]

    def apply(self, batch: Any) -> Any:
        """Return the batch with the change; raises NothingToBreak if that changes nothing."""
        hit: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            changed = self.change(tensor)
            if changed is not tensor:
                hit.append(tensor)
            return changed

        broken = change_tensors(batch, note)
        if not hit:
            raise NothingToBreak
        return broken


class _Gradient(torch.autograd.Function):
    """Passes the loss through, and multiplies or raises on the way back."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, error: Exception | None) -> Tensor:
        ctx.factor, ctx.error = factor, error
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.error is not None:
            raise ctx.error
        return grads[0] * ctx.factor, None, None


def _scaled_gradient(default: float) -> "Kind":
    def strike(chaos: "Chaos", fault: Fault) -> Callable[[Tensor], Tensor]:
        factor = default if fault.size is None else fault.size
        return lambda loss: _Gradient.apply(loss, factor, None)  # type: ignore[no-untyped-call]

    return strike


def _out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _oom_in_forward(chaos: "Chaos", fault: Fault) -> None:
    raise _out_of_memory()


def _oom_in_backward(chaos: "Chaos", fault: Fault) -> Callable[[Tensor], Tensor]:
    return lambda loss: _Gradient.apply(loss, 1.0, _out_of_memory())  # type: ignore[no-untyped-call]


def _oom_in_step(chaos: "Chaos", fault: Fault) -> None:
    """Let the optimizer update one parameter, then fail: the worst moment there is."""
    inner: Any = chaos.healer.optimizers[0].inner

    def fail(*args: Any, **kwargs: Any) -> None:
        handle.remove()
        with torch.no_grad():
            chaos.parameter().add_(1.0)
        raise _out_of_memory()

    handle = inner.register_step_pre_hook(fail)


@torch.no_grad()
def _corrupt_weight(chaos: "Chaos", fault: Fault) -> None:
    """Overwrite one weight, as a flipped bit in its exponent would; NaN by default."""
    value = float("nan") if fault.size is None else fault.size
    param = chaos.parameter()
    param.view(-1)[chaos.element(param)] = value


@torch.no_grad()
def _drift_weights(chaos: "Chaos", fault: Fault) -> None:
    """Multiply all weights: silent, finite, and nothing an update could do."""
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            param.mul_(4.0 if fault.size is None else fault.size)


def _reset_optimizer(chaos: "Chaos", fault: Fault) -> None:
    if not any(
        state for optimizer in chaos.healer.optimizers for state in optimizer.state.values()
    ):
        raise NothingToBreak  # plain SGD keeps nothing
    for optimizer in chaos.healer.optimizers:
        optimizer.state.clear()


@torch.no_grad()
def _corrupt_optimizer(chaos: "Chaos", fault: Fault) -> None:
    for optimizer in chaos.healer.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.numel() > 1:
                    value.view(-1)[chaos.element(value)] = float("nan")
                    return
    raise NothingToBreak


def _spike_lr(chaos: "Chaos", fault: Fault) -> None:
    factor = 1000.0 if fault.size is None else fault.size
    for optimizer in chaos.healer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _bad_batch(chaos: "Chaos", fault: Fault) -> BatchFault:
    """Give the model a batch of another shape than it can use."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[..., :0] if tensor.dim() and tensor.numel() else tensor

    return BatchFault(cut)


def _nan_batch(chaos: "Chaos", fault: Fault) -> BatchFault:
    """Give the model NaN for every float, as a broken decoder does; tokens are left as they are."""

    def spoil(tensor: Tensor) -> Tensor:
        is_float = tensor.is_floating_point() or tensor.is_complex()
        return torch.full_like(tensor, float("nan")) if is_float else tensor

    return BatchFault(spoil)


def _network_error(chaos: "Chaos", fault: Fault) -> None:
    raise ConnectionError("injected: connection reset by peer")


def _flip_bit(chaos: "Chaos", fault: Fault) -> None:
    """Flip one bit of the newest good snapshot, as a cosmic ray would."""
    snapshot = chaos.healer.newest_snapshot()
    if snapshot is None:
        raise NothingToBreak
    key: Key = max(snapshot.tensors, key=lambda k: snapshot.tensors[k].nbytes)
    data = snapshot.tensors[key].view(-1).view(torch.uint8)
    data[chaos.element(data)] ^= 1 << 4


def _slow_down(chaos: "Chaos", fault: Fault) -> None:
    time.sleep(0.2 if fault.size is None else fault.size)


def _send(name: str) -> "Kind":
    def strike(chaos: "Chaos", fault: Fault) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    return strike


Kind = Callable[["Chaos", Fault], Callable[[Tensor], Tensor] | BatchFault | None]

KINDS: dict[str, Kind] = {
    "nan_gradient": _scaled_gradient(float("nan")),
    "inf_gradient": _scaled_gradient(float("inf")),
    "exploding_gradient": _scaled_gradient(1e6),
    "nan_loss": lambda chaos, fault: lambda loss: loss * float("nan"),
    "loss_spike": lambda chaos, fault: lambda loss: loss * (fault.size or 100.0),
    "corrupt_weight": _corrupt_weight,
    "weight_drift": _drift_weights,
    "corrupt_optimizer": _corrupt_optimizer,
    "reset_optimizer": _reset_optimizer,
    "lr_spike": _spike_lr,
    "oom_forward": _oom_in_forward,
    "oom_backward": _oom_in_backward,
    "oom_step": _oom_in_step,
    "bad_batch": _bad_batch,
    "nan_batch": _nan_batch,
    "loader_error": lambda chaos, fault: None,
    "network_error": _network_error,
    "flip_snapshot_bit": _flip_bit,
    "slow_step": _slow_down,
    "slow_rank": _slow_down,
    "growing_lr": slow_faults.grow_lr,
    "oscillating_lr": slow_faults.oscillate_lr,
    "creeping_scale": slow_faults.creep_scale,
    "creeping_noise": slow_faults.creep_noise,
    "creeping_drift": slow_faults.creep_drift,
    "sigterm": _send("SIGTERM"),
    "sigkill": _send("SIGKILL"),
}
"""What can be done to a run, by name."""
