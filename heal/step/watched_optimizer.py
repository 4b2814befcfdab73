"""One optimizer of a guarded step: clipped at one time, stepped at another, between them judged."""

import math
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

import zclip
from heal.config import HealingConfig
from heal.step.unmeasured import Unmeasured
from heal.step.weight_anchor import Pull
from zclip.clippers import Clipper, ClipResult


class WatchedOptimizer(zclip.ClippedOptimizer):
    """A clipped optimizer that clips now and steps later, once all are judged together.

    Attributes:
        note: told once of each parameter that cannot be guarded.
        pull: set for some steps after a rollback, if asked for; it is added before clipping.
    """

    note: Callable[[str], None] = staticmethod(lambda text: None)
    pull: Pull | None = None
    _unmeasured: Unmeasured | None = None  # a copy finds out by itself

    def clip(
        self,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> ClipResult | None:
        """Clip without the step and without mail; None if there are no gradients."""
        if self.pull is not None:
            self.pull.add_to_gradients(grad_scale)
        groups = self.inner.param_groups
        if self._unmeasured is not None:
            groups = self._unmeasured.left_out_of(groups)
        try:
            result = self.measure(groups, loss, grad_scale, extra)
        except (TypeError, RuntimeError):
            left_out = self._leave_out()
            if left_out is None:
                raise
            groups = left_out.left_out_of(self.inner.param_groups)
            result = self.measure(groups, loss, grad_scale, extra)
        self.steps += 1
        if result is None and self._unmeasured is not None:
            return self._unmeasured.stand_in()
        return result

    def _leave_out(self) -> Unmeasured | None:
        """Leave out what cannot be measured from now on; None if there is nothing new."""
        unmeasured = self._unmeasured or Unmeasured()
        found = unmeasured.add_from(self.param_groups)
        if not found:
            return None
        self._unmeasured = unmeasured
        names = {id(param): name for name, param in self.named_parameters}
        for param, kind in found:
            name = names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
            self.note(
                f"the gradient of {name} is {kind}, which cannot be measured: it is stepped "
                "unguarded, not clipped and not watched for NaN"
            )
        return unmeasured

    def step_if_allowed(
        self,
        result: ClipResult,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        row: list[float] | None = None,
    ) -> None:
        """Step unless the result says that it is refused.

        A verdict in host memory is simply read: that is no wait, and cheaper than to have the
        optimizer look at it.

        Args:
            result: what :meth:`clip` returned.
            grad_scale: what it was given.
            found_inf: 0-dim; refused if it is not 0.
            row: the verdict, if it was read already.
        """
        is_read = row is not None or result.verdict.is_cpu
        if self.apply == "inplace" and found_inf is None and is_read:
            if not self.was_skipped(result.verdict.tolist() if row is None else row):
                self._step_inner()
            return
        super().step_if_allowed(result, grad_scale, found_inf)

    def _step_inner(self) -> None:
        if self.lr_scale == 1.0:
            self.inner.step()
            return
        with self.scaled_lr():
            self.inner.step()


def watched(
    optimizer: Optimizer, config: HealingConfig, names: list[tuple[str, Tensor]]
) -> WatchedOptimizer:
    """Wrap an optimizer; one that is clipped already keeps its clipper."""
    apply = "inplace"
    if isinstance(optimizer, zclip.ClippedOptimizer):
        clipper, apply, optimizer = optimizer.clipper, optimizer.apply, optimizer.inner
    else:
        clipper = make_clipper(config)
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    is_complete = own <= {id(p) for _, p in names}
    return WatchedOptimizer(
        optimizer,
        clipper,
        apply=apply,
        named_parameters=names if is_complete else None,  # all: others may join it later
        lag=config.lag,
    )


def make_clipper(config: HealingConfig) -> Clipper:
    """Return the clipper that the settings ask for; without one, norms are still measured."""
    if not config.zclip_enabled:
        return zclip.GlobalNorm(math.inf)
    return zclip.ZClip(z_thresh=config.zclip_z_threshold, max_grad_norm=config.max_grad_norm)
