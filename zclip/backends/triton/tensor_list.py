"""What a kernel may be given: dense memory. Tensors with gaps pass through a contiguous copy."""

from collections.abc import Sequence

from torch import Tensor

from zclip.backends.triton.table import Table, table_of
from zclip.checks import check_tensors

READ, WRITE = False, True


class TensorList:
    """The tensors of one call, and the table of their memory.

    Transposed and channels-last tensors are dense and are served where they lie. One with gaps is
    copied; after a write, :meth:`write_back` carries the copy home.
    """

    table: Table

    def __init__(self, tensors: Sequence[Tensor], write: bool):
        self._copies: list[tuple[Tensor, Tensor]] = []
        try:
            if not all(map(Tensor.is_contiguous, tensors)):
                tensors = [self._dense(i, t, write) for i, t in enumerate(tensors)]
            self.table = table_of(tensors)
        except (RuntimeError, NotImplementedError):
            check_tensors(tensors)  # sparse tensors have neither strides nor an address
            raise

    def write_back(self) -> None:
        """Copy what was written into the tensors that have gaps."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _dense(self, i: int, tensor: Tensor, write: bool) -> Tensor:
        is_dense, overlaps = layout_of(tensor)
        if is_dense:
            return tensor
        if write and overlaps:
            raise ValueError(
                f"grads[{i}] of shape {tuple(tensor.shape)}: expected memory of its own, got "
                "elements that share memory (expand()?); pass a clone()"
            )
        copy = tensor.contiguous()
        self._copies.append((tensor, copy))
        return copy


def layout_of(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether memory is dense, and whether elements share it, as csrc/cpu/tensor_list.cpp.

    Dimensions are walked from the smallest stride up. Memory is dense if each stride is the size
    of everything inside it.
    """
    inside = 1
    is_dense, overlaps = True, False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        is_dense &= stride == inside
        overlaps |= stride < inside
        inside = max(inside, stride) * size
    return is_dense, overlaps
