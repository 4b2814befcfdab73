"""What is measured: each case is a piece of work, our way of doing it, and the rivals' ways."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import zclip
from zclip.bench.shapes import MODELS, elements
from zclip.layout import SUMSQ

OURS = "zclip"


@dataclass
class Case:
    """One row of the table. Contenders return the norm if they compute one."""

    name: str
    wanted: float
    """How many times faster than the fastest rival we mean to be."""
    bytes_read: int
    tensors: int
    contenders: dict[str, Callable[[], Tensor | None]]
    exact: float | None = None
    """The norm in float64, if the contenders return one."""
    errors: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Compare every contender's result with float64; fills :attr:`errors`."""
        for name, run in self.contenders.items():
            result = run()
            if result is not None and self.exact:
                self.errors[name] = abs(float(result) - self.exact) / self.exact


def parameters(model: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters with random gradients, in the shapes of a model."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for shape in MODELS[model]:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=True)
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        result.append(parameter)
    return result


def _exact(params: list[torch.nn.Parameter]) -> float:
    squares = [p.grad.double().square().sum() for p in params if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def unclipped(name: str, model: str, dtype: torch.dtype, wanted: float) -> Case:
    """Return the common case: the norm is below the limit and nothing needs to be written."""
    params = parameters(model, dtype)
    limit = 1e30
    return Case(
        name,
        wanted,
        elements(MODELS[model]) * dtype.itemsize,
        len(params),
        {
            OURS: lambda: zclip.clip_grad_norm_(params, limit),
            "torch": lambda: torch.nn.utils.clip_grad_norm_(params, limit, foreach=True),
        },
        exact=_exact(params),
    )


def clipped(name: str, model: str, wanted: float) -> Case:
    """Return the case where every step clips: the limit shrinks from call to call."""
    params = parameters(model, torch.float32)
    limits = (0.97**n for n in itertools.count())
    return Case(
        name,
        wanted,
        elements(MODELS[model]) * 4,
        len(params),
        {
            OURS: lambda: zclip.clip_grad_norm_(params, next(limits)),
            "torch": lambda: torch.nn.utils.clip_grad_norm_(params, next(limits), foreach=True),
        },
    )


def flags(name: str, model: str, wanted: float) -> Case:
    """Return the NaN and Inf flags of every tensor, which for us come with the norm."""
    grads = [p.grad for p in parameters(model, torch.float32) if p.grad is not None]

    def isfinite() -> None:
        torch.stack([torch.isfinite(g).all() for g in grads])

    return Case(
        name,
        wanted,
        elements(MODELS[model]) * 4,
        len(grads),
        {OURS: lambda: zclip.grad_stats(grads)[:, SUMSQ].sum().sqrt(), "isfinite": isfinite},
        exact=float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()),
    )


def bandwidth(name: str, model: str, wanted: float) -> Case:
    """Return grad_stats beside two ways of merely reading the same memory."""
    grads = [p.grad for p in parameters(model, torch.float32) if p.grad is not None]

    def read() -> None:
        torch.ops.zclip.read_probe(grads)

    def add_up() -> None:
        for grad in grads:
            grad.sum()

    def stats() -> None:
        zclip.grad_stats(grads)

    return Case(
        name,
        wanted,
        elements(MODELS[model]) * 4,
        len(grads),
        {OURS: stats, "read": read, "sum": add_up},
    )


CASES: dict[str, Callable[[], Case]] = {
    "unclipped": lambda: unclipped(
        "98M float32, unclipped", "98M in 150 tensors", torch.float32, 2.7
    ),
    "clipped": lambda: clipped("98M float32, clipped", "98M in 150 tensors", 1.3),
    "small": lambda: unclipped("2,000 x 64, unclipped", "2,000 tensors of 64", torch.float32, 6.0),
    "bfloat16": lambda: unclipped(
        "98M bfloat16, unclipped", "98M in 150 tensors", torch.bfloat16, 2.7
    ),
    "gpt2": lambda: unclipped("GPT-2 small, unclipped", "gpt2", torch.float32, 2.7),
    "flags": lambda: flags("98M float32, NaN/Inf flags", "98M in 150 tensors", 10.0),
    "bandwidth": lambda: bandwidth("98M float32, bandwidth", "98M in 150 tensors", 0.85),
}
"""Built one at a time: each holds hundreds of megabytes."""
