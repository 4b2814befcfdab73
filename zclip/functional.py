"""Drop-in clipping: torch's own signatures and semantics, one read of memory, no wait."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from zclip import ops
from zclip.checks import Name, as_number, check_limit, check_tensors, check_writable
from zclip.layout import ERROR, INF, NAN, NONFINITE, PROPAGATE, SUMSQ, ZERO
from zclip.parallel import Reduction, find_reduction
from zclip.parallel.placement import has_dtensor, local_parts
from zclip.parameters import (
    Parameters,
    all_grads_of,
    as_list,
    device_of,
    each_once,
    grads_of,
    name_of_grad,
    names_of,
    tensors_of,
)
from zclip.reading import native, reader_of_thread
from zclip.reference import reported_norm
from zclip.schemas import norm_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BAD_SHOWN = 8  # bad tensors named in an error before "and N more"


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    nonfinite: str = "propagate",
    process_group: "ProcessGroup | None" = None,
    pipeline_group: "ProcessGroup | None" = None,
) -> Tensor:
    """Clip the gradients of ``parameters`` in place, as if they were one vector.

    Takes the place of :func:`torch.nn.utils.clip_grad_norm_`. Gradients are read once; they are
    written only if there is something to clip, otherwise they stay bitwise untouched. The norm is
    exact to 1e-6 for every dtype, bfloat16 included, and finite gradients whose norm overflows
    float32 are clipped like any others. Nothing waits for the device, except in mode "error".
    The same bits come out for any number of threads. A parameter that appears twice, or a
    gradient shared by two, counts once. Parameters may be DTensors, of several meshes and beside
    plain tensors: one all-reduce then adds up what the ranks hold, all of them have to call this,
    and all get the same norm, bit by bit.

    Args:
        parameters: one tensor, or any iterable of them; ``model.named_parameters()`` as well,
            whose names then appear in errors.
        max_norm: the norm to clip to, >= 0. ``inf`` only measures.
        norm_type: 2, any other positive power, or ``inf``.
        error_if_nonfinite: the same as ``nonfinite="error"``.
        foreach: accepted for compatibility; there is one implementation.
        nonfinite: what to do if a gradient holds NaN or Inf. "propagate", as torch: scale by the
            non-finite norm. "skip": make every gradient zero, so that the step does no harm.
            "zero": make the bad elements zero and clip the rest by the norm of the rest. "error":
            touch nothing and raise; this has to wait for the device.
        process_group: the ranks that hold other elements of the same plain tensors. Not for DDP,
            where all ranks hold the same gradients, nor for DTensors, which know their ranks.
        pipeline_group: ranks that hold other tensors, one of each pipeline stage.

    Returns:
        The norm before clipping, a 0-dim tensor on the device of the first gradient, float64 if a
        gradient is and float32 otherwise. Reading it waits; passing it on does not.

    Raises:
        RuntimeError: mode "error", and the norm is not finite; names the bad parameters.
        TypeError: an element is not a tensor, or its gradient is sparse, integer or complex.
        ValueError: ``max_norm``, ``norm_type`` or ``nonfinite`` is not one of the above.
    """
    max_norm = check_limit("max_norm", max_norm)
    norm_type = _check_norm_type(norm_type)
    mode = _check_mode(nonfinite, error_if_nonfinite)
    listed = as_list(parameters)
    if process_group is not None or pipeline_group is not None or has_dtensor(listed):
        params = tensors_of(listed)

        def names() -> list[str]:
            return names_of(listed)

        reduction = find_reduction(params, names, process_group, pipeline_group)
        assert reduction is not None
        parts = reduction.local_parts([p.grad for p in params])
        return _clip_across(reduction, parts, max_norm, norm_type, mode)
    grads, reading = all_grads_of(listed), 0
    if norm_type == 2.0 and not is_compiling():
        reading = native.read_to_write(reader_of_thread().number, grads, False)
    if not reading:  # one is missing, comes twice or lies elsewhere
        grads = each_once(grads)
    if not grads:
        return torch.zeros((), device=device_of(listed))

    def name(i: int) -> str:
        return name_of_grad(listed, grads[i])

    norm, stats = _clip(grads, max_norm, norm_type, mode, name, reading)
    if mode == ERROR:
        _raise_if_nonfinite(norm, stats, name, lambda i: f" {tuple(grads[i].shape)}")
    return norm


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of ``tensors`` as if they were one vector.

    Takes the place of :func:`torch.nn.utils.get_total_norm`; exactness, dtype, device and waiting
    are as for :func:`clip_grad_norm_`.

    Args:
        tensors: one tensor or any iterable of them, usually gradients.
        norm_type: 2, any other positive power, or ``inf``.
        error_if_nonfinite: raise if the norm is NaN or Inf; this has to wait for the device.
        foreach: accepted for compatibility; there is one implementation.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    norm_type = _check_norm_type(norm_type)
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not tensors:
        return torch.zeros(())
    name, parts = "tensors[{}]".format, tensors
    if has_dtensor(tensors):
        reduction = find_reduction(tensors, lambda: list(map(name, range(len(tensors)))))
        assert reduction is not None
        parts = reduction.local_parts(tensors)
        measured = _measure(parts, norm_type)
        stats = reduction.reduce(measured, is_max=math.isinf(norm_type)).stats
    else:
        stats = _measure(tensors, norm_type)
    norm = reported_norm(_as_one_row(stats, norm_type), PROPAGATE).to(norm_dtype(parts))
    if error_if_nonfinite:
        _raise_if_nonfinite(norm, stats, name, lambda i: f" {tuple(tensors[i].shape)}")
    return norm


@torch.no_grad()
def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Bound every element of the gradients to ``[-clip_value, clip_value]``, in place.

    Takes the place of :func:`torch.nn.utils.clip_grad_value_`, in one pass instead of two. A NaN
    stays a NaN. Nothing waits for the device.

    Args:
        parameters: as for :func:`clip_grad_norm_`.
        clip_value: the largest magnitude to leave, >= 0.
        foreach: accepted for compatibility; there is one implementation.
    """
    limit = check_limit("clip_value", clip_value)
    listed = as_list(parameters)
    grads = grads_of(listed)

    def name(i: int) -> str:
        return f"the gradient of {name_of_grad(listed, grads[i])}"

    # Element by element, so that no rank needs to know of another.
    parts = local_parts(grads, name) if has_dtensor(grads) else grads
    ops.clamp_(parts, limit, name)


