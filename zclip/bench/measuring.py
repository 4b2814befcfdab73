"""Work that only reads: norms of every tensor, NaN and Inf flags, fingerprints."""

import functools
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import zclip
from zclip.bench.forced import operators
from zclip.bench.gradients import NORMAL, Gradients
from zclip.bench.rivals import PACKAGES
from zclip.bench.work import OURS, Run, Work
from zclip.layout import INF, NAN, SUMSQ

NORMAL_VALUES = "(normal values)"
"""The same call on ordinary gradients, in the same rounds: what others may cost."""


def grad_stats(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """The norm of every tensor. Only ours counts NaN and Inf besides."""
    grads = gradients.grads
    contenders: dict[str, Run] = {
        OURS: lambda: zclip.grad_stats(grads)[:, SUMSQ].sqrt(),
        "torch foreach": lambda: torch.stack(torch._foreach_norm(grads)),
        "torch loop": lambda: torch.stack([g.norm() for g in grads]),
    }
    for backend, measure in _forced("grad_stats", backends, gradients):
        contenders[backend] = _then(measure, lambda stats: stats[:, SUMSQ].sqrt())
    if gradients.values != NORMAL:
        usual = Gradients(gradients.shapes, gradients.dtype, gradients.device).grads
        contenders[NORMAL_VALUES] = lambda: _without_result(zclip.grad_stats(usual))

    def error(norms: Tensor | float | None) -> float:
        if norms is None:
            return 0.0  # of other gradients, to compare the time with
        assert isinstance(norms, Tensor)
        return gradients.error_of_norms(norms)

    return Work(gradients, contenders, error)


def flags(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """Whether any gradient holds NaN or Inf, as a number on the device: 0 if none does."""
    grads = gradients.grads
    found = torch.zeros(1, device=gradients.device)
    one = torch.ones(1, device=gradients.device)

    def isfinite() -> Tensor:
        return (~torch.stack([torch.isfinite(g).all() for g in grads]).all()).float()

    def grad_scaler() -> Tensor:
        found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
        return found.clone()

    contenders: dict[str, Run] = {
        OURS: lambda: zclip.grad_stats(grads)[:, NAN : INF + 1].sum(),
        "isfinite": isfinite,
    }
    if gradients.dtype == torch.float32:  # of the others it has kernels for some, on some devices
        contenders["GradScaler"] = grad_scaler
    if "DeepSpeed" in rivals:
        contenders["DeepSpeed"] = _deepspeed_overflow(gradients)
    for backend, measure in _forced("grad_stats", backends, gradients):
        contenders[backend] = _then(measure, lambda stats: stats[:, NAN : INF + 1].sum())

    def error(bad: Tensor | float | None) -> float:
        """Exact or useless: a bad element must be seen, and none where there is none."""
        if bad is None or float(bad) != 0.0:
            return 1.0
        element = grads[len(grads) // 2].view(-1)[-1:]
        kept = element.clone()
        element.fill_(float("nan"))
        seen = contenders[work.running]()
        element.copy_(kept)
        return 0.0 if seen is not None and float(seen) > 0.0 else 1.0

    work = _Flags(gradients, contenders, error)
    return work


class _Flags(Work):
    """Remembers who is being checked: the check runs the contender a second time."""

    running = OURS

    def check(self, name: str) -> float:
        self.running = name
        return super().check(name)


def _deepspeed_overflow(gradients: Gradients) -> Run:
    check = import_module(f"{PACKAGES['DeepSpeed']}.runtime.utils").CheckOverflow()
    return lambda: float(check.has_overflow_serial(gradients.params))


def fingerprint(gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
    """A hash of the bits of every tensor."""
    grads = gradients.grads
    contenders: dict[str, Run] = {OURS: lambda: torch.ops.zclip.fingerprint(grads)}
    if gradients.device.type == "cpu":
        contenders["crc32"] = lambda: torch.tensor([zlib.crc32(_bytes(g)) for g in grads])
    contenders["sum of bits"] = lambda: torch.stack(
        [g.view(-1).view(_INTEGER[g.element_size()]).sum() for g in grads]
    )
    contenders.update(_forced("fingerprint", backends, gradients))

    def error(before: Tensor | float | None) -> float:
        """One flipped bit must change the hash of its tensor and of no other."""
        assert isinstance(before, Tensor)
        at = len(grads) // 2
        bits = grads[at].view(-1)[-1:].view(torch.uint8)
        bits[0] ^= 1
        after = contenders[work.running]()
        bits[0] ^= 1
        assert isinstance(after, Tensor)
        return 0.0 if (before != after).nonzero().flatten().tolist() == [at] else 1.0

    work = _Flags(gradients, contenders, error)
    return work


def _forced(
    op: str, backends: list[str], gradients: Gradients
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield a contender for each backend: its operator on all gradients."""
    for backend in backends:
        chosen = getattr(operators(backend, gradients.device), op)
        yield f"{OURS}[{backend}]", functools.partial(chosen, gradients.grads)


def _without_result(_: Tensor) -> None:
    """For a contender whose result says nothing about the case."""


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def _then(first: Callable[[], Tensor], second: Callable[[Tensor], Tensor]) -> Run:
    return lambda: second(first())


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
