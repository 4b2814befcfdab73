"""Where the rows of gradients and of their weights lie: one entry per tensor, not per row."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zclip.backends.triton.table import Upload, kept
from zclip.backends.triton.tensor_list import layout_of
from zclip.checks import check_tensors


class RowGroup(NamedTuple):
    """A run of rows that one launch can serve."""

    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    first_row: int
    num_rows: int


class RowTable(Upload):
    """Made of the gradients and, behind them, as many weights of the same shapes."""

    def __init__(self, tensors: Sequence[Tensor]):
        grads, weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        pairs = [(g.dtype, w.dtype) for g, w in zip(grads, weights, strict=True)]
        # Tensors of one pair of dtypes stand together, so that one launch serves them.
        order = sorted(range(len(grads)), key=lambda i: str(pairs[i]))
        counts = [num_rows(grads[i]) for i in order]
        lengths = [
            grads[i].numel() // count if count else 0
            for i, count in zip(order, counts, strict=True)
        ]
        starts = [0, *accumulate(counts)]
        parts = [
            torch.tensor([grads[i].data_ptr() for i in order]),
            torch.tensor([weights[i].data_ptr() for i in order]),
            torch.tensor(lengths),
            torch.tensor(starts),
            torch.tensor(order),
        ]
        super().__init__(tensors, parts)
        self.grads, self.weights, self.lengths, self.first_rows, self.owners = self.columns
        self.num_tensors = len(grads)
        self.num_rows = starts[-1]
        self.has_float64 = any(g.dtype == torch.float64 for g in grads)
        self.groups = []
        in_order = [pairs[i] for i in order]
        for pair in dict.fromkeys(in_order):
            begin = starts[in_order.index(pair)]
            end = starts[len(in_order) - in_order[::-1].index(pair)]
            if end > begin:
                self.groups.append(RowGroup(*pair, begin, end - begin))


def num_rows(tensor: Tensor) -> int:
    """Rows are timm's: the first dimension, or one if there are fewer than two."""
    return tensor.shape[0] if tensor.dim() > 1 else 1


class RowList:
    """The tensors of one call and their table. What is not made of dense rows is copied."""

    table: RowTable

    def __init__(self, grads: Sequence[Tensor], params: Sequence[Tensor]):
        self._copies: list[tuple[Tensor, Tensor]] = []
        try:
            dense = [self._dense(i, g) for i, g in enumerate(grads)]
            dense += [p if _rows_are_runs(p) else p.contiguous() for p in params]
        except (RuntimeError, NotImplementedError):
            check_tensors(grads)  # sparse tensors have neither strides nor an address
            check_tensors(params, "params[{}]".format)
            raise
        # The same memory may be cut otherwise: the rows belong to the key.
        key = (*map(Tensor.data_ptr, dense), *map(num_rows, grads), "rows")
        self.table = kept(key, dense, RowTable)
        self._dense_weights = dense[len(grads) :]  # copies must outlive the launches

    def write_back(self) -> None:
        """Copy what was written into the tensors that were copied."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _dense(self, i: int, grad: Tensor) -> Tensor:
        if _rows_are_runs(grad):
            return grad
        _, overlaps = layout_of(grad)
        if overlaps:
            raise ValueError(
                f"grads[{i}] of shape {tuple(grad.shape)}: expected memory of its own, got "
                "elements that share memory (expand()?); pass a clone()"
            )
        copy = grad.contiguous()
        self._copies.append((grad, copy))
        return copy


def _rows_are_runs(tensor: Tensor) -> bool:
    """Whether memory is dense and each row one run of it, as also in channels_last."""
    if tensor.is_contiguous():
        return True
    is_dense, _ = layout_of(tensor)
    rows = num_rows(tensor)
    return is_dense and (rows == 1 or tensor.stride(0) * rows == tensor.numel())
