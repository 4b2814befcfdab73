"""The faults: what each does to a run. When they strike is in :mod:`heal.testing.chaos`.

A fault strikes where the real one would: in the loader, in forward or backward, between two steps
or in the memory of a snapshot. Creeping ones strike at many attempts in a row, a little harder
every time; the corpus of ``tools/forecast`` has the same, and a test compares the two.
"""

import copy
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heal.actions import check_number
from heal.buffers import Key

if TYPE_CHECKING:
    from heal.testing.chaos import Chaos

LARGEST_FACTOR = 1e4  # growth stops somewhere; by then every run has diverged
DRIFT_RAMP = 100  # attempts in which a drift grows to its full rate
PERIOD = 20.0  # attempts of one swing of an oscillation
LARGEST_SWING = 9.0  # nats

NAN = float("nan")
SIZES = {
    "nan_gradient": NAN,
    "inf_gradient": float("inf"),
    "exploding_gradient": 1e6,
    "nan_loss": NAN,
    "loss_spike": 100.0,
    "corrupt_weight": NAN,
    "weight_drift": 4.0,
    "lr_spike": 1000.0,
    "slow_step": 0.2,
    "slow_rank": 0.2,
    "growing_lr": 0.03,
    "oscillating_lr": 0.02,
    "creeping_scale": 0.03,
    "creeping_noise": 0.04,
    "creeping_drift": 0.01,
}
"""What ``size`` is by default: a factor, a value, seconds, or growth per attempt."""


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
            raise ValueError(f"fault: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.at is not None:
            check_number(self, "at", int)
        elif not isinstance(self.rate, (int, float)) or not 0 < self.rate <= 1:
            raise ValueError(
                f"fault {self.kind}: expected a step, or a rate above 0 and at most 1, got "
                f"{self.rate!r}"
            )
        check_number(self, "times", int, least=1)
        if self.size is not None and not isinstance(self.size, (int, float)):
            raise ValueError(f"{self.kind}: size: expected a number or None, got {self.size!r}")
        if self.rank is not None:
            check_number(self, "rank", int)

    @property
    def strength(self) -> float:
        """How hard: ``size``, or the default of its kind."""
        return SIZES.get(self.kind, 0.0) if self.size is None else self.size

    def __str__(self) -> str:
        """As the command line has it."""
        if self.at is None:
            return f"{self.kind}~{self.rate:g}"
        return f"{self.kind}@{self.at}" + (f"x{self.times}" if self.times > 1 else "")


class NothingToBreak(Exception):
    """A fault found nothing to change: it did not happen, and cannot be found."""


@dataclass(slots=True)
class Strike:
    """A fault that happened: which, at which attempt, and which step came next then."""

    fault: Fault
    attempt: int
    step: int
    seconds: float = field(default_factory=time.monotonic)


LossChange = Callable[[Tensor], Tensor]


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


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``change`` applied to its tensors; containers stay what they are.

    Dicts, dataclasses, lists, tuples, named tuples and mappings like BatchEncoding; the batch that
    was given is not touched, because a loader may give it again. What is not understood is left as
    it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        entries = {name: change_tensors(entry, change) for name, entry in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(entries)  # type: ignore[call-arg]
        changed: Any = copy.copy(value)  # a constructor may need other arguments: BatchEncoding
        changed.update(entries)
        return changed
    if isinstance(value, (list, tuple)):
        items = [change_tensors(entry, change) for entry in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            entry = change_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, entry)  # past frozen
        return changed
    return value


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


def _on_the_way_back(factor: float, error: Exception | None = None) -> LossChange:
    return lambda loss: _Gradient.apply(loss, factor, error)  # type: ignore[no-untyped-call]


def _scale_gradient(chaos: "Chaos", fault: Fault) -> LossChange:
    return _on_the_way_back(fault.strength)


def _scale_loss(chaos: "Chaos", fault: Fault) -> LossChange:
    return lambda loss: loss * fault.strength


def _out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _oom_in_forward(chaos: "Chaos", fault: Fault) -> None:
    raise _out_of_memory()


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
    """Overwrite one weight, as a flipped bit in its exponent would."""
    param = chaos.parameter()
    param.view(-1)[chaos.element(param)] = fault.strength


@torch.no_grad()
def _scale_weights(chaos: "Chaos", factor: float) -> None:
    """Silent, finite, and nothing an update could do."""
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            param.mul_(factor)


def _reset_optimizer(chaos: "Chaos", fault: Fault) -> None:
    states = [optimizer.state for optimizer in chaos.healer.optimizers]
    if not any(entry for state in states for entry in state.values()):
        raise NothingToBreak  # plain SGD keeps nothing
    for state in states:
        state.clear()


@torch.no_grad()
def _corrupt_optimizer(chaos: "Chaos", fault: Fault) -> None:
    for optimizer in chaos.healer.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.numel() > 1:
                    value.view(-1)[chaos.element(value)] = NAN
                    return
    raise NothingToBreak


def _scale_lr(chaos: "Chaos", factor: float) -> None:
    for optimizer in chaos.healer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _bad_batch(chaos: "Chaos", fault: Fault) -> BatchFault:
    """Give the model a batch of another shape than it can use."""
    return BatchFault(lambda t: t[..., :0] if t.dim() and t.numel() else t)


def _nan_batch(chaos: "Chaos", fault: Fault) -> BatchFault:
    """Give the model NaN for every float, as a broken decoder does; tokens are left as they are."""

    def spoil(tensor: Tensor) -> Tensor:
        is_float = tensor.is_floating_point() or tensor.is_complex()
        return torch.full_like(tensor, NAN) if is_float else tensor

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
    time.sleep(fault.strength)


def _send_signal(chaos: "Chaos", fault: Fault) -> None:
    os.kill(os.getpid(), getattr(signal, fault.kind.upper()))


def grown(since: float, rate: float) -> float:
    """Return the factor of what grows by ``rate`` at every attempt since the first strike."""
    return min(math.pow(1.0 + rate, since), LARGEST_FACTOR)


def noise_level(since: float, rate: float) -> float:
    """Return the norm of noise, in norms of the gradient."""
    return min(0.5 * (math.pow(1.0 + rate, since) - 1.0), LARGEST_FACTOR)


def swing(since: float, depth: float, period: float = PERIOD) -> float:
    """Return the log of the factor on a rate that swings ever more widely."""
    wave = depth * since * math.sin(2.0 * math.pi * since / period)
    return min(max(wave, -LARGEST_SWING), LARGEST_SWING)


def drift(since: float, rate: float) -> float:
    """Return the factor on all weights at one attempt."""
    return 1.0 + rate * min(since / DRIFT_RAMP, 1.0)


def grow_lr(chaos: "Chaos", fault: Fault) -> None:
    """Multiply the rate. A schedule that sets it at every step takes that back."""
    since, rate = chaos.since(fault), fault.strength
    _scale_lr(chaos, grown(since, rate) / grown(max(since - 1, 0), rate))


def oscillate_lr(chaos: "Chaos", fault: Fault) -> None:
    """Let the rate swing, ever more widely, around what it was."""
    since, depth = chaos.since(fault), fault.strength
    _scale_lr(chaos, math.exp(swing(since, depth) - swing(max(since - 1, 0), depth)))


def creep_scale(chaos: "Chaos", fault: Fault) -> LossChange:
    """Multiply the gradient, not the loss."""
    return _on_the_way_back(grown(chaos.since(fault), fault.strength))


def creep_noise(chaos: "Chaos", fault: Fault) -> None:
    """Add noise to the next gradient of every tensor, in norms of that gradient."""
    level = noise_level(chaos.since(fault), fault.strength)
    generator = chaos.generator()
    handles: dict[Tensor, Any] = {}

    @torch.no_grad()
    def disturb(param: Tensor) -> None:
        handles.pop(param).remove()
        if param.grad is not None:
            noise = torch.randn(param.shape, generator=generator).to(param.grad)
            param.grad += noise * (level * param.grad.norm() / noise.norm().clamp(min=1e-30))

    for param in chaos.healer.model.parameters():
        if param.requires_grad and level:
            handles[param] = param.register_post_accumulate_grad_hook(disturb)


Kind = Callable[["Chaos", Fault], LossChange | BatchFault | None]

KINDS: dict[str, Kind] = {
    "nan_gradient": _scale_gradient,
    "inf_gradient": _scale_gradient,
    "exploding_gradient": _scale_gradient,
    "nan_loss": _scale_loss,
    "loss_spike": _scale_loss,
    "corrupt_weight": _corrupt_weight,
    "weight_drift": lambda chaos, fault: _scale_weights(chaos, fault.strength),
    "corrupt_optimizer": _corrupt_optimizer,
    "reset_optimizer": _reset_optimizer,
    "lr_spike": lambda chaos, fault: _scale_lr(chaos, fault.strength),
    "oom_forward": _oom_in_forward,
    "oom_backward": lambda chaos, fault: _on_the_way_back(1.0, _out_of_memory()),
    "oom_step": _oom_in_step,
    "bad_batch": _bad_batch,
    "nan_batch": _nan_batch,
    "loader_error": lambda chaos, fault: None,  # BrokenLoader raises it
    "network_error": _network_error,
    "flip_snapshot_bit": _flip_bit,
    "slow_step": _slow_down,
    "slow_rank": _slow_down,
    "growing_lr": grow_lr,
    "oscillating_lr": oscillate_lr,
    "creeping_scale": creep_scale,
    "creeping_noise": creep_noise,
    "creeping_drift": lambda chaos, fault: _scale_weights(
        chaos, drift(chaos.since(fault), fault.strength)
    ),
    "sigterm": _send_signal,
    "sigkill": _send_signal,
}
"""What can be done to a run, by name."""