def _clip(
    grads: list[Tensor], max_norm: float, norm_type: float, mode: int, name: Name, reading: int
) -> tuple[Tensor, Tensor]:
    """Return the norm and the stats, from one fused call where that is possible."""

    def gradient(i: int) -> str:
        return f"the gradient of {name(i)}"

    if norm_type == 2.0:
        clipped = ops.clip_by_global_norm_(grads, max_norm, mode, gradient, reading)
        if clipped is not None:
            return clipped[0], clipped[1]
    check_tensors(grads, gradient)
    check_writable(grads, gradient)
    stats = _measure(grads, norm_type)
    total = _as_one_row(stats, norm_type)
    coef = ops.global_norm_(stats.new_empty(0), total, max_norm, mode)
    if mode == ZERO:
        ops.zero_nonfinite_(grads, stats)
    ops.scale_(grads, coef.repeat(len(grads)))
    return reported_norm(total, mode).to(norm_dtype(grads)), stats


def _clip_across(
    reduction: Reduction, parts: list[Tensor], max_norm: float, norm_type: float, mode: int
) -> Tensor:
    """Clip what this rank holds by the norm of what all hold, and return that norm."""
    ours = _measure(parts, norm_type)
    whole = reduction.reduce(ours, is_max=math.isinf(norm_type)).stats
    total = _as_one_row(whole, norm_type)
    coef = ops.global_norm_(total.new_empty(0), total, max_norm, mode)
    if mode == ZERO:
        ops.zero_nonfinite_(parts, ours)
    ops.scale_(parts, coef.repeat(len(parts)))
    norm = reported_norm(total, mode).to(norm_dtype(parts))
    if mode == ERROR:
        _raise_if_nonfinite(norm, whole, reduction.names.__getitem__, lambda i: "")
    return norm


def _measure(tensors: list[Tensor], norm_type: float) -> Tensor:
    return ops.grad_stats(tensors) if norm_type == 2.0 else ops.power_stats(tensors, norm_type)


def _as_one_row(stats: Tensor, norm_type: float) -> Tensor:
    """Return the stats of one imaginary tensor with the norm and the flags of all together."""
    powers = stats[:, SUMSQ]
    norm = powers.amax() if math.isinf(norm_type) else powers.sum().pow(1.0 / norm_type)
    return torch.stack([norm.square(), stats[:, NAN].sum(), stats[:, INF].sum()]).unsqueeze(0)


def _raise_if_nonfinite(norm: Tensor, stats: Tensor, name: Name, shape: Name) -> None:
    if norm.isfinite():  # waits for the device
        return
    rows = stats.tolist()
    bad = [
        f"{name(i)}{shape(i)}: {row[NAN]:.0f} NaN, {row[INF]:.0f} Inf"
        for i, row in enumerate(rows)
        if row[NAN] or row[INF]
    ]
    shown = bad[:_BAD_SHOWN] + [f"and {len(bad) - _BAD_SHOWN} more"] * (len(bad) > _BAD_SHOWN)
    if not bad:
        largest = max(range(len(rows)), key=lambda i: rows[i][SUMSQ])
        shown = [f"every element is finite but the norm overflows; largest: {name(largest)}"]
    raise RuntimeError(
        "The total norm of the gradients is non-finite, so they cannot be clipped: "
        f"{'; '.join(shown)}. Nothing was changed. To go on anyway use nonfinite='skip', 'zero' "
        "or 'propagate'."
    )


def _check_norm_type(norm_type: float) -> float:
    norm_type = as_number("norm_type", norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type}")
    return norm_type


def _check_mode(nonfinite: str, error_if_nonfinite: bool) -> int:
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite: expected one of {', '.join(NONFINITE)}, got {nonfinite!r}")
    return ERROR if error_if_nonfinite else NONFINITE[nonfinite]
