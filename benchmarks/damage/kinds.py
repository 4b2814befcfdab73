"""The kinds of damage: what strikes, when, and what a healer owes the user afterwards.

Damage strikes between steps, as a broken memory, a bug in a callback or bad data would: never
inside of a step, and once, however often the healer returns to a step before it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.damage.families import Training

AT = 300  # of 500 steps: well into training, with too little time left to learn it all again
LATEST = 0.6  # share of the steps, in runs that are shorter than usual
NEAR_THE_END = 0.97  # share of the steps after which late damage strikes
FIRST_STEPS = (1, 2, 3, 5)  # before which early damage strikes, in turn by the seed

HEALED = "healed"
REPORTED = "reported"
LAST_GOOD = "last good"


@dataclass
class Victim:
    """A training and what its damage must remember.

    Attributes:
        generator: of random damage.
        wrong_sign: whether gradients are turned round at present.
        memory: what a kind keeps between its calls.
    """

    training: Training
    generator: torch.Generator
    wrong_sign: bool = False
    memory: dict[str, Any] = field(default_factory=dict)

    def weights(self) -> list[Tensor]:
        return list(self.training.model.parameters())

    def layer(self) -> Tensor:
        return self.training.layer.get_parameter("weight")

    def randn_like(self, tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=self.generator)

    def state(self, param: Tensor) -> dict[str, Any]:
        return self.training.optimizer.state[param]

    def groups(self) -> list[dict[str, Any]]:
        return self.training.optimizer.param_groups


Strike = Callable[[Victim], object]
During = Callable[[Victim, int], None]


@dataclass(frozen=True)
class Kind:
    """One kind of damage.

    Args:
        name: as the table has it.
        strike: damages once, before step ``at``.
        during: called before every attempt from ``at`` on with their number, from 0.
        bad_batches: how many batches from ``at`` on hold NaN.
        demand: HEALED, the final loss is that of the undamaged twin; REPORTED, healed or at least
            reported; LAST_GOOD, the run ends with the weights of the last step before the damage.
        at: the step; ``late`` strikes near the end instead, because time heals it, and ``early`` in
            the first steps, where nothing is known of the run yet.
        families: those that have what is damaged; all by default.
    """

    name: str
    strike: Strike | None = None
    during: During | None = None
    bad_batches: float = 0
    demand: str = HEALED
    at: int = AT
    late: bool = False
    early: bool = False
    families: tuple[str, ...] = ()

    def starts_at(self, steps: int, seed: int) -> int:
        """Return the step before which it strikes, in a run of so many steps."""
        if self.late:
            return int(NEAR_THE_END * steps)
        if self.early:
            return FIRST_STEPS[seed % len(FIRST_STEPS)]
        if self.name == EIGHT_NAN:  # around a snapshot, a little before, at and after it
            return self.at + (-6, -1, 3)[seed % 3]
        return min(self.at, int(LATEST * steps))


EIGHT_NAN = "eight NaN batches near a snapshot"
ADAM = ("MLP", "GPT", "regression")


def scale_weights(factor: float) -> Strike:
    return lambda victim: [p.mul_(factor) for p in victim.weights()]


def one_weight(victim: Victim) -> None:
    victim.layer().view(-1)[7] = 1e4


def scramble(victim: Victim) -> None:
    weight = victim.layer()
    order = torch.randperm(weight.numel(), generator=victim.generator)
    weight.copy_(weight.flatten()[order].view_as(weight))


def noise(size: float, share: float = 1.0, everywhere: bool = False) -> Strike:
    """Add normal noise to a share of the weights, of one layer or of all."""

    def strike(victim: Victim) -> None:
        for weight in victim.weights() if everywhere else [victim.layer()]:
            chosen = torch.rand(weight.shape, generator=victim.generator) < share
            weight.add_(size * victim.randn_like(weight) * chosen)

    return strike


def change_state(names: tuple[str, ...], change: Callable[[Tensor], Any]) -> Strike:
    """Change moments of every parameter in place, those that the optimizer has."""

    def strike(victim: Victim) -> None:
        for param in victim.weights():
            for name in names:
                if isinstance(victim.state(param).get(name), Tensor):
                    change(victim.state(param)[name])

    return strike


def scale_lr(victim: Victim, factor: float) -> None:
    for group in victim.groups():
        group["lr"] *= factor


def lr_for(steps: int, factor: float) -> During:
    """Raise the rate; who raised it puts it back after some steps, unless somebody else did."""

    def during(victim: Victim, since: int) -> None:
        if since == 0:
            victim.memory["before"] = [group["lr"] for group in victim.groups()]
            scale_lr(victim, factor)
            victim.memory["raised"] = [group["lr"] for group in victim.groups()]
        elif since == steps:
            kept = victim.memory["before"], victim.memory["raised"]
            for group, before, raised in zip(victim.groups(), *kept, strict=True):
                group["lr"] = before if group["lr"] == raised else group["lr"]

    return during


def grow_lr(victim: Victim, since: int) -> None:
    if since < 150:
        scale_lr(victim, 1.03)


def turn_gradients(victim: Victim, since: int) -> None:
    if since == 0:
        for param in victim.weights():
            param.register_hook(lambda grad: -grad if victim.wrong_sign else grad)
    victim.wrong_sign = since < 60


def flip_exponent_bit(victim: Victim) -> None:
    bits = victim.layer().view(-1).view(torch.int32)
    bits[11] ^= 1 << 30


def batch_norms(victim: Victim) -> list[torch.nn.BatchNorm2d]:
    modules = victim.training.model.modules()
    return [module for module in modules if isinstance(module, torch.nn.BatchNorm2d)]


def spoil_statistics(victim: Victim) -> None:
    for norm in batch_norms(victim):
        norm.running_mean.add_(10 * victim.randn_like(norm.running_mean))
        norm.running_var.mul_(100)


def infinite_statistics(victim: Victim) -> None:
    batch_norms(victim)[0].running_var.fill_(math.inf)


def swap_layers(victim: Victim) -> None:
    pairs = zip(
        victim.training.layer.parameters(), victim.training.twin_layer.parameters(), strict=True
    )
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def swap_states(victim: Victim) -> None:
    """Give every parameter the moments of another, the numbers of one list in turn."""
    params = victim.weights()
    for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        moments = [victim.state(p)[name] for p in params if name in victim.state(p)]
        if moments:
            rolled = torch.cat([m.flatten() for m in moments]).roll(moments[-1].numel() + 1)
            for moment, part in zip(
                moments, rolled.split([m.numel() for m in moments]), strict=True
            ):
                moment.copy_(part.view_as(moment))


def kill_relu(victim: Victim) -> None:
    victim.training.relu_bias.fill_(-1e3)


def clear_state(victim: Victim) -> None:
    victim.training.optimizer.state.clear()


MOMENTUM, SQUARES = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)
KINDS = [
    Kind("all weights x 3", scale_weights(3)),
    Kind("all weights x 10", scale_weights(10)),
    Kind("all weights x 1000", scale_weights(1000)),
    Kind("all weights x 1000, first steps", scale_weights(1000), early=True),
    Kind("all weights + N(0, 0.5), first steps", noise(0.5, everywhere=True), early=True),
    Kind("exp_avg x 1e4, first steps", change_state(MOMENTUM, lambda m: m.mul_(1e4)), early=True),
    Kind("one weight 1e4", one_weight),
    Kind("one layer scrambled", scramble),
    Kind("one layer + N(0, 1)", noise(1.0)),
    Kind("all weights + N(0, 0.5)", noise(0.5, everywhere=True)),
    Kind("weights NaN", lambda victim: victim.layer().fill_(math.nan)),
    Kind("exponent bit flipped", flip_exponent_bit),
    Kind("two layers swapped", swap_layers),
    Kind("dead ReLU layer", kill_relu),
    Kind("exp_avg x 1e4", change_state(MOMENTUM, lambda m: m.mul_(1e4))),
    Kind("exp_avg_sq Inf", change_state(SQUARES, lambda m: m.fill_(math.inf)), families=ADAM),
    Kind("exp_avg_sq zeroed", change_state(SQUARES, lambda m: m.zero_()), families=ADAM),
    Kind("state of other parameters", swap_states),
    Kind("optimizer state cleared", clear_state, demand=REPORTED),
    Kind("LR x 100 for good", lambda victim: scale_lr(victim, 100)),
    Kind("LR x 60 for 5 steps", during=lr_for(5, 60)),
    Kind("LR x 120 for 5 steps", during=lr_for(5, 120)),
    Kind("LR + 3 % per step", during=grow_lr),
    Kind("LR x 1000 from the start", lambda v: scale_lr(v, 1000), at=0, demand=REPORTED),
    Kind("wrong-sign updates, 60 steps", during=turn_gradients),
    Kind("BatchNorm statistics spoilt, late", spoil_statistics, late=True, families=("CNN",)),
    Kind("BatchNorm statistics Inf", infinite_statistics, families=("CNN",)),
    Kind("NaN data from there on", bad_batches=math.inf, demand=LAST_GOOD),
    Kind(EIGHT_NAN, bad_batches=8, at=100),
]

SHORT_RUN_KINDS = [
    Kind("weights NaN", lambda victim: victim.layer().fill_(math.nan), at=20),
    Kind("LR x 500 for a step", during=lr_for(1, 500), at=20),
    Kind("all weights + N(0, 0.5)", noise(0.5, everywhere=True), at=20),
    Kind("all weights x 1000", scale_weights(1000), at=20),
    Kind(
        "momentum zeroed",
        change_state(MOMENTUM, lambda m: m.zero_()),
        at=20,
        demand=REPORTED,
    ),
    Kind("10 % of weights + N(0, 0.05)", noise(0.05, share=0.1, everywhere=True), at=20),
    Kind("LR 5.0 for good", lambda v: scale_lr(v, 5.0 / v.groups()[0]["lr"]), at=20),
]
"""Those of ARC's published comparison, and of its ablation: 50 steps, struck before step 20."""


