"""ZClip, with the constructor, attributes and helpers of the published package."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from zclip import ops
from zclip.checks import PLACE, check_count, check_fraction, check_limit
from zclip.clippers.clipper import Clipper
from zclip.clippers.result import ClipResult
from zclip.layout import (
    BUFFER_COLUMN,
    MEAN_COLUMN,
    ON_NONFINITE,
    SEEN_COLUMN,
    SUMSQ,
    VAR_COLUMN,
    ZCLIP_MODES,
)
from zclip.parallel.placement import has_dtensor, local_parts
from zclip.schemas import wide_dtype
from zclip.targets import Targets

NORM_EPS = 1e-6  # added to the norm before dividing, as torch and the published package do


class ClipOptionError(ValueError, AssertionError):
    """A bad ``clip_option``: the published package asserts it, everyone else expects ValueError."""


class ZClip(Clipper):
    """Adaptive clipping by the z-score of the global norm (arXiv 2504.02507).

    After ``warmup_steps`` steps, a norm more than ``z_thresh`` deviations above the running mean is
    clipped to a threshold near that mean. Takes the place of the published package, without its
    wait in every step; its arguments, attributes and errors are the same. ``mean``, ``var``,
    ``initialized`` and ``buffer`` may be read and set, which waits for the device; with
    ``per_group`` reading gives a list with one entry per group.

    Args:
        alpha: weight of the past in mean and variance.
        z_thresh: how many deviations above the mean are an outlier.
        max_grad_norm: a fixed limit besides, also during warm-up; None for none. A parameter group
            may override it under the same key if ``per_group`` is set. Note that the published
            default of 1.0 usually clips more than the z-score does.
        eps: added to the deviation before dividing by it.
        warmup_steps: how many raw norms mean and variance start from.
        mode: "zscore" or "percentile"; the latter clips to ``mean + z_thresh * std``.
        clip_option: in mode "zscore", "adaptive_scaling" clips the harder the larger the outlier,
            "mean" clips to the mean.
        clip_factor: multiplies the threshold of "adaptive_scaling", its mean included.
        skip_update_on_spike: keep outliers out of mean and variance altogether.
        on_nonfinite: "skip" skips a step with NaN or Inf and keeps it out of the statistics;
            "official" lets it poison them, as the published package does.
        skip_step_on_spike: skip outliers instead of clipping them.
        per_group: separate statistics for every parameter group.
    """

    rule: ClassVar[str] = "zclip"
    fields: ClassVar[Mapping[str, int | slice]] = {
        "mean": MEAN_COLUMN,
        "var": VAR_COLUMN,
        "seen": SEEN_COLUMN,
        "buffer": slice(BUFFER_COLUMN, None),
    }
    limit_key: ClassVar[str | None] = "max_grad_norm"
    replaceable: ClassVar[str] = "_compute_grad_norm"

    def __init__(
        self,
        alpha: float = 0.97,
        z_thresh: float = 2.5,
        max_grad_norm: float | None = 1.0,
        eps: float = 1e-6,
        warmup_steps: int = 25,
        mode: str = "zscore",
        clip_option: str | None = "adaptive_scaling",
        clip_factor: float = 1.0,
        skip_update_on_spike: bool = False,
        *,
        on_nonfinite: str = "skip",
        skip_step_on_spike: bool = False,
        per_group: bool = False,
    ) -> None:
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        self.alpha = check_fraction("alpha", alpha)
        self.z_thresh = check_limit("z_thresh", z_thresh)
        self.max_grad_norm = max_grad_norm
        if max_grad_norm is not None:
            self.max_grad_norm = check_limit("max_grad_norm", max_grad_norm)
        self.eps = check_limit("eps", eps)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, least=0)
        self.mode = mode.lower()
        self.clip_option: str | None = None  # it means nothing in mode "percentile"
        self.clip_factor = check_limit("clip_factor", clip_factor)
        self.skip_update_on_spike = skip_update_on_spike
        self.skip_step_on_spike = skip_step_on_spike
        if self.mode not in ("zscore", "percentile"):
            raise ValueError("mode must be either 'zscore' or 'percentile'.")
        if self.mode == "zscore":
            if clip_option not in ("mean", "adaptive_scaling"):
                raise ClipOptionError(
                    "For zscore mode, clip_option must be either 'mean' or 'adaptive_scaling'."
                )
            self.clip_option = clip_option

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        limit = self.max_grad_norm
        if self.per_group:
            limit = group.get("max_grad_norm", limit)
        return (
            self.alpha,
            self.z_thresh,
            math.inf if limit is None else float(limit),
            self.eps,
            self.warmup_steps,
            ZCLIP_MODES[self.clip_option or self.mode],
            self.clip_factor,
            self.skip_update_on_spike,
            self.skip_step_on_spike,
            ON_NONFINITE[self.on_nonfinite],
        )

    def state_size(self, num_tensors: int) -> int:
        return BUFFER_COLUMN + max(1, self.warmup_steps)

    def size_hint(self) -> str:
        return f"warmup_steps is {self.warmup_steps}"

    def adapt_state(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Once warm-up is over its buffer means nothing, so its length may differ."""
        length = max(1, self.warmup_steps)
        if len(saved["buffer"]) == length or saved["seen"] < len(saved["buffer"]):
            return saved
        return {**saved, "buffer": torch.zeros(length), "seen": torch.tensor(float(length))}

    def _read(self, column: int) -> list[float]:
        return [float(state[column]) for state in self._state.states]

    def _write(self, column: int, value: float) -> None:
        for state in self._state.ensure():
            state[column] = value

    @property
    def initialized(self) -> Any:
        """Whether warm-up is over."""
        return _one_or_all([seen >= max(1, self.warmup_steps) for seen in self._read(SEEN_COLUMN)])

    @initialized.setter
    def initialized(self, value: bool) -> None:
        self._write(SEEN_COLUMN, max(1, self.warmup_steps) if value else 0)

    @property
    def mean(self) -> Any:
        """The running mean of the norm; None during warm-up."""
        return self._statistic(MEAN_COLUMN)

    @mean.setter
    def mean(self, value: float | None) -> None:
        self._write(MEAN_COLUMN, 0.0 if value is None else value)

    @property
    def var(self) -> Any:
        """The running variance of the norm; None during warm-up."""
        return self._statistic(VAR_COLUMN)

    @var.setter
    def var(self, value: float | None) -> None:
        self._write(VAR_COLUMN, 0.0 if value is None else value)

    @property
    def buffer(self) -> Any:
        """The norms of the warm-up so far; empty once it is over."""
        buffers = []
        for state in self._state.states:
            seen = int(state[SEEN_COLUMN])
            over = seen >= max(1, self.warmup_steps)
            buffers.append([] if over else state[BUFFER_COLUMN : BUFFER_COLUMN + seen].tolist())
        return _one_or_all(buffers, nothing=[])

    @buffer.setter
    def buffer(self, value: Iterable[float]) -> None:
        norms = torch.tensor(list(value), dtype=torch.float64)
        if len(norms) >= max(1, self.warmup_steps):
            raise ValueError(f"buffer: expected fewer norms than warmup_steps, got {len(norms)}")
        for state in self._state.ensure():
            state[BUFFER_COLUMN : BUFFER_COLUMN + len(norms)] = norms
            state[SEEN_COLUMN] = len(norms)

    def _statistic(self, column: int) -> Any:
        done = [seen >= max(1, self.warmup_steps) for seen in self._read(SEEN_COLUMN)]
        values = zip(done, self._read(column), strict=True)
        return _one_or_all([value if ready else None for ready, value in values], nothing=None)

    def _clip_at_once(
        self, found: Targets, grads: list[Tensor], loss: Tensor | None
    ) -> ClipResult | None:
        """As for every clipper, unless someone has put a norm of their own in place of ours."""
        replaced = self.__dict__.get(self.replaceable)
        if replaced is None or getattr(replaced, "__func__", None) is ZClip._compute_grad_norm:
            return super()._clip_at_once(found, grads, loss)
        norm = float(replaced(found.params))
        state = self._state.states[0]
        stats = state.new_zeros(1, 3)
        stats[0, SUMSQ] = norm**2
        coef, verdict = self.judge(state, stats, found.settings[0])
        coefs = coef.repeat(len(grads))
        ops.scale_(grads, coefs)
        return ClipResult(state.new_tensor(norm), stats.expand(len(grads), 3), coefs, verdict)

    def _compute_grad_norm(self, model: Module) -> float:
        """Return the norm as a number, which waits; :meth:`step` does not come this way."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return math.sqrt(float(ops.grad_stats(grads)[:, SUMSQ].sum())) if grads else 0.0

    def _compute_clip_val(self, grad_norm: float) -> float | None:
        """Return the threshold for a norm, None if it is no outlier; this waits."""
        std = math.sqrt(self.var)
        if self.mode == "percentile":
            threshold = self.mean + self.z_thresh * std
            return threshold if grad_norm > threshold else None
        z = (grad_norm - self.mean) / (std + self.eps)
        if z <= self.z_thresh:
            return None
        if self.clip_option == "mean":
            return float(self.mean)
        return float(self.mean + self.z_thresh * std / (z / self.z_thresh)) * self.clip_factor

    def apply_in_place_clipping(
        self, pl_module: Module, global_norm: float | Tensor, max_global_norm: float | Tensor
    ) -> None:
        """As the function of the same name."""
        apply_in_place_clipping(pl_module, global_norm, max_global_norm)


@torch.no_grad()
def apply_in_place_clipping(
    pl_module: Module, global_norm: float | Tensor, max_global_norm: float | Tensor
) -> None:
    """Scale the gradients of a module as if their norm were ``global_norm``.

    Args:
        pl_module: whose gradients are scaled, in place.
        global_norm: their norm; as a tensor it stays on the device and nothing waits.
        max_global_norm: the norm to scale to, if that is smaller.
    """
    grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
    if not grads:
        return
    if has_dtensor(grads):
        grads = local_parts(grads, PLACE)
    device = grads[0].device
    if not isinstance(global_norm, Tensor):
        global_norm = torch.full((), global_norm, device=device)
    norm = global_norm.to(device, wide_dtype(device), non_blocking=True)
    coef = torch.where(norm > max_global_norm, max_global_norm / (norm + NORM_EPS), 1.0)
    ops.scale_(grads, coef.clamp(max=1.0).to(norm.dtype).repeat(len(grads)))


def _one_or_all(values: list[Any], nothing: Any = False) -> Any:
    if not values:
        return nothing
    return values[0] if len(values) == 1 else values
