"""Breaks a run on purpose: faults by step or by rate, seeded, for drills and tests.

A fault strikes where the real one would: in the loader, in forward or backward, between two steps
or in the memory of a snapshot. Each strikes a set number of times, by the count of attempts, so
that a step which is repeated after a rollback is not hit again.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heal.chaos import slow_faults
from heal.chaos.broken_loader import BrokenLoader
from heal.state.distinct import Key
from heal.step.micro_batch import TrainStep

if TYPE_CHECKING:
    from heal.loop import Healer


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
            raise ValueError(f"fault {self.kind!r} is unknown; wanted one of {', '.join(KINDS)}")
        if self.at is None and not 0 < self.rate <= 1:
            raise ValueError(f"fault {self.kind}: wanted a step, or a rate above 0 and at most 1")


@dataclass(slots=True)
class Strike:
    """A fault that happened: which, at which attempt, and which step came next then."""

    fault: Fault
    attempt: int
    step: int
    seconds: float = field(default_factory=time.monotonic)


class Chaos:
    """Strikes a run that is trained by a Healer.

    Args:
        healer: whose run is broken.
        faults: what to do, and when.
        seed: of the choice of tensors, elements and attempts; the run's own generators are not
            touched.

    Attributes:
        strikes: what happened so far.

    Example:
        >>> chaos = Chaos(healer, [Fault("nan_gradient", at=100), Fault("bad_batch", rate=0.01)])
        >>> healer.run(chaos.wrap(train_step), chaos.wrap_loader(loader), steps=1000)
    """

    def __init__(self, healer: "Healer", faults: Sequence[Fault], seed: int = 0) -> None:
        self.strikes: list[Strike] = []
        self._healer = healer
        self._faults = list(faults)
        self._random = random.Random(seed)
        self._seed = seed
        self._attempt = -1
        self._batch = -1

    def wrap(self, train_step: TrainStep) -> TrainStep:
        """Return ``train_step`` with faults; those between steps strike before it runs."""

        def broken(batch: Any) -> Tensor:
            loss_changes: list[Callable[[Tensor], Tensor]] = []
            for fault in self._due_now():
                change = KINDS[fault.kind](self, fault)
                if isinstance(change, BatchFault):
                    batch = change.apply(batch)
                elif change is not None:
                    loss_changes.append(change)
            loss = train_step(batch)
            for change in loss_changes:
                loss = change(loss)
            return loss

        return broken

    def wrap_loader(self, loader: Any) -> "BrokenLoader":
        """Return the loader with the faults of kind "loader_error"."""
        return BrokenLoader(loader, self.next_batch)

    def next_batch(self) -> None:
        """Count a batch that is about to be drawn.

        Raises:
            OSError: a loader error is due.
        """
        self._batch += 1
        for fault in self._due(self._batch, in_loader=True):
            raise ValueError(f"injected: sample of batch {self._batch} is torn ({fault.kind})")

    def _due_now(self) -> list[Fault]:
        """The faults of a new attempt; further pieces or batches of the same one have none."""
        counted = self._healer.attempts
        if not counted:  # a hand-written loop: every call is an attempt
            self._attempt += 1
        elif counted - 1 > self._attempt:
            self._attempt = counted - 1
        else:
            return []
        return list(self._due(self._attempt, in_loader=False))

    def _due(self, attempt: int, in_loader: bool) -> Iterator[Fault]:
        for fault in self._faults:
            if (fault.kind == "loader_error") is not in_loader:
                continue
            if fault.at is None:
                strikes = self._random.random() < fault.rate
            else:
                strikes = fault.at <= attempt < fault.at + fault.times
            if strikes and self._is_here(fault):
                self.strikes.append(Strike(fault, attempt, self._healer.last_step + 1))
                yield fault

    def _is_here(self, fault: Fault) -> bool:
        """Ranks draw the same numbers; where a fault strikes is decided after."""
        chosen = 0 if fault.rank is None and fault.kind == "slow_rank" else fault.rank
        return chosen is None or chosen == self._healer.journal.rank

    def parameter(self) -> Tensor:
        """Choose a trainable parameter with more than one element."""
        params = [p for p in self._healer.model.parameters() if p.requires_grad and p.numel() > 1]
        return self._random.choice(params)

    def element(self, tensor: Tensor) -> int:
        """Choose an element."""
        return self._random.randrange(tensor.numel())

    def since(self, fault: Fault) -> int:
        """Return how many attempts ago a fault struck first; 0 for one that strikes by rate."""
        return 0 if fault.at is None else self._attempt - fault.at

    def generator(self) -> torch.Generator:
        """Return a generator for this attempt: the run's own are not touched."""
        return torch.Generator().manual_seed((self._seed << 32) + self._attempt)

    @property
    def healer(self) -> "Healer":
        """Whose run is broken."""
        return self._healer


