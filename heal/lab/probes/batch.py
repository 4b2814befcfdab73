"""What a batch says of the loss: its sharpness, the noise of its gradient, what it minds.

A probe leaves no traces: gradients, buffers, generators and modes are put back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from heal.actions import Rollback, action_in_words
from heal.data.split import num_samples, split
from heal.micro_batch import TrainStep
from heal.training_state import RngState

if TYPE_CHECKING:
    from heal.healer import Healer

T = TypeVar("T")

FEWEST_PRODUCTS = 8
"""A start that hardly points at the largest curvature looks settled on a lesser one at first."""

TIE = 1e-6  # share of an eigenvalue below which rounding decides which of two is larger


@contextmanager
def undisturbed(model: Module, hides_gradients: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the trainable parameters by name; afterwards the run is bit by bit as before.

    Parameters themselves are not copied: a probe reads them.

    Args:
        model: what is trained.
        hides_gradients: whether the body sees no gradients and may make its own; else it sees
            those that are there, and what it writes into them stays.

    Example:
        >>> with undisturbed(model) as params:
        ...     loss = train_step(batch)
        ...     grads = torch.autograd.grad(loss, [p for _, p in params])
    """
    rng = RngState.now()
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for param, _ in grads if hides_gradients else ():
            param.grad = None
        yield [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for param, grad in grads:
            param.grad = grad
        rng.put_back()


def gradients_of_pieces(
    model: Module, params: list[tuple[str, Tensor]], train_step: TrainStep, parts: list[Any]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the gradients of each piece of a batch; to be called within :func:`undisturbed`.

    Batch norms use their running statistics: a sample alone has none, and pieces of several would
    each be normalised in another way than the batch was.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.eval()
    for part in parts:
        loss, wanted = train_step(part), [p for _, p in params]
        yield torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


def pieces_of(batch: Any, count: int | None) -> list[Any]:
    """Return a batch as ``count`` pieces of as many samples each; single samples if None.

    Raises:
        ValueError: the batch is empty, or does not divide.
    """
    samples = num_samples(batch)
    if samples < 1:
        raise ValueError("batch: expected samples along the first axis of its tensors, got none")
    count = samples if count is None else count
    if count < 1 or samples % count:
        raise ValueError(f"pieces: expected a number that divides {samples} samples, got {count}")
    return [piece for piece, _ in split(batch, count)]


def every(steps: int, probe: Callable[[], T]) -> Callable[[int], T | None]:
    """Return a function of the step that runs the probe at every ``steps``-th, else returns None.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    return lambda step: probe() if step % steps == 0 else None


@dataclass(frozen=True, slots=True)
class Sharpness:
    """The eigenvalue of the Hessian that is largest in magnitude, with its sign.

    ``residual`` is the length of ``H v - eigenvalue * v``: some eigenvalue lies within it.
    ``is_converged`` says whether it came below the tolerance; if not, the largest curvature is
    probably larger than what is returned, and the limit of the learning rate lower.
    """

    eigenvalue: float
    residual: float
    iterations: int
    is_converged: bool

    @property
    def largest_stable_lr(self) -> float:
        """The learning rate from which plain gradient descent leaves this valley: 2 / curvature."""
        return 2.0 / self.eigenvalue if self.eigenvalue > 0.0 else math.inf


def sharpness(
    model: Module,
    train_step: TrainStep,
    batch: Any,
    *,
    iterations: int = 30,
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Sharpness:
    """Return the sharpness of the loss on one batch; each iteration costs about two backwards.

    Lanczos without reorthogonalisation: it holds three vectors of the weights' size, and rounding
    only repeats eigenvalues that were found (Paige 1980), which does no harm to the largest.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss; twice differentiable.
        batch: what the loss is computed on.
        iterations: most products to take.
        tolerance: residual at which to stop, as a share of the eigenvalue. The eigenvalue itself
            is more exact: its error falls with the square of the residual.
        seed: of the first direction; the run's generators are not touched.

    Raises:
        ValueError: ``iterations`` is below 1.
    """
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    with undisturbed(model) as named:
        params = [p for _, p in named]
        generator = torch.Generator().manual_seed(seed)
        direction = [
            torch.randn(p.shape, generator=generator).to(p.device, _wide(p)) for p in params
        ]
        direction = _scaled(direction, 1.0 / _length(direction))
        before = [torch.zeros_like(v) for v in direction]
        rng = RngState.now()
        diagonal: list[float] = []
        beside: list[float] = [0.0]
        found = Sharpness(0.0, math.inf, 0, False)
        for done in range(1, iterations + 1):
            rng.put_back()  # the same dropout in every product: one Hessian, not several
            product = _product(train_step(batch), params, direction)
            diagonal.append(float(_dot(product, direction)))
            rest = [
                h - diagonal[-1] * v - beside[-1] * u
                for h, v, u in zip(product, direction, before, strict=True)
            ]
            length = _length(rest)
            if not math.isfinite(length):
                return Sharpness(math.nan, math.inf, done, False)
            value, residual = _largest(diagonal, beside[1:], length)
            # What is left is rounding: all that the start can reach was seen.
            is_exhausted = length <= _rounding(direction) * max(map(abs, diagonal + beside))
            settled = residual <= tolerance * abs(value) and done >= FEWEST_PRODUCTS
            found = Sharpness(value, residual, done, settled or is_exhausted)
            if found.is_converged:
                break
            beside.append(length)
            before, direction = direction, _scaled(rest, 1.0 / length)
        return found


def _largest(
    diagonal: Sequence[float], beside: Sequence[float], length: float
) -> tuple[float, float]:
    """Return the eigenvalue of the tridiagonal matrix largest in magnitude, and its residual.

    Of two as large as each other it is the positive one: that is where descent diverges.
    """
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    at = 0 if float(-values[0]) > float(values[-1]) * (1.0 + TIE) else len(values) - 1
    return float(values[at]), abs(length * float(vectors[-1, at]))


def _product(loss: Tensor, params: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    """Return the Hessian times a direction: the gradient of gradient times direction."""
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    used = [(g, v) for g, v in zip(grads, direction, strict=True) if g is not None]
    slope = torch.stack([(g * v.to(g)).sum() for g, v in used]).sum()
    if not slope.requires_grad:  # a loss that is linear in its weights has no curvature
        return [torch.zeros_like(v) for v in direction]
    products = torch.autograd.grad(slope, params, allow_unused=True)
    return [
        torch.zeros_like(v) if h is None else h.detach().to(v)
        for v, h in zip(direction, products, strict=True)
    ]


def _dot(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return torch.stack(
        [(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)]
    ).sum()


def _length(tensors: list[Tensor]) -> float:
    return float(_dot(tensors, tensors).sqrt())


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [t * factor for t in tensors]


def _wide(param: Tensor) -> torch.dtype:
    """Vectors of half precision would lose each other's direction within a few products."""
    return torch.promote_types(param.dtype, torch.float32)


def _rounding(tensors: list[Tensor]) -> float:
    """The share of a product that may be nothing but rounding: some units of the last place."""
    return 10.0 * max(torch.finfo(t.dtype).eps for t in tensors)


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Estimates without bias of the two parts of a gradient (McCandlish et al., arXiv:1812.06162).

    ``signal`` is the squared length of the true gradient, ``noise`` the trace of the covariance of
    one sample's. The estimate of a small signal may come out negative: then there is none to see.
    """

    signal: float
    noise: float

    @property
    def samples(self) -> float:
        """Noise over signal, in samples; infinite where there is no signal to be seen."""
        return self.noise / self.signal if self.signal > 0.0 else math.inf


def noise_scale(
    model: Module, train_step: TrainStep, batch: Any, pieces: int | None = None
) -> NoiseScale:
    """Compare the gradients of the pieces of a batch with that of the whole.

    Batch norms use their running statistics, so that a piece is to be compared with the whole.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss over samples.
        batch: at least two samples.
        pieces: into how many the batch is cut; one per sample if None.

    Raises:
        ValueError: there is only one piece, or the batch does not divide.
    """
    with undisturbed(model) as params:
        parts = pieces_of(batch, pieces)
        count, samples = len(parts), num_samples(batch)
        if count < 2:
            raise ValueError(
                f"batch: expected at least 2 pieces to measure noise with, got {count}"
            )
        totals: list[Tensor] = []
        squares = 0.0
        for grads in gradients_of_pieces(model, params, train_step, parts):
            wide = [g.double() for g in grads]
            squares += float(torch.stack([g.square().sum() for g in wide]).sum())
            totals = [a + b for a, b in zip(totals, wide, strict=True)] if totals else wide
        small = squares / count  # mean squared length of a piece's gradient
        large = float(torch.stack([(t / count).square().sum() for t in totals]).sum())
        size = samples / count
        return NoiseScale(
            signal=(samples * large - size * small) / (samples - size),
            noise=(small - large) / (1.0 / size - 1.0 / samples),
        )


def fisher_diagonal(
    model: Module, train_step: TrainStep, batch: Any, pieces: int | None = None
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher matrix: mean squared gradient of one sample.

    Costs one forward and backward per piece. With fewer pieces than samples it is cheaper and too
    small: the gradients of samples partly cancel before they are squared.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss.
        batch: a tensor, or tensors in tuples, lists or dicts, with samples first.
        pieces: into how many the batch is cut; one per sample if None.

    Returns:
        By name of the parameter; zero where the loss does not depend on it.
    """
    with undisturbed(model) as params:
        totals = {name: torch.zeros_like(p) for name, p in params}
        parts = pieces_of(batch, pieces)
        for grads in gradients_of_pieces(model, params, train_step, parts):
            for total, grad in zip(totals.values(), grads, strict=True):
                total += grad.square()
        return {name: total / len(parts) for name, total in totals.items()}


def importance(model: Module, fisher: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the share of each parameter tensor in what the loss minds.

    It is the second-order cost of losing the tensor, ``0.5 * sum(F * w ** 2)``, over that of
    losing all (optimal brain damage with F for the Hessian); 0-dim tensors that sum to 1.
    """
    named = dict(model.named_parameters())
    costs = {name: 0.5 * (f * named[name].detach().square()).sum() for name, f in fisher.items()}
    total = torch.stack([cost.double() for cost in costs.values()]).sum()
    return {
        name: cost / total.clamp(min=torch.finfo(torch.float64).tiny)
        for name, cost in costs.items()
    }


# Elastic weight consolidation: holds weights near those of a snapshot, the important ones most.
#
# This is the form on demand, around a ``train_step``. The action ``AnchorWeights`` of healing, by
# a hook, needs none. Whether it helps is in docs/forecast.md.


class Anchor:
    """Adds ``strength / 2 * sum(F * (w - w0) ** 2)`` to what is minimised (arXiv:1612.00796).

    The loss that is reported stays the loss of the data: only its gradient is changed.

    Args:
        model: what is trained.
        fisher: importance of each weight, by name, as of :func:`fisher_diagonal`.
        strength: the factor; 0 changes nothing.

    Example:
        >>> anchor = Anchor(model, fisher_diagonal(model, train_step, batch), strength=10.0)
        >>> loss = anchor(train_step(batch))
    """

    def __init__(self, model: Module, fisher: dict[str, Tensor], strength: float) -> None:
        named = dict(model.named_parameters())
        unknown = sorted(set(fisher) - set(named))
        if unknown:
            raise ValueError(f"the model has no parameter {unknown[0]!r}, which the Fisher names")
        self.strength = strength
        self._held = [(named[n], f, named[n].detach().clone()) for n, f in fisher.items()]

    def penalty(self) -> Tensor:
        """Return what is added to the loss: 0-dim, on the device of the weights."""
        parts = [(f * (p - start).square()).sum() for p, f, start in self._held]
        return 0.5 * self.strength * torch.stack([part.to(parts[0]) for part in parts]).sum()

    def __call__(self, loss: Tensor) -> Tensor:
        """Return a loss of the same value with the gradient of the anchored one."""
        penalty = self.penalty().to(loss)
        return loss + (penalty - penalty.detach())


class AnchoredRecovery:
    """Anchors a run for some steps after each rollback, to the weights that it returned to.

    If the Fisher information cannot be had, the run goes on without an anchor and a note says why.

    Args:
        healer: whose rollbacks are followed.
        strength: of the anchor.
        steps: how long it holds.

    Attributes:
        make_anchor: takes model, Fisher and strength; :class:`Anchor` unless replaced.

    Example:
        >>> recovery = AnchoredRecovery(healer, strength=10.0, steps=100)
        >>> healer.run(recovery.wrap(train_step), loader, steps=10_000)
    """

    def __init__(self, healer: "Healer", strength: float = 10.0, steps: int = 100) -> None:
        self.healer = healer
        self.strength = strength
        self.steps = steps
        self.make_anchor: Callable[[Module, dict[str, Tensor], float], Anchor] = Anchor
        self._anchor: Anchor | None = None
        self._left = 0
        self._known = len(healer.recoveries)

    @property
    def is_holding(self) -> bool:
        """Whether the next step is anchored."""
        return self._left > 0

    def wrap(self, train_step: TrainStep) -> TrainStep:
        """Return ``train_step`` with the anchor in place where it is due."""

        def anchored(batch: Any) -> Tensor:
            if self._was_rolled_back():
                self._set_anchor(train_step, batch)
            loss = train_step(batch)
            if self._anchor is None or self._left <= 0:
                return loss
            self._left -= 1
            return self._anchor(loss)

        return anchored

    def _set_anchor(self, train_step: TrainStep, batch: Any) -> None:
        self._anchor, self._left = None, 0
        try:
            fisher = fisher_diagonal(self.healer.model, train_step, batch)
            self._anchor = self.make_anchor(self.healer.model, fisher, self.strength)
            self._left = self.steps
        except Exception as error:  # what is only to help must not end the run
            self.healer.note(f"the run is not anchored after its rollback: {error!r}")

    def _was_rolled_back(self) -> bool:
        new = self.healer.recoveries[self._known :]
        self._known = len(self.healer.recoveries)
        return any(action_in_words(Rollback.__name__) in entry["actions"] for entry in new)
