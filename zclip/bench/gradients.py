"""Gradients to measure on: cheap to make, to make again, and to compare with float64."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zclip.bench.shapes import Shape, elements

PATTERN = (1 << 20) + 7  # elements at most; odd, so that tensors of the same shape differ
STRIDE = 7919  # where the next tensor starts within the pattern
ROW, ROWS_PER_TOKEN = 500, 50  # of gradients that are mostly zeros: as in a large embedding

NORMAL = "normal"
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    NORMAL: lambda x: x,
    "zeros": torch.zeros_like,
    "mostly-zeros": lambda x: x * (torch.arange(len(x)) // ROW % ROWS_PER_TOKEN == 0),
    "1e-20": lambda x: x * 1e-20,
    "1e-40": lambda x: x * 1e-40,
    "1e25": lambda x: x * 1e25,
}
"""Kinds of gradients, made of random numbers around 1. None should cost more than another."""


class Gradients:
    """Parameters with gradients that repeat one block of random numbers.

    Copying a block is far quicker than drawing random numbers, and the gradient as it was can be
    had again at any time, one tensor at a time, to compare with.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        values: str = NORMAL,
    ) -> None:
        self.shapes, self.values = list(shapes), values
        generator = torch.Generator().manual_seed(0)
        length = min(PATTERN, elements(list(shapes)) + 7)
        drawn = VALUES[values](torch.randn(length, generator=generator))
        self.pattern = drawn.to(device, dtype)
        if not self.pattern.isfinite().all():
            raise ValueError(f"values {values} overflow {dtype}; choose a wider dtype")
        self.params = [Parameter(torch.empty(s, dtype=dtype, device=device)) for s in shapes]
        self.grads = [torch.empty_like(p, requires_grad=False) for p in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes = sum(g.nbytes for g in self.grads)
        self.fill()
        self.exact_norms = self._exact_norms()
        """float64 [tensors], on the CPU."""
        self.exact_norm = float(self.exact_norms.norm())

    def fill(self) -> None:
        """Make every gradient what it was at first."""
        for i, grad in enumerate(self.grads):
            self._write(i, grad)

    def fill_params(self) -> None:
        """Give the parameters values too, for work that reads them."""
        with torch.no_grad():
            for i, param in enumerate(self.params):
                self._write(i, param.data)

    def error_of_norm(self, norm: Tensor) -> float:
        """Return the relative error of a total norm against float64."""
        return self.error_of_norms(norm.reshape(1), torch.tensor([self.exact_norm]).double())

    def error_of_norms(self, norms: Tensor, exact: Tensor | None = None) -> float:
        """Return the largest relative error among the norms of all tensors."""
        exact = self.exact_norms if exact is None else exact
        off = (norms.double().cpu() - exact).abs()
        return float(torch.where(off == 0, off, off / exact).max())

    def error_of_values(self, expected: Callable[[Tensor], Tensor]) -> float:
        """Return the relative error of all gradients against ``expected`` of the first ones.

        ``expected`` works element by element, in float64.
        """
        exact = expected(self.pattern.double())
        off, size = 0.0, 0.0
        for i, grad in enumerate(self.grads):
            flat = grad.view(-1)
            for at, start, count in self._pieces(i, flat.numel()):
                piece = exact[start : start + count]
                off += float((flat[at : at + count] - piece).square_().sum())
                size += float(piece.square().sum())
        return float((off / size) ** 0.5) if size else float(off > 0)

    def are_untouched(self) -> bool:
        """Return whether every gradient has, bit by bit, the values that it was filled with."""
        return all(
            torch.equal(grad.view(-1)[at : at + count], self.pattern[start : start + count])
            for i, grad in enumerate(self.grads)
            for at, start, count in self._pieces(i, grad.numel())
        )

    def _exact_norms(self) -> Tensor:
        """Add up squares of the pattern once; a tensor's sum is a difference of two such sums."""
        squares = self.pattern.double().cpu().square().cumsum(0)
        until = torch.cat([squares.new_zeros(1), squares])
        pieces = [
            (i, start, start + count)
            for i, grad in enumerate(self.grads)
            for _, start, count in self._pieces(i, grad.numel())
        ]
        owners, starts, ends = torch.tensor(pieces).T
        sums = torch.zeros(len(self.grads), dtype=torch.float64)
        return sums.index_add_(0, owners, until[ends] - until[starts]).sqrt()

    def _write(self, i: int, target: Tensor) -> None:
        flat = target.view(-1)
        for at, start, count in self._pieces(i, flat.numel()):
            flat[at : at + count].copy_(self.pattern[start : start + count])

    def _pieces(self, i: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield where in tensor ``i``, where in the pattern, and how many elements."""
        length = self.pattern.numel()
        at, start = 0, (i * STRIDE) % length
        while at < count:
            piece = min(count - at, length - start)
            yield at, start, piece
            at, start = at + piece, 0


def bytes_needed(elements: int, dtype: torch.dtype, reads_params: bool) -> int:
    """Return how much memory the gradients of a case take, and its parameters if they are read.

    Parameters that are not read are never touched, and take none.
    """
    return elements * dtype.itemsize * (2 if reads_params else 1)