@dataclass(frozen=True, slots=True)
class BatchFault:
    """A change to the batch instead of to the loss."""

    apply: Callable[[Any], Any]


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
    def strike(chaos: Chaos, fault: Fault) -> Callable[[Tensor], Tensor]:
        factor = default if fault.size is None else fault.size
        return lambda loss: _Gradient.apply(loss, factor, None)  # type: ignore[no-untyped-call]

    return strike


def _out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _oom_in_forward(chaos: Chaos, fault: Fault) -> None:
    raise _out_of_memory()


def _oom_in_backward(chaos: Chaos, fault: Fault) -> Callable[[Tensor], Tensor]:
    return lambda loss: _Gradient.apply(loss, 1.0, _out_of_memory())  # type: ignore[no-untyped-call]


def _oom_in_step(chaos: Chaos, fault: Fault) -> None:
    """Let the optimizer update one parameter, then fail: the worst moment there is."""
    inner: Any = chaos.healer.optimizers[0].inner

    def fail(*args: Any, **kwargs: Any) -> None:
        handle.remove()
        with torch.no_grad():
            chaos.parameter().add_(1.0)
        raise _out_of_memory()

    handle = inner.register_step_pre_hook(fail)


@torch.no_grad()
def _corrupt_weight(chaos: Chaos, fault: Fault) -> None:
    """Overwrite one weight, as a flipped bit in its exponent would; NaN by default."""
    value = float("nan") if fault.size is None else fault.size
    param = chaos.parameter()
    param.view(-1)[chaos.element(param)] = value


@torch.no_grad()
def _drift_weights(chaos: Chaos, fault: Fault) -> None:
    """Multiply all weights: silent, finite, and nothing an update could do."""
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            param.mul_(4.0 if fault.size is None else fault.size)


def _reset_optimizer(chaos: Chaos, fault: Fault) -> None:
    for optimizer in chaos.healer.optimizers:
        optimizer.state.clear()


@torch.no_grad()
def _corrupt_optimizer(chaos: Chaos, fault: Fault) -> None:
    for optimizer in chaos.healer.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.numel() > 1:
                    value.view(-1)[chaos.element(value)] = float("nan")
                    return


def _spike_lr(chaos: Chaos, fault: Fault) -> None:
    factor = 1000.0 if fault.size is None else fault.size
    for optimizer in chaos.healer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _bad_batch(chaos: Chaos, fault: Fault) -> BatchFault:
    """Give the model a batch of another shape than it can use."""

    return BatchFault(lambda batch: _changed(batch, lambda tensor: tensor[..., :0]))


def _nan_batch(chaos: Chaos, fault: Fault) -> BatchFault:
    """Give the model NaN for every float, as a broken decoder does; tokens are left as they are."""

    def spoil(tensor: Tensor) -> Tensor:
        is_float = tensor.is_floating_point() or tensor.is_complex()
        return torch.full_like(tensor, float("nan")) if is_float else tensor

    return BatchFault(lambda batch: _changed(batch, spoil))


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to every tensor of a batch."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(item, change) for item in value)
    return value


def _network_error(chaos: Chaos, fault: Fault) -> None:
    raise ConnectionError("injected: connection reset by peer")


def _flip_bit(chaos: Chaos, fault: Fault) -> None:
    """Flip one bit of the newest good snapshot, as a cosmic ray would."""
    snapshot = chaos.healer.newest_snapshot()
    if snapshot is None:
        return
    key: Key = max(snapshot.tensors, key=lambda k: snapshot.tensors[k].nbytes)
    data = snapshot.tensors[key].view(-1).view(torch.uint8)
    data[chaos.element(data)] ^= 1 << 4


def _slow_down(chaos: Chaos, fault: Fault) -> None:
    time.sleep(0.2 if fault.size is None else fault.size)


def _send(name: str) -> "Kind":
    def strike(chaos: Chaos, fault: Fault) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    return strike


Kind = Callable[[Chaos, Fault], Callable[[Tensor], Tensor] | BatchFault | None]

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
