"""The drop-in wrapper: any torch optimizer, its gradients clipped before every step."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import SGD, Adagrad, Adam, Optimizer

from zclip.clippers import Clipper, ClipResult, LossWatch, make_clipper
from zclip.during_backward import Attachment
from zclip.layout import BLOCKED, FLAGS, HAS_INF, HAS_NAN
from zclip.mailbox import Mailbox
from zclip.momentum import FirstMomentum
from zclip.optim.fused import CLIP_KEY, FusedOptimizer
from zclip.optim.in_backward import StepInBackward
from zclip.optimizer_proxy import OptimizerProxy
from zclip.unscaling import adopt_unscaling
from zclip.verdict_ring import VerdictRing, is_capturing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

APPLY = ("inplace", "grad_scale")
_FUSED = (Adam, SGD, Adagrad)  # AdamW is an Adam


@functools.cache
def _asks_a_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step wants the GradScaler itself, and so never reads ``found_inf``.

    GradScaler has two contracts for optimizers that set ``_step_supports_amp_scaling``: those of
    torch read attributes that it sets, those of apex and TransformerEngine take it as an argument.
    """
    return "grad_scaler" in inspect.signature(step).parameters


class ClippedOptimizer(OptimizerProxy):
    """An optimizer that clips before it steps, and does not step on NaN or Inf.

    It is the wrapped optimizer to schedulers, GradScaler, accelerate and checkpoints: parameter
    groups, state and defaults are the same objects. Build the wrapped one with ``fused=True``
    (Adam, AdamW, SGD, Adagrad): it then reads the verdict on the device and a skipped step changes
    neither parameters nor state, bit by bit, with no wait. State that would be created by the
    first step may be created by a skipped one, with the values it starts from. Two exceptions
    wait for the device: an optimizer that is not fused, in every step; and fused SGD with
    dampening, until its momentum exists.

    Args:
        optimizer: the one to wrap.
        clipper: what clips; see :mod:`zclip.clippers`.
        skip_nonfinite: skip a step with NaN or Inf even if the clipper would let it pass.
        apply: "inplace" scales the gradients where there is something to clip; "grad_scale" has
            the fused step do it, for clippers with one coefficient for all.
        named_parameters: names for norms, states and errors, if the optimizer was built without.
            Those of parameters that join later may be among them; others are then called by their
            place. They are not written into the groups, or torch would reject a group without.
        lag: how many steps late :meth:`metrics` is.
        capturable: have :meth:`step` be captured in a CUDA graph and replayed. Verdicts are then
            kept in a ring on the device, and :meth:`metrics` is late by one call of it. Take a few
            steps before the capture, as torch asks for anyway, and give the inner optimizer
            ``capturable=True``. ``lr_scale``, and a learning rate that is no tensor, are those of
            the capture in every replay.
        process_group: this and the next two: see :meth:`zclip.Clipper.distribute`. Not needed for
            DDP, FSDP2 and whatever else makes DTensors.
        pipeline_group: ranks with the other stages of a pipeline.
        record_group: ranks to share losses and extra lanes with, where gradients need no message.
        during_backward: measure gradients as they become final, see :meth:`zclip.Clipper.attach`.
            True for one process or ``fully_shard``; a DistributedDataParallel model has to be
            given itself.
        scaler: the GradScaler, needed where ``scaler.unscale_`` is given the optimizer inside: a
            scaler knows optimizers by identity, and would divide the gradients again when
            the wrapper is stepped. Copies and pickles of the wrapper have none.

    Attributes:
        inner: the wrapped optimizer.
        clipper: what clips.
        lr_scale: multiplies the learning rate of every group during the step and is not seen
            outside of it, so that no scheduler undoes it; not part of ``state_dict``.
        attachment: what :meth:`zclip.Clipper.attach` returned, if ``during_backward`` is given.
        mailbox: carries the verdicts to the host.
        steps: how many steps were clipped; set back by those who take steps back.

    Raises:
        ValueError: "grad_scale" with an optimizer that is not fused, or a clipper that has more
            than one coefficient.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clipper: Clipper,
        *,
        skip_nonfinite: bool = True,
        apply: str = "inplace",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        lag: int = 1,
        capturable: bool = False,
        process_group: "ProcessGroup | None" = None,
        pipeline_group: "ProcessGroup | None" = None,
        record_group: "ProcessGroup | None" = None,
        during_backward: bool | Module = False,
        scaler: GradScaler | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer: expected a torch Optimizer, got {type(optimizer).__name__}"
            )
        if not isinstance(clipper, Clipper):
            raise TypeError(f"clipper: expected a zclip.Clipper, got {type(clipper).__name__}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
        if isinstance(optimizer, ClippedOptimizer):
            raise ValueError(
                "optimizer: expected a plain one, got one that is clipped already; wrap its .inner"
            )
        if isinstance(optimizer, FusedOptimizer) and optimizer.clipper is not None:
            raise ValueError(
                "optimizer: expected one without a clipper, got "
                f"{type(optimizer).__name__} with one; make it with clipper=None, or leave out "
                "the wrapper"
            )
        if isinstance(optimizer, StepInBackward) and not optimizer.clips_in_backward:
            raise ValueError(
                "optimizer: expected one that clips in backward, so that a wrapper can report what "
                "it does, got one without a clipper past its warm-up; give it "
                "AdaGC(warmup_steps=0)"
            )
        super().__init__(optimizer)
        self.clipper = clipper
        self.skip_nonfinite = skip_nonfinite
        self.apply = apply
        self.capturable = capturable
        self.mailbox: Mailbox | VerdictRing = Mailbox(lag)
        if capturable:
            self.mailbox = VerdictRing(self._device())
        self.steps = 0
        self._scaler = scaler
        self._warned = False
        self._momentum = FirstMomentum()
        self._named: list[tuple[str, Tensor]] = []
        self._check_apply()
        if named_parameters is not None:
            self._check_names(named_parameters := list(named_parameters))
            self.learn_names(named_parameters)
        if (process_group, pipeline_group, record_group) != (None, None, None):
            clipper.distribute(process_group, pipeline_group, record_group)
        clipper.bind(self.param_groups)
        self.attachment: Attachment | None = None
        if during_backward is not False:
            watched = self.param_groups if during_backward is True else during_backward
            self.attachment = clipper.attach(watched)

    @property
    def guards_on_device(self) -> bool:
        """Whether the wrapped optimizer reads ``found_inf`` on the device."""
        inner = self.inner
        if isinstance(inner, (FusedOptimizer, StepInBackward)):
            return True
        # Copying and pickling lose the attribute, although the step still reads found_inf.
        if isinstance(inner, _FUSED):
            return all(group.get("fused", False) for group in inner.param_groups)
        supports = getattr(inner, "_step_supports_amp_scaling", False)
        if not supports or _asks_a_scaler(type(inner).step):
            return False
        return all(group.get("fused", True) for group in inner.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: if True it leaves unscaling and skipping to us, and never waits."""
        if self._scaler is not None:
            adopt_unscaling(self._scaler, self, self.inner)
        return self.guards_on_device

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Any:
        """Clip, then step unless the step is skipped.

        Args:
            closure: computes the loss and the gradients. It is called once, before clipping; if
                the optimizer needs to call it several times, as LBFGS does, each call is clipped.
            loss: 0-dim, for clippers that watch it; that of the closure if there is one.
            extra: what only this rank knows; see :meth:`zclip.Clipper.step`.

        Returns:
            What the closure returned, else None.
        """
        self._check_capture()
        if closure is not None and self.needs_closure:
            with self.scaled_lr():
                return self.inner.step(lambda: self._clip_after(closure))
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            loss = returned if isinstance(returned, Tensor) else loss
        # Put here by GradScaler, which takes them away again after the step.
        grad_scale, found_inf = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        result = self._clip_and_post(loss, grad_scale, extra)
        if result is None:
            self.inner.step()  # no gradients: what the optimizer makes of that is its own affair
            return returned
        self.step_if_allowed(result, grad_scale, found_inf)
        return returned

    @torch.no_grad()
    def clip(
        self,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> ClipResult | None:
        """Do the first half of :meth:`step`: measure and clip, and neither step nor post.

        Args:
            loss: as for :meth:`step`.
            extra: as for :meth:`step`.
            grad_scale: 0-dim; the gradients are so many times too large.

        Returns:
            What to give to :meth:`step_if_allowed`; None if no parameter has a gradient.
        """
        result = self.measure(self.param_groups, loss, grad_scale, extra)
        self.steps += 1
        return result

    @torch.no_grad()
    def step_if_allowed(
        self,
        result: ClipResult,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Do the second half of :meth:`step`: step, unless the result says to skip it.

        Between the two, ``result.verdict[BLOCKED]`` may be set to 1 by others who have something
        against the step. It is read on the device.

        Args:
            result: what :meth:`clip` returned.
            grad_scale: what that was given.
            found_inf: 0-dim; skip the step if it is not 0.
        """
        skipped = self.skips(result.verdict)
        if found_inf is not None:
            seen = (found_inf.to(skipped.device, non_blocking=True) > 0).float()
            skipped = torch.maximum(skipped, seen)
        if not self.guards_on_device:
            self._waiting_step(skipped)
        elif not self._must_wait() or not bool(skipped):
            self._guarded_step(result, skipped, grad_scale)

    def skips(self, verdict: Tensor) -> Tensor:
        """Return 1 if a step with this verdict is skipped, else 0: 0-dim, on its device.

        Exactly 0 or 1: the fused kernels take any other number for a yes and a no.
        """
        skipped = verdict[BLOCKED]
        if self._heeds_flags():
            flags = verdict[FLAGS].int() & (HAS_NAN | HAS_INF)
            skipped = torch.maximum(skipped, (flags > 0).to(skipped))
        return skipped

    def was_skipped(self, row: Sequence[float]) -> bool:
        """Answer as :meth:`skips` does, from a verdict on the host, as :class:`Mailbox` has it."""
        is_bad = bool(int(row[FLAGS]) & (HAS_NAN | HAS_INF))
        return row[BLOCKED] > 0 or (is_bad and self._heeds_flags())

    def _heeds_flags(self) -> bool:
        """Whether NaN or Inf skips the step although the clipper would let it pass."""
        return self.skip_nonfinite and self.clipper.on_nonfinite != "skip"

    def metrics(self) -> dict[str, float]:
        """Return norms, z-score, threshold and counts as floats, a step late; see ``lag``."""
        return self.mailbox.metrics()

    @property
    def result(self) -> ClipResult | None:
        """What the clipper found in the last step."""
        return self.clipper.result

    def _clip_and_post(
        self, loss: Tensor | None, grad_scale: Tensor | None, extra: Tensor | None = None
    ) -> ClipResult | None:
        step, result = self.steps, self.clip(loss, extra, grad_scale)
        if result is not None:
            self.mailbox.post(step, result.verdict)
        return result

    def measure(
        self,
        groups: list[dict[str, Any]],
        loss: Tensor | None,
        grad_scale: Tensor | None,
        extra: Tensor | None,
        watch: LossWatch | None = None,
    ) -> ClipResult | None:
        """Clip these groups, or with ``apply="grad_scale"`` only decide; count nothing.

        Of an optimizer that steps in backward this returns what that has found and done. With a
        watch the loss is judged into the verdict, on a CPU in the same call.
        """
        if isinstance(self.inner, StepInBackward):
            self.inner.lr_scale = self.lr_scale  # of the next backward
            found = self.inner.finish()
            if found is not None:
                self.clipper.accept(found)
            result: ClipResult | None = found
        elif self.apply == "inplace":
            self.clipper.step(groups, loss=loss, grad_scale=grad_scale, extra=extra, watch=watch)
            return self.clipper.result
        else:
            self.clipper.decide(groups, loss=loss, grad_scale=grad_scale, extra=extra)
            result = self.clipper.result
        if watch is not None and loss is not None and result is not None:
            watch.judge(loss, result.verdict)
        return result

    def _clip_after(self, closure: Callable[[], Any]) -> Any:
        """Serve an optimizer that calls the closure itself; a skipped gradient is zero to it."""
        with torch.enable_grad():
            returned = closure()
        self._clip_and_post(returned if isinstance(returned, Tensor) else None, None)
        return returned

    def _must_wait(self) -> bool:
        if isinstance(self.inner, FusedOptimizer):
            return False
        return isinstance(self.inner, SGD) and self._momentum.prepare(self.inner)

    def _guarded_step(self, result: ClipResult, skipped: Tensor, grad_scale: Tensor | None) -> None:
        inner: Any = self.inner
        inner.found_inf = skipped
        if self.apply == "grad_scale":
            coef = result.coefs[0]
            divisor = torch.where(coef < 0, 1.0, coef.reciprocal())  # skipped: it is not used
            if grad_scale is not None:
                divisor = divisor * grad_scale.to(divisor.device, non_blocking=True)
            inner.grad_scale = divisor.float()
        try:
            with self.scaled_lr():
                inner.step()
        finally:
            for name in ("found_inf", "grad_scale"):
                inner.__dict__.pop(name, None)

    def _waiting_step(self, skipped: Tensor) -> None:
        """Step if the host, after a wait for the device, finds nothing against it."""
        if not self._warned:
            self._warned = True
            name = type(self.inner).__name__
            cure = f"{name} has no fused form; Adam, AdamW, SGD and Adagrad have"
            if isinstance(self.inner, _FUSED):
                cure = "build it with fused=True"
            elif _asks_a_scaler(type(self.inner).step):
                cure = f"{name} takes the verdict from a GradScaler only; torch's fused ones do not"
            warnings.warn(
                f"{name} is not fused, so that the host must read the verdict before every step, "
                f"which on an accelerator means to wait for it. To avoid it: {cure}.",
                stacklevel=5,
            )
        if not bool(skipped):
            with self.scaled_lr():
                self.inner.step()

    @property
    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The names of parameters that were given."""
        return self._named

    def learn_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Learn what parameters are called, for norms, states and errors."""
        self._named = list(named_parameters)
        self.clipper.learn_names(self._named)

    def forget_momentum(self) -> None:
        """Look again for state that has to exist before a step: state was changed from outside."""
        self._momentum.forget()

    def _device(self) -> torch.device:
        params = (p for group in self.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def _check_capture(self) -> None:
        """Raise if the step is being captured in a graph and could not be replayed."""
        if self._device().type != "cuda" or not is_capturing():
            return
        if not self.capturable:
            raise RuntimeError(
                "capture of a step in a CUDA graph: expected capturable=True, got False, with "
                "which the host mails verdicts, and no replay does; make "
                "ClippedOptimizer(..., capturable=True)"
            )
        if not self.guards_on_device:
            raise RuntimeError(
                "capture of a step in a CUDA graph: expected an optimizer that reads found_inf "
                f"on the device, got {type(self.inner).__name__}, for which the host has to read "
                "the verdict; build it with fused=True"
            )
        if self.steps == 0:
            raise RuntimeError(
                "capture of a step in a CUDA graph: expected at least one step before it, got "
                "none; every replay would create the optimizer's state again, so warm up as "
                "torch.cuda.graph says"
            )

    def _check_apply(self) -> None:
        if self.apply not in APPLY:
            raise ValueError(f"apply: expected one of {', '.join(APPLY)}, got {self.apply!r}")
        if self.apply == "inplace":
            return
        if not self.guards_on_device:
            raise ValueError(
                "apply='grad_scale': expected an optimizer built with fused=True, got "
                f"{type(self.inner).__name__} without it"
            )
        if not self.clipper.is_global or self.clipper.per_group:
            raise ValueError(
                "apply='grad_scale': expected a clipper with one factor for all gradients, got "
                f"{type(self.clipper).__name__}; use apply='inplace'"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and that of the clipper under "zclip".

        The wrapped optimizer, or a bare one like it, can load this too.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self.inner.state_dict()
        if not isinstance(self.inner, StepInBackward):  # which clips, and has its own state there
            state = {**state, CLIP_KEY: self.clipper.state_dict()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or the state of a bare optimizer.

        In the latter case the clipper keeps what it has learned.

        Raises:
            ValueError: the state fits neither; names what differs. Nothing is changed then, unless
                it is the wrapped optimizer that rejects its part.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        clip_state = None
        if not isinstance(self.inner, StepInBackward):
            clip_state = state_dict.pop(CLIP_KEY, None)
        if clip_state is not None:
            self.clipper.load_state_dict(clip_state)
        self.inner.load_state_dict(state_dict)
        self._momentum.forget()
        self.mailbox.clear()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; adaptive statistics of the others stay."""
        self.inner.add_param_group(param_group)
        self._momentum.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hooks, as torch does, and names of parameters that are not in here."""
        kept = ("inner", "clipper", "skip_nonfinite", "apply", "lr_scale", "mailbox", "steps")
        own = {id(p) for group in self.param_groups for p in group["params"]}
        return {
            **{name: self.__dict__[name] for name in kept},
            "capturable": self.capturable,
            "attachment": None,
            "_scaler": None,
            "_warned": self._warned,
            "_momentum": FirstMomentum(),
            "_named": [(name, param) for name, param in self._named if id(param) in own],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give the copied clipper, which holds no parameters, the names of the copied ones."""
        super().__setstate__(state)
        self.learn_names(self._named)


def wrap(
    optimizer: Optimizer, clipper: str | Clipper = "zclip", **settings: Any
) -> ClippedOptimizer:
    """Return ``optimizer`` with its gradients clipped before every step.

    Args:
        optimizer: any torch optimizer, best built with ``fused=True``.
        clipper: a clipper, or the name of one: "zclip", "adagc", "global_norm", "spike_skip",
            "agc", "auto_clip".
        settings: those of :class:`ClippedOptimizer`, and of the clipper if it is given by name.

    Example:
        >>> optimizer = zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True), "zclip")
    """
    groups = ("process_group", "pipeline_group", "record_group")
    own = ("skip_nonfinite", "apply", "named_parameters", "lag", "capturable", "during_backward")
    of_wrapper = {
        name: settings.pop(name) for name in (*own, "scaler", *groups) if name in settings
    }
    return ClippedOptimizer(optimizer, make_clipper(clipper, settings), **of_wrapper)
