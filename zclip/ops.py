"""Public operators over lists of tensors. Thin: call; on refusal, say what was wrong.

Lists whose tensors live on several devices are split here, so that each kernel sees one device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zclip.checks import check_tensors, check_writable
from zclip.layout import NUM_STATS
from zclip.schemas import wide_dtype  # declares torch.ops.zclip


def grad_stats(tensors: Sequence[Tensor]) -> Tensor:
    """Measure every tensor in one read of each.

    Columns are those of :mod:`zclip.layout`: ``[i, SUMSQ]`` is the sum of squares of the finite
    elements of ``tensors[i]``; ``[i, NAN]`` and ``[i, INF]`` count the others. Nothing waits for
    the host, and two calls on the same bits return the same bits, for any number of threads.

    Args:
        tensors: float32, bfloat16, float16 or float64; dtypes, strides and devices may mix.

    Returns:
        float64 tensor of shape ``[len(tensors), 3]`` on the device of the first.

    Raises:
        TypeError: an element is not a dense floating-point tensor.
        ValueError: an element has no memory.

    Example:
        >>> stats = zclip.grad_stats([p.grad for p in model.parameters()])
        >>> total_norm = stats[:, SUMSQ].sum().sqrt()  # still on the device
    """
    return _stats(torch.ops.zclip.grad_stats.default, list(tensors))


def power_stats(tensors: Sequence[Tensor], p: float) -> Tensor:
    """As :func:`grad_stats`, with the sum of ``|x|**p`` in the first column; the max if inf."""
    return _stats(torch.ops.zclip.power_stats.default, list(tensors), p)


def scale_(tensors: Sequence[Tensor], coefs: Tensor) -> None:
    """Multiply each tensor by its coefficient, in place.

    A coefficient of exactly 1 leaves its tensor bitwise untouched and unread; one of exactly -1
    (:data:`zclip.layout.REFUSE`) writes zeros, also over NaN and Inf.

    Args:
        tensors: as for :func:`grad_stats`.
        coefs: float64, one per tensor.
    """
    tensors = list(tensors)
    if coefs.shape != (len(tensors),):
        raise ValueError(
            f"coefs has shape {tuple(coefs.shape)}; wanted one per tensor: ({len(tensors)},)"
        )
    _write(torch.ops.zclip.scale_.default, tensors, coefs)


def zero_nonfinite_(tensors: Sequence[Tensor], stats: Tensor) -> None:
    """Replace NaN and Inf by zero in the tensors that ``stats`` says have any."""
    _write(torch.ops.zclip.zero_nonfinite_.default, list(tensors), stats)


def clip_by_global_norm_(
    grads: list[Tensor], max_norm: float, nonfinite: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Measure, choose one coefficient and scale, in one call; see :mod:`zclip.schemas`.

    On the step path, so the list is taken as it is: tensors of one device, at least one of them.
    """
    if state is None:
        state = grads[0].new_empty(0, dtype=wide_dtype(grads[0].device))  # counts nothing
    return torch.ops.zclip.clip_by_global_norm_.default(grads, state, max_norm, nonfinite)


def clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Bound every element to ``[-limit, limit]``, in place, in one read and one write."""
    tensors = list(tensors)
    if not tensors:
        return
    check_all_writable(tensors)
    for members in by_device(tensors).values():
        torch.ops.zclip.clamp_([tensors[i] for i in members], limit)


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return the indices of the tensors on each device, in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return groups


def check_all_writable(tensors: Sequence[Tensor]) -> None:
    """Raise, before anything is written on any device, if some tensor cannot be."""
    check_tensors(tensors)
    check_writable(tensors)


def _stats(op: Callable[..., Tensor], tensors: list[Tensor], *settings: float) -> Tensor:
    if not tensors:
        return torch.empty((0, NUM_STATS), dtype=torch.float64)
    check_tensors(tensors)
    groups = by_device(tensors)
    if len(groups) == 1:
        return op(tensors, *settings)
    home = tensors[0].device
    rows: list[Tensor] = [torch.empty(0)] * len(tensors)
    for members in groups.values():
        stats = op([tensors[i] for i in members], *settings).to(home, non_blocking=True)
        for i, row in zip(members, stats.unbind(), strict=True):
            rows[i] = row
    return torch.stack(rows)


def _write(op: Callable[..., None], tensors: list[Tensor], per_tensor: Tensor) -> None:
    if not tensors:
        return
    check_all_writable(tensors)
    # Picking rows by a list of indices would upload that list, and wait; unbinding does not.
    rows = per_tensor.unbind()
    for device, members in by_device(tensors).items():
        theirs = torch.stack([rows[i] for i in members])
        op([tensors[i] for i in members], theirs.to(device, non_blocking=True))
