"""One update of Adam, SGD or Lion in plain torch, with its telemetry.

Every line has the order of operations of ``csrc/math/optim.h``, so that on the CPU parameters and
state have the same bits. A skipped step is chosen by ``where``: nothing waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zclip.layout import (
    ADAM,
    AMSGRAD,
    BAD_STATE,
    BAD_WEIGHT,
    BETA1,
    BETA2,
    BLOCKED,
    DECOUPLED,
    DROP_NON_FINITE,
    EPS,
    FLAGS,
    FOREIGN,
    FOREIGN_WRITE,
    IS_KNOWN,
    LION,
    LR,
    MAXIMIZE,
    NESTEROV,
    NUM_OPTIM_SETTINGS,
    NUM_TELEMETRY,
    OPTIM_FLAGS,
    REFUSE,
    SECOND_BAD,
    SGD,
    STOCHASTIC,
    UPDATE_SUM_SQ,
    UPDATES,
    WEIGHT_BAD,
    WEIGHT_DECAY,
    WEIGHT_SUM_SQ,
)
from zclip.schemas import wide_dtype
from zclip.schemas.optim import empty_updated

_WORD = 0xFFFFFFFF


class _Tensors(NamedTuple):
    """What one update reads and writes; None for what a parameter does not have."""

    param: Tensor
    grad: Tensor
    first: Tensor | None
    second: Tensor | None
    maximum: Tensor | None
    step: Tensor | None


def optim_update_(
    params: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    maxima: list[Tensor],
    steps: list[Tensor],
    ledger: Tensor,
    coefs: Tensor,
    blocked: Tensor,
    grad_scale: Tensor,
    rates: Tensor,
    algorithm: int,
    sizes: list[int],
    settings: list[float],
    seed: int,
    telemetry: bool,
    skip_flags: int,
) -> tuple[Tensor, Tensor]:
    """Update every parameter and its state in place, unless ``blocked``; see :mod:`zclip.layout`.

    Args:
        params: float32, bfloat16, float16 or float64, dense.
        grads: with the shapes of the parameters, or empty for those that have none and are left
            alone; scaled by ``coefs`` as they are read.
        firsts: first moments or momentum, float32 (float64 for float64 parameters).
        seconds: second moments.
        maxima: largest second moments, for AMSGrad.
        steps: updates taken so far, one number each.
        ledger: int64 [N, 5]; what the last update stored.
        coefs: float64 [N] or empty; as a clip rule returns them.
        blocked: one number, not 0 if the step must be skipped; or a verdict; or empty.
        grad_scale: one number that the gradients are divided by; or empty.
        rates: float64 [G], learning rates that live on the device; or empty.
        algorithm: ADAM, SGD or LION.
        sizes: how many parameters each group has.
        settings: six numbers for each group.
        seed: of stochastic rounding.
        telemetry: whether to fill rows, and to compare with the ledger.
        skip_flags: if ``blocked`` is a verdict, any of these flags in it skips the step too.

    Returns:
        Rows, float64 [N, 6] (or [0, 6] without telemetry), and summary, float32 [6].
    """
    device = ledger.device
    wide = wide_dtype(device)
    skipped = torch.zeros((), dtype=torch.bool, device=device)
    if blocked.numel():
        skipped = blocked.reshape(-1)[BLOCKED] != 0
    if blocked.numel() > 1:
        skipped = skipped | ((blocked[FLAGS].int() & skip_flags) != 0)
    inverse = grad_scale.reshape(()).to(wide).reciprocal() if grad_scale.numel() else None
    rows = []
    i = 0
    for group, size in enumerate(sizes):
        own = settings[group * NUM_OPTIM_SETTINGS : (group + 1) * NUM_OPTIM_SETTINGS]
        lr = rates[group] if rates.numel() else torch.full((), own[LR], dtype=wide, device=device)
        for _ in range(size):
            if grads[i].numel() == 0 and params[i].numel():  # there is none in this step
                rows.append(torch.zeros(NUM_TELEMETRY, dtype=wide, device=device))
                i += 1
                continue
            first, second, maximum = (
                _entry(entries, i, params[i]) for entries in (firsts, seconds, maxima)
            )
            step = steps[i] if steps and steps[i].numel() else None
            tensors = _Tensors(params[i], grads[i], first, second, maximum, step)
            coef = coefs[i] if coefs.numel() else torch.ones((), dtype=wide, device=device)
            if inverse is not None:
                coef = torch.where(coef == REFUSE, coef, coef * inverse)
            rows.append(
                _update(tensors, ledger[i], coef, lr, own, algorithm, seed, i, telemetry, skipped)
            )
            i += 1
    if not telemetry or not rows:
        telemetry_rows, summary = empty_updated(ledger, 0)
        return telemetry_rows, _summary(telemetry_rows, summary, skipped)
    telemetry_rows = torch.stack(rows)
    return telemetry_rows, _summary(telemetry_rows, empty_updated(ledger, 0)[1], skipped)


def _entry(entries: list[Tensor], i: int, param: Tensor) -> Tensor | None:
    """Return an entry of the state; None if the parameter does not have it."""
    return entries[i] if entries and entries[i].numel() == param.numel() else None


def _update(
    tensors: _Tensors,
    ledger: Tensor,
    coef: Tensor,
    lr: Tensor,
    settings: list[float],
    algorithm: int,
    seed: int,
    index: int,
    telemetry: bool,
    skipped: Tensor,
) -> Tensor:
    flags = int(settings[OPTIM_FLAGS])
    param, grad, first, second, maximum, step = tensors
    value = torch.float64 if param.dtype == torch.float64 else torch.float32
    p = param.to(value)
    g = _scaled(grad, coef, flags, value)
    if settings[WEIGHT_DECAY] and not flags & DECOUPLED:
        g = g + settings[WEIGHT_DECAY] * p
    updates = (ledger[UPDATES] if step is None else step.reshape(())).to(lr.dtype)
    decay = (lr * settings[WEIGHT_DECAY] if flags & DECOUPLED else lr * 0).to(value)
    m, v, largest = first, second, maximum
    if algorithm == ADAM:
        assert m is not None
        assert v is not None
        rate = (lr / (1 - settings[BETA1] ** (updates + 1))).to(value)
        root = (1 / (1 - settings[BETA2] ** (updates + 1)).sqrt()).to(value)
        m = m + (g - m) * (1 - settings[BETA1])
        gap = g * g - v
        gap = torch.where(gap == -torch.inf, torch.finfo(value).min, gap)  # an infinite v stays
        v = v + gap * (1 - settings[BETA2])
        if flags & AMSGRAD:
            assert largest is not None
            largest = torch.maximum(largest, v)
        denominator = (largest if flags & AMSGRAD and largest is not None else v).sqrt() * root
        update = decay * p + rate * m / (denominator + settings[EPS])
    elif algorithm == SGD:
        direction = g
        if m is not None:
            begun = (updates > 0).to(lr.dtype)
            keep, give = (
                (begun * settings[BETA1]).to(value),
                (1 - begun * settings[BETA2]).to(value),
            )
            m = keep * m + give * g
            direction = g + settings[BETA1] * m if flags & NESTEROV else m
        update = decay * p + lr.to(value) * direction
    elif algorithm == LION:
        assert m is not None
        update = decay * p + lr.to(value) * (m + (g - m) * (1 - settings[BETA1])).sign()
        m = m + (g - m) * (1 - settings[BETA2])
    else:
        raise ValueError(f"algorithm: expected {ADAM}, {SGD} or {LION}, got {algorithm}")
    p = p - update
    if flags & STOCHASTIC and param.dtype == torch.bfloat16:
        result = _rounded_stochastically(p, _key(seed, updates, index), param)
    else:
        result = p.to(param.dtype)
    loaded = [_pattern(t, ledger) for t in (param, first, second)]
    for old, new in ((param, result), (first, m), (second, v), (maximum, largest)):
        if old is not None and new is not None:
            old.copy_(torch.where(skipped, old, new))
    if step is not None:
        step += (~skipped).to(step.dtype)
    row = _row(tensors, update, ledger, loaded, skipped)
    stored = [
        *(_pattern(t, ledger) for t in (param, first, second)),
        torch.ones_like(ledger[IS_KNOWN]),
    ]
    stored = [s * (1 if telemetry else 0) for s in stored]
    after = torch.stack([*stored, ledger[UPDATES] + 1])
    ledger.copy_(torch.where(skipped, ledger, after))
    return row


def _scaled(grad: Tensor, coef: Tensor, flags: int, value: torch.dtype) -> Tensor:
    sign = -1.0 if flags & MAXIMIZE else 1.0
    is_tiny = (coef.abs() < torch.finfo(torch.float32).tiny) & (coef != 0)
    g = grad.to(value) * (coef * sign).to(value)
    g = torch.where(is_tiny, (grad.to(coef.dtype) * (coef * sign)).to(value), g)
    g = torch.where(coef == REFUSE, torch.zeros_like(g), g)
    return torch.where(grad.isfinite(), g, 0) if flags & DROP_NON_FINITE else g


def _pattern(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return the sum of the rotated bits, modulo 2^32; modulo 2^64 for float64."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64, device=like.device)
    if tensor.dtype == torch.float64:
        bits = tensor.view(torch.int64)
        return ((bits << 12) | (bits >> 52 & 0xFFF)).sum()
    if tensor.dtype == torch.float32:
        bits, mantissa = tensor.view(torch.int32).to(torch.int64) & _WORD, 23
    else:
        bits = tensor.view(torch.int16).to(torch.int64) & 0xFFFF
        mantissa = 7 if tensor.dtype == torch.bfloat16 else 10
    return ((bits << (32 - mantissa)) | (bits >> mantissa)).sum() & _WORD


def _row(
    tensors: _Tensors, update: Tensor, ledger: Tensor, loaded: list[Tensor], skipped: Tensor
) -> Tensor:
    wide = wide_dtype(ledger.device)

    def sumsq(tensor: Tensor) -> Tensor:
        return torch.where(tensor.isfinite(), tensor, 0).to(wide).square().sum()

    def bad(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros((), dtype=wide, device=ledger.device)
        return (~tensor.isfinite()).sum().to(wide)

    foreign = sum((was != ledger[k]).to(wide) * (1 << k) for k, was in enumerate(loaded))
    row = torch.stack(
        [
            sumsq(tensors.param),
            sumsq(update),
            bad(tensors.param),
            bad(tensors.first),
            bad(tensors.second),
            torch.where(ledger[IS_KNOWN] != 0, foreign, 0.0).to(wide),
        ]
    )
    return torch.where(skipped, torch.zeros_like(row), row)


def _summary(rows: Tensor, like: Tensor, skipped: Tensor) -> Tensor:
    def first(found: Tensor) -> Tensor:
        if not len(found):
            return torch.full((), -1.0, device=found.device)
        return torch.where(found.any(), found.to(torch.uint8).argmax(), -1)

    bad_weight = rows[:, WEIGHT_BAD] > 0
    bad_state = rows[:, WEIGHT_BAD + 1 : SECOND_BAD + 1].sum(dim=1) > 0
    foreign = rows[:, FOREIGN] > 0
    flags = (
        bad_weight.any() * BAD_WEIGHT + bad_state.any() * BAD_STATE + foreign.any() * FOREIGN_WRITE
    )
    columns = [
        ~skipped,
        flags,
        first(bad_weight | bad_state),
        first(foreign),
        rows[:, WEIGHT_SUM_SQ].sum().sqrt(),
        rows[:, UPDATE_SUM_SQ].sum().sqrt(),
    ]
    return torch.stack([column.to(like.dtype) for column in columns])


def _mix(key: Tensor, element: Tensor) -> Tensor:
    x = (element ^ key) & _WORD
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _key(seed: int, updates: Tensor, index: int) -> Tensor:
    low, high, place = (
        torch.full((), number, dtype=torch.int64, device=updates.device)
        for number in (seed & _WORD, (seed >> 32) & _WORD, index)
    )
    return _mix(_mix(_mix(low, high), updates.to(torch.int64)), place)


def _rounded_stochastically(p: Tensor, key: Tensor, like: Tensor) -> Tensor:
    # Elements are numbered in the order of memory, in which other backends walk them.
    places = torch.arange(p.numel(), device=p.device).as_strided(like.shape, like.stride())
    random = _mix(key, places) & 0xFFFF
    bits = p.view(torch.int32).to(torch.int64) & _WORD
    cut = ((bits + random) >> 16) << 16
    rounded = torch.where(cut > 0x7FFFFFFF, cut - (1 << 32), cut).to(torch.int32)
    return torch.where(p.isfinite(), rounded.view(torch.float32), p).to(torch.bfloat16)