class Striker:
    """Strikes a training when it is time.

    Args:
        kind: of the damage; None: nothing ever happens.
        training: what is struck.
        at: before which step; the first is 0.
        seed: of random damage.

    Attributes:
        attempts: steps begun, those that were undone later included.
        last_good: the weights right before the damage.
    """

    def __init__(self, kind: Kind | None, training: Training, at: int, seed: int) -> None:
        self.kind, self.at, self.attempts = kind, at, 0
        self.victim = Victim(training, torch.Generator().manual_seed(seed))
        self.last_good: list[Tensor] = []
        self.batches_drawn = 0
        self._undamaged: dict[int, Any] = {}  # by identity, which a reference keeps

    @torch.no_grad()
    def before_attempt(self) -> None:
        """Do the damage that is due; call it before the first step and after every step."""
        since, self.attempts = self.attempts - self.at, self.attempts + 1
        if self.kind is None or since < 0:
            return
        if since == 0:
            self.last_good = [p.clone() for p in self.victim.weights()]
            if self.kind.strike is not None:
                self.kind.strike(self.victim)
        if self.kind.during is not None:
            self.kind.during(self.victim, since)

    def ends_with_last_good(self) -> bool:
        """Return whether the weights are, bit by bit, those from right before the damage."""
        now = self.victim.weights()
        return len(now) == len(self.last_good) and all(map(torch.equal, now, self.last_good))

    def loader(self) -> "StruckLoader":
        """Return the loader of the training, with bad batches where the kind has some."""
        return StruckLoader(self)

    def damaged(self, batch: Any) -> Any:
        """Return the batch with NaN in its numbers."""
        bad = tuple(t * math.nan if t.is_floating_point() else t for t in batch)
        self._undamaged[id(bad)] = bad, batch
        return bad

    def undamaged(self, batch: Any) -> Any:
        """Return a batch of the loader as it was before its damage."""
        return self._undamaged.get(id(batch), (None, batch))[1]

    def is_next_batch_bad(self) -> bool:
        """Count a batch that is drawn, and return whether it is bad."""
        since, self.batches_drawn = self.batches_drawn - self.at, self.batches_drawn + 1
        return self.kind is not None and 0 <= since < self.kind.bad_batches


class StruckLoader:
    """Puts NaN into the numbers of batches, in every pass of the loader."""

    def __init__(self, striker: Striker) -> None:
        self._striker, self._inner = striker, striker.victim.training.loader

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            if self._striker.is_next_batch_bad():
                yield self._striker.damaged(batch)
            else:
                yield batch
