"""Breaks a run on purpose: faults by step or by rate, seeded, for drills and tests.

A fault strikes where the real one would: in the loader, in forward or backward, between two steps
or in the memory of a snapshot. It strikes a set number of times, by the count of attempts, so that
a step which is repeated after a rollback is not hit again. Creeping ones strike at many attempts in
a row, a little harder every time; the corpus of ``tools/forecast`` has the same, and a test
compares the two.
"""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from heal.actions import check_number
from heal.buffers import Key
from heal.data.split import rebuilt
from heal.micro_batch import TrainStep

if TYPE_CHECKING:
    from heal.healer import Healer

LARGEST_FACTOR = 1e4  # growth stops somewhere; by then every run has diverged
DRIFT_RAMP = 100  # attempts in which a drift grows to its full rate
PERIOD = 20.0  # attempts of one swing of an oscillation
LARGEST_SWING = 9.0  # nats
RESET = "injected: connection reset by peer"
NAN, INF = math.nan, math.inf


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
        return KINDS[self.kind].size if self.size is None else self.size

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


class BrokenLoader:
    """Passes on what a loader gives, except where ``check_batch`` raises."""

    def __init__(self, loader: Any, check_batch: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._check_batch = check_batch

    def __iter__(self) -> Iterator[Any]:
        """Unlike a generator, ``map`` goes on after an error, as DataLoader's iterators do."""
        return map(self._check_batch, iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        """Samplers, generators and the like are the loader's own."""
        return getattr(self._loader, name)


class Chaos:
    """Strikes a run that is trained by a Healer.

    Args:
        healer: whose run is broken.
        faults: what to do, and when.
        seed: of the choice of tensors, elements and attempts; the run's own generators are not
            touched.

    Attributes:
        healer: the same.
        batch: what this attempt trains on; a fault may put another in its place.
        strikes: what happened so far. A fault that found nothing to change did not happen, nor did
            one after a fault that raised at the same attempt.

    Example:
        >>> chaos = Chaos(healer, [Fault("nan_gradient", at=100), Fault("bad_batch", rate=0.01)])
        >>> healer.run(chaos.wrap(train_step), chaos.wrap_loader(loader), steps=1000)
    """

    def __init__(self, healer: "Healer", faults: Sequence[Fault], seed: int = 0) -> None:
        self.strikes: list[Strike] = []
        self.healer = healer
        self.batch: Any = None
        self._faults = list(faults)
        self._random = random.Random(seed)
        self._seed = seed
        self._attempt = -1
        self._batch = -1

    def wrap(self, train_step: TrainStep) -> TrainStep:
        """Return ``train_step`` with faults; those between steps strike before it runs."""

        def broken(batch: Any) -> Tensor:
            self.batch = batch
            later: list[tuple[Strike, LossChange]] = []
            for fault in self._due_now():
                strike = self._note(fault, self._attempt)  # now, because it may raise
                try:
                    change = KINDS[fault.kind].strike(self, fault)
                except NothingToBreak:
                    self.strikes.pop()
                    continue
                if change is not None:
                    self.strikes.pop()
                    later.append((strike, change))
            loss = train_step(self.batch)
            for strike, change in later:
                loss = change(loss)
                self.strikes.append(strike)
            return loss

        return broken

    def wrap_loader(self, loader: Any) -> BrokenLoader:
        """Return the loader with the faults of kind "loader_error"."""
        return BrokenLoader(loader, self._check_batch)

    def _check_batch(self, batch: Any) -> Any:
        """Count a batch that was drawn; one that should fail is lost, as a torn sample's would."""
        self._batch += 1
        for fault in self._due(self._batch, in_loader=True):
            self._note(fault, self._batch)
            raise ValueError(f"injected: sample of batch {self._batch} is torn ({fault.kind})")
        return batch

    @property
    def not_struck(self) -> list[Fault]:
        """The faults meant for this rank that did not happen, not even once."""
        struck = {id(strike.fault) for strike in self.strikes}
        return [f for f in self._faults if id(f) not in struck and self._is_here(f)]

    def _due_now(self) -> list[Fault]:
        """The faults of a new attempt; further pieces or batches of the same one have none."""
        counted = self.healer.attempts
        if not counted:  # a hand-written loop: every call is an attempt
            self._attempt += 1
        elif counted - 1 > self._attempt:
            self._attempt = counted - 1
        else:
            return []
        return self._due(self._attempt, in_loader=False)

    def _due(self, attempt: int, in_loader: bool) -> list[Fault]:
        """Those whose turn it is. All draw, whatever strikes: ranks draw the same numbers."""
        due = []
        for fault in self._faults:
            if (fault.kind == "loader_error") is not in_loader:
                continue
            if fault.at is None:
                strikes = self._random.random() < fault.rate
            else:
                strikes = fault.at <= attempt < fault.at + fault.times
            if strikes and self._is_here(fault):
                due.append(fault)
        return due

    def _note(self, fault: Fault, attempt: int) -> Strike:
        self.strikes.append(Strike(fault, attempt, self.healer.last_step + 1))
        return self.strikes[-1]

    def _is_here(self, fault: Fault) -> bool:
        """Ranks draw the same numbers; where a fault strikes is decided after."""
        chosen = 0 if fault.rank is None and fault.kind == "slow_rank" else fault.rank
        return chosen is None or chosen == self.healer.journal.rank

    def parameter(self) -> Tensor:
        """Choose a trainable parameter with more than one element."""
        params = [p for p in self.healer.model.parameters() if p.requires_grad and p.numel() > 1]
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


LossChange = Callable[[Tensor], Tensor]


def _scale_gradient(chaos: Chaos, factor: float, error: Exception | None = None) -> LossChange:
    """Leave the loss as it is, and multiply or raise on the way back."""

    def on_the_way_back(grad: Tensor) -> Tensor:
        if error is not None:
            raise error
        return grad * factor

    def change(loss: Tensor) -> Tensor:
        loss = loss.clone()  # a hook of its own: the loss may be used elsewhere too
        loss.register_hook(on_the_way_back)
        return loss

    return change


def _scale_loss(chaos: Chaos, factor: float) -> LossChange:
    return lambda loss: loss * factor


def _out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _raise(error: Exception) -> None:
    raise error


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
    """Overwrite one weight, as a flipped bit in its exponent would."""
    param = chaos.parameter()
    param.view(-1)[chaos.element(param)] = fault.strength


@torch.no_grad()
def _scale_weights(chaos: Chaos, factor: float) -> None:
    """Silent, finite, and nothing an update could do."""
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            param.mul_(factor)


def _reset_optimizer(chaos: Chaos, fault: Fault) -> None:
    states = [optimizer.state for optimizer in chaos.healer.optimizers]
    if not any(entry for state in states for entry in state.values()):
        raise NothingToBreak  # plain SGD keeps nothing
    for state in states:
        state.clear()


@torch.no_grad()
def _corrupt_optimizer(chaos: Chaos, fault: Fault) -> None:
    for optimizer in chaos.healer.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.numel() > 1:
                    value.view(-1)[chaos.element(value)] = NAN
                    return
    raise NothingToBreak


def _scale_lr(chaos: Chaos, factor: float) -> None:
    for optimizer in chaos.healer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _break_batch(chaos: Chaos, change: Callable[[Tensor], Tensor]) -> None:
    """Change the tensors of the batch: of a copy, because a loader may give the same one again."""
    hits = 0

    def changed(value: Any) -> Any:
        nonlocal hits
        if not isinstance(value, Tensor):
            return rebuilt(value, changed)
        new = change(value)
        hits += new is not value
        return new

    batch = changed(chaos.batch)
    if not hits:
        raise NothingToBreak
    chaos.batch = batch


def _emptied(tensor: Tensor) -> Tensor:
    """Another shape than the model can use."""
    return tensor[..., :0] if tensor.dim() and tensor.numel() else tensor


def _spoiled(tensor: Tensor) -> Tensor:
    """NaN for every float, as a broken decoder makes; tokens are left as they are."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, NAN) if is_float else tensor


def _flip_bit(chaos: Chaos, fault: Fault) -> None:
    """Flip one bit of the newest good snapshot, as a cosmic ray would."""
    snapshot = chaos.healer.newest_snapshot()
    if snapshot is None:
        raise NothingToBreak
    key: Key = max(snapshot.tensors, key=lambda k: snapshot.tensors[k].nbytes)
    data = snapshot.tensors[key].view(-1).view(torch.uint8)
    data[chaos.element(data)] ^= 1 << 4


def _send_signal(chaos: Chaos, fault: Fault) -> None:
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


def _swung(since: float, depth: float) -> float:
    """The factor itself: the rate swings, ever more widely, around what it was."""
    return math.exp(swing(since, depth))


def drift(since: float, rate: float) -> float:
    """Return the factor on all weights at one attempt."""
    return 1.0 + rate * min(since / DRIFT_RAMP, 1.0)


def _add_noise(chaos: Chaos, fault: Fault) -> None:
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


class Kind(NamedTuple):
    """What a kind of fault does; a change of the loss is returned and happens after forward.

    ``size`` is how hard by default: a factor, a value, seconds, or growth per attempt.
    """

    strike: Callable[[Chaos, Fault], LossChange | None]
    size: float = 0.0


def _times(
    scale: Callable[[Chaos, float], LossChange | None],
    factor: Callable[[float, float], float] = lambda since, size: size,
) -> Callable[[Chaos, Fault], LossChange | None]:
    """Return a fault that multiplies something, by its size or by a factor that grows with time."""
    return lambda chaos, fault: scale(chaos, factor(chaos.since(fault), fault.strength))


def _last_step_of(course: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Return by what a course grows at one attempt: rates keep what they were multiplied by."""
    return lambda since, size: course(since, size) / course(max(since - 1, 0), size)


KINDS: dict[str, Kind] = {
    "nan_gradient": Kind(_times(_scale_gradient), NAN),
    "inf_gradient": Kind(_times(_scale_gradient), INF),
    "exploding_gradient": Kind(_times(_scale_gradient), 1e6),
    "nan_loss": Kind(_times(_scale_loss), NAN),
    "loss_spike": Kind(_times(_scale_loss), 100.0),
    "corrupt_weight": Kind(_corrupt_weight, NAN),
    "weight_drift": Kind(_times(_scale_weights), 4.0),
    "corrupt_optimizer": Kind(_corrupt_optimizer),
    "reset_optimizer": Kind(_reset_optimizer),
    "lr_spike": Kind(_times(_scale_lr), 1000.0),
    "oom_forward": Kind(lambda chaos, fault: _raise(_out_of_memory())),
    "oom_backward": Kind(lambda chaos, fault: _scale_gradient(chaos, 1.0, _out_of_memory())),
    "oom_step": Kind(_oom_in_step),
    "bad_batch": Kind(lambda chaos, fault: _break_batch(chaos, _emptied)),
    "nan_batch": Kind(lambda chaos, fault: _break_batch(chaos, _spoiled)),
    "loader_error": Kind(lambda chaos, fault: None),  # the loader raises it
    "network_error": Kind(lambda chaos, fault: _raise(ConnectionError(RESET))),
    "flip_snapshot_bit": Kind(_flip_bit),
    "slow_step": Kind(lambda chaos, fault: time.sleep(fault.strength), 0.2),
    "slow_rank": Kind(lambda chaos, fault: time.sleep(fault.strength), 0.2),
    "growing_lr": Kind(_times(_scale_lr, _last_step_of(grown)), 0.03),
    "oscillating_lr": Kind(_times(_scale_lr, _last_step_of(_swung)), 0.02),
    "creeping_scale": Kind(_times(_scale_gradient, grown), 0.03),
    "creeping_noise": Kind(_add_noise, 0.04),
    "creeping_drift": Kind(_times(_scale_weights, drift), 0.01),
    "sigterm": Kind(_send_signal),
    "sigkill": Kind(_send_signal),
}
"""What can be done to a run, by name."""
