"""Keeps a probe from leaving traces: gradients, buffers, generators and modes are put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from heal.data.split import num_samples, split
from heal.training_state import RngState

T = TypeVar("T")


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


def freeze_batch_statistics(model: Module) -> None:
    """Have batch norms use their running statistics until the run is as before.

    A sample alone has no statistics: torch refuses it, and pieces of several samples would each be
    normalised in another way than the batch was. To be called within :func:`undisturbed`.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.eval()


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
