"""Public operators over lists of tensors. Thin: call; if rejected, report what was wrong.

Lists whose tensors live on several devices are split here, so that each kernel sees one device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zclip.checks import PLACE, Name, check_tensors, check_writable
from zclip.layout import NUM_STATS
from zclip.reference import IDS
from zclip.schemas import wide_dtype  # declares torch.ops.zclip

_GLOBAL_NORM = IDS["global_norm"]


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
    return _measure(torch.ops.zclip.grad_stats.default, list(tensors))


def power_stats(tensors: Sequence[Tensor], p: float) -> Tensor:
    """As :func:`grad_stats`, with the sum of ``|x|**p`` in the first column; the max if inf."""
    return _measure(torch.ops.zclip.power_stats.default, list(tensors), p)


def scale_(tensors: Sequence[Tensor], coefs: Tensor) -> None:
    """Multiply each tensor by its coefficient, in place.

    A coefficient of exactly 1 leaves its tensor bitwise untouched and unread; one of exactly -1
    (:data:`zclip.layout.REFUSE`) writes zeros, also over NaN and Inf.

    Args:
        tensors: as for :func:`grad_stats`.
        coefs: float64, one per tensor.

    Raises:
        ValueError: there are not as many coefficients as tensors.
    """
    tensors = list(tensors)
    if coefs.shape != (len(tensors),):
        raise ValueError(
            f"coefs: expected one per tensor: ({len(tensors)},), got shape {tuple(coefs.shape)}"
        )
    _write_by_row(torch.ops.zclip.scale_.default, tensors, coefs)


def zero_nonfinite_(tensors: Sequence[Tensor], stats: Tensor) -> None:
    """Replace NaN and Inf by zero in the tensors that ``stats`` says have any."""
    _write_by_row(torch.ops.zclip.zero_nonfinite_.default, list(tensors), stats)


def clamp_(tensors: Sequence[Tensor], limit: float, name: Name = PLACE) -> None:
    """Bound every element to ``[-limit, limit]``, in place, in one read and one write."""
    tensors = list(tensors)
    if tensors and serve(torch.ops.zclip.clamp_.default, tensors, limit, name=name) is None:
        for members in by_device(tensors).values():
            torch.ops.zclip.clamp_([tensors[i] for i in members], limit)


def clip_by_global_norm_(
    grads: list[Tensor], max_norm: float, nonfinite: int, name: Name = PLACE, reading: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Measure, choose one coefficient and scale, in one call; see :mod:`zclip.schemas`.

    Args:
        grads: what to clip.
        max_norm: the norm to clip to.
        nonfinite: a mode of :mod:`zclip.layout`.
        name: of an element, for errors.
        reading: of the same gradients, if a :class:`zclip.reading.Reader` could read them.

    Returns:
        norm, stats, coefs and verdict; None if the gradients live on several devices.
    """
    device = grads[0].device
    no_counters = torch.empty(0, dtype=wide_dtype(device), device=device)
    op, settings = torch.ops.zclip.clip_by_.default, (max_norm, nonfinite)
    if reading:
        clipped: tuple[Tensor, Tensor, Tensor, Tensor]
        clipped = torch.ops.zclip.clip_read_.default(reading, no_counters, _GLOBAL_NORM, settings)
        return clipped
    served = serve(op, grads, no_counters, _GLOBAL_NORM, settings, name=name)
    return served[0] if served else None


def global_norm_(state: Tensor, stats: Tensor, max_norm: float, nonfinite: int) -> Tensor:
    """Return the coefficients of clipping by one global norm, from stats."""
    coefs: Tensor
    coefs, _ = torch.ops.zclip.rule_(state, stats, _GLOBAL_NORM, (max_norm, nonfinite))
    return coefs


def serve(
    op: Callable[..., Any], tensors: list[Tensor], *arguments: Any, name: Name = PLACE
) -> tuple[Any] | None:
    """Return ``(op(tensors, *arguments),)``; None if the tensors live on several devices.

    Optimistic: kernels check while they read, before they write. Only a list that one of them
    rejected is walked in Python, to raise the error that names the culprit.
    """
    try:
        return (op(tensors, *arguments),)
    except (RuntimeError, TypeError, ValueError):
        check_tensors(tensors, name)
        schema = getattr(op, "_schema", None)  # none: a rule in Python, which writes
        if schema is None or schema.is_mutable:
            check_writable(tensors, name)
        if len(by_device(tensors)) == 1:
            raise
    return None


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return the indices of the tensors on each device, in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return groups


def _measure(op: Callable[..., Tensor], tensors: list[Tensor], *settings: float) -> Tensor:
    if not tensors:
        return torch.empty((0, NUM_STATS), dtype=torch.float64)
    served = serve(op, tensors, *settings)
    if served:
        stats: Tensor = served[0]
        return stats
    rows: list[Tensor] = [torch.empty(0)] * len(tensors)
    for members in by_device(tensors).values():
        stats = op([tensors[i] for i in members], *settings)
        stats = stats.to(tensors[0].device, non_blocking=True)
        for i, row in zip(members, stats.unbind(), strict=True):
            rows[i] = row
    return torch.stack(rows)


def _write_by_row(op: Callable[..., None], tensors: list[Tensor], per_tensor: Tensor) -> None:
    if not tensors or serve(op, tensors, per_tensor):
        return
    # Picking rows by a list of indices would upload that list, and wait; unbinding does not.
    rows = per_tensor.unbind()
    for device, members in by_device(tensors).items():
        theirs = torch.stack([rows[i] for i in members])
        op([tensors[i] for i in members], theirs.to(device, non_blocking=True))
