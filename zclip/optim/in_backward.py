"""Optimizer-in-backward: each tensor is clipped and updated as soon as its gradient is final.

The gradient is freed at once, so that no more than one is alive at a time. That rules out every
clip rule that needs all gradients before the first update, but not AdaGC, which after its warm-up
judges each tensor by its own norm and its own past.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from zclip.clippers import AdaGC, Clipper, ClipResult
from zclip.clippers.result import merge_verdicts
from zclip.layout import (
    BAD_STATE,
    BAD_WEIGHT,
    FIRST_BAD,
    FOREIGN,
    FOREIGN_WRITE,
    NORM,
    NUM_STATS,
    NUM_TELEMETRY,
    SECOND_BAD,
    TAKEN,
    UPDATE_SUM_SQ,
    WEIGHT_BAD,
    WEIGHT_SUM_SQ,
)
from zclip.optim.fused import CLIP_KEY, FusedOptimizer
from zclip.optim.result import StepResult
from zclip.optimizer_proxy import OptimizerProxy
from zclip.parallel.placement import has_dtensor

Self = TypeVar("Self", bound="StepInBackward")


class StepInBackward(OptimizerProxy):
    """A fused optimizer whose updates happen inside ``backward``, one tensor at a time.

    Made by :func:`step_in_backward`. To schedulers and checkpoints it is the optimizer inside; call
    ``step`` once per iteration as ever. While AdaGC warms up, which takes the norm of all
    gradients, gradients stay and ``step`` updates; then every backward pass is an update, so that
    there is no gradient accumulation. Without skipped tensors the weights are those of the
    optimizer inside, bit by bit.

    A tensor with NaN or Inf in its gradient is skipped on the device, and nothing waits. Tensors
    that came before it in the same backward pass have been updated and stay so.

    Attributes:
        inner: the fused optimizer.
    """

    def __init__(self, inner: FusedOptimizer) -> None:
        super().__init__(inner)
        self.inner: FusedOptimizer = inner
        self._clipper = inner.clipper
        self._singles: dict[Tensor, _Single] | None = None  # None while AdaGC warms up
        self._results: dict[Tensor, StepResult] = {}
        self._last: dict[Tensor, StepResult] | None = None
        self._handles: dict[Tensor, Any] = {}
        self._is_finished = False
        self._watch()
        self._split_if_ready()

    @property
    def is_in_backward(self) -> bool:
        """Whether updates happen in backward: the warm-up is over."""
        return self._singles is not None

    @property
    def clips_in_backward(self) -> bool:
        """Whether there is a clipper, and its warm-up is over."""
        return self._clipper is not None and self.is_in_backward

    @property
    def result(self) -> StepResult | None:
        """The last step, made from those of its tensors when it is asked for; nothing waits.

        ``taken`` is 1 if all tensors with a gradient were updated, 0 if one was skipped; the clip
        result has the coefficient -1 for those that were.
        """
        if self._last is None:
            return self.inner.result
        return _joined(self.inner, self._last) if self._last else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | None = None) -> Any:
        """Finish the step: update what backward has left, and note what it found.

        Args:
            closure: computes the loss and the gradients; called once, first.
            loss: accepted as by all optimizers of ours; AdaGC does not look at it.

        Returns:
            What the closure returned, else None.
        """
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        if self._singles is None:
            with self.scaled_lr():
                self.inner.step(loss=loss)
            self._split_if_ready()
        elif not self._is_finished:
            self._close()
        self._is_finished = False
        return returned

    @torch.no_grad()
    def finish(self) -> ClipResult | None:
        """Do what :meth:`step` does after the warm-up; return what was found in the gradients.

        For wrappers, which call :meth:`step` as well: that does nothing more then.
        """
        self._close()
        self._is_finished = True
        result = self.result
        return None if result is None else result.clip

    def _close(self) -> None:
        left = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group, param in left:  # set by hand, or of a parameter that was frozen
            self._update(group, param)
        if left:
            self._watch()
        self._last, self._results = self._results, {}

    def detach(self) -> FusedOptimizer:
        """Take all hooks off the parameters; return the optimizer inside, which can go on."""
        self._join_clip_state()
        for param, handle in self._handles.items():
            handle.remove()
            if not param._post_accumulate_grad_hooks:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._handles, self._singles = {}, None
        return self.inner

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside. New tensors of AdaGC start without a past."""
        self._join_clip_state()
        self.inner.add_param_group(param_group)
        if self._clipper is not None:
            self._clipper.bind(self.param_groups)
        self._watch()
        self._split_if_ready()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, that of AdaGC under "zclip"."""
        self._join_clip_state()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict`, or that of the optimizer inside, returned."""
        self.inner.load_state_dict(state_dict)
        if state_dict.get(CLIP_KEY) is None:
            self._join_clip_state()
        self._singles, self._last, self._results = None, None, {}
        self._split_if_ready()

    def _watch(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and param not in self._handles:
                    hook = partial(self._became_final, group)
                    self._handles[param] = param.register_post_accumulate_grad_hook(hook)

    def _became_final(self, group: Mapping[str, Any], param: Tensor) -> None:
        if self._singles is not None:
            self._update(group, param)

    def _update(self, group: Mapping[str, Any], param: Tensor) -> None:
        single = self._singles[param]  # type: ignore[index]
        result = single.step(group, self.lr_scale)
        param.grad = None
        if result is not None:
            self._results[param] = result

    def _split_if_ready(self) -> None:
        """Give every tensor its own optimizer and clipper, once none needs all gradients."""
        clipper = self._clipper
        learned = None
        if isinstance(clipper, AdaGC):
            if clipper.warmup_steps and clipper.steps_accepted() < clipper.warmup_steps:
                return
            learned = clipper.state_dict()["groups"][0]
        singles, number = {}, 0
        for group in self.param_groups:
            for param in group["params"]:
                singles[param] = _Single(self.inner, param, number, learned)
                number += 1
        self._singles = singles

    def _join_clip_state(self) -> None:
        """Bring what the clippers of single tensors have learned into the one of all."""
        if self._singles is None or self._clipper is None:
            return
        own = [single.learned() for single in self._singles.values()]
        state = self._clipper.state_dict()
        joined = state["groups"][0]
        for count in ("steps", "clips", "skips"):
            joined[count] = torch.stack([each[count] for each in own]).amax()
        joined["gamma"] = torch.cat([each["gamma"] for each in own])
        self._clipper.load_state_dict(state)


class _Single:
    """One parameter, with an optimizer and a clipper of its own that share the state of the whole.

    The optimizer is made with the first gradient, as state is: a parameter may never get one.
    """

    def __init__(
        self,
        whole: FusedOptimizer,
        param: Tensor,
        number: int,
        learned: Mapping[str, Any] | None,
    ) -> None:
        self._whole, self._param, self._number = whole, param, number
        self._optimizer: FusedOptimizer | None = None
        self._clipper: AdaGC | None = None
        if learned is not None and isinstance(whole.clipper, AdaGC):
            self._clipper = whole.clipper.for_one_tensor(learned, number)

    def step(self, group: Mapping[str, Any], lr_scale: float) -> StepResult | None:
        """Clip and update; the gradient is still there afterwards."""
        optimizer = self._optimizer
        if optimizer is None:
            optimizer = self._optimizer = self._whole.for_one_tensor(
                group, self._param, self._number, self._clipper
            )
        own = optimizer.param_groups[0]
        own.update((key, value) for key, value in group.items() if key not in _OF_PARAMS)
        optimizer.lr_scale = lr_scale
        optimizer.step()
        return optimizer.result

    def learned(self) -> Mapping[str, Any]:
        """Return what the clipper knows about this tensor."""
        assert self._clipper is not None
        groups: list[Mapping[str, Any]] = self._clipper.state_dict()["groups"]
        return groups[0]


_OF_PARAMS = ("params", "param_names")


def step_in_backward(
    model: Module | Iterable[tuple[str, Tensor]],
    optimizer: type[FusedOptimizer],
    clipper: Clipper | None = None,
    **settings: Any,
) -> StepInBackward:
    """Return an optimizer that clips and updates each tensor inside ``backward``.

    The gradient of a tensor is freed as soon as it was used, so that gradients take the memory of
    the largest one instead of all. ``docs/during-backward.md`` says what is given up for that.

    Args:
        model: the model, or its ``named_parameters()``, on one process.
        optimizer: AdamW, Adam, SGD or Lion of :mod:`zclip.optim`.
        clipper: an :class:`zclip.AdaGC`; None does not clip. Its warm-up needs all gradients, so
            memory is saved after it: at once with ``warmup_steps=0`` or a state that was loaded.
        settings: of the optimizer.

    Raises:
        TypeError: the optimizer is none of ours.
        ValueError: the clipper needs all gradients before the first update; or gradients are not
            final in backward, because there are other ranks.

    Example:
        >>> clipper = zclip.AdaGC(warmup_steps=0)
        >>> optimizer = zclip.optim.step_in_backward(model, zclip.optim.AdamW, clipper, lr=3e-4)
        >>> loss.backward()  # clips, updates and frees
        >>> optimizer.step()  # notes that the step is over
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, FusedOptimizer)):
        raise TypeError(
            "optimizer: expected a class, AdamW, Adam, SGD or Lion of zclip.optim, got "
            f"{optimizer!r}"
        )
    if clipper is not None and (not isinstance(clipper, AdaGC) or clipper.per_group):
        raise ValueError(
            "clipper: expected AdaGC without per_group, or None, because other rules need the "
            f"norm of all gradients before the first update, got {type(clipper).__name__}"
        )
    named = list(model.named_parameters()) if isinstance(model, Module) else list(model)
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_ranks or has_dtensor([param for _, param in named]):
        raise ValueError(
            "step_in_backward: expected one process, got several ranks, whose gradients are not "
            "final when backward has accumulated them; use zclip.wrap"
        )
    return StepInBackward(optimizer(named, clipper=clipper, **settings))


def _joined(whole: FusedOptimizer, found: Mapping[Tensor, StepResult]) -> StepResult:
    """Return one result for tensors that were updated one by one."""
    params = [param for group in whole.param_groups for param in group["params"]]
    device = next(iter(found.values())).summary.device
    nothing = torch.zeros(1, NUM_TELEMETRY, dtype=torch.float64, device=device)
    each = [found.get(param) for param in params]
    table = torch.cat([nothing if r is None or not len(r.rows) else r.rows for r in each])
    bad = table[:, FIRST_BAD] + table[:, SECOND_BAD] > 0
    foreign = table[:, FOREIGN] > 0
    flags = BAD_WEIGHT * (table[:, WEIGHT_BAD] > 0).any() + BAD_STATE * bad.any()
    flags = flags + FOREIGN_WRITE * foreign.any()
    summary = torch.stack(
        [
            torch.stack([r.summary[TAKEN] for r in found.values()]).amin(),
            flags,
            _first(bad | (table[:, WEIGHT_BAD] > 0)),
            _first(foreign),
            table[:, WEIGHT_SUM_SQ].sum().sqrt(),
            table[:, UPDATE_SUM_SQ].sum().sqrt(),
        ]
    ).float()
    clips = [None if r is None else r.clip for r in each]
    clip = None
    if whole.clipper is not None:
        stats = torch.cat([nothing[:, :NUM_STATS] if c is None else c.stats for c in clips])
        coefs = torch.cat([nothing.new_ones(1) if c is None else c.coefs for c in clips])
        verdict = merge_verdicts([c.verdict for c in clips if c is not None], stats)
        clip = ClipResult(verdict[NORM].clone(), stats, coefs, verdict)
    rows = table if whole.telemetry else table[:0]
    return StepResult(rows, summary, clip, whole.names)


def _first(is_so: Tensor) -> Tensor:
    """Return the index of the first True, -1 if there is none."""
    return torch.where(is_so.any(), is_so.to(torch.uint8).argmax(), -1)
