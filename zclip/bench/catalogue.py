"""What can be measured, by name: one entry per operator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zclip.bench import clipping, measuring, rules, stepping
from zclip.bench.gradients import NORMAL, Gradients
from zclip.bench.work import Work

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator, as users call it, and what there is to choose about it."""

    about: str
    make: Callable[..., Work]
    has_rules: bool = False
    may_clip: bool = False
    """Whether it can be measured with every gradient clipped."""
    has_backends: bool = True
    reads_params: bool = False


OPS: dict[str, Op] = {
    "clip_grad_norm_": Op(
        about="clip all gradients as one vector", make=clipping.clip_grad_norm_, may_clip=True
    ),
    "clip_grad_value_": Op(about="bound every element", make=clipping.clip_grad_value_),
    "grad_stats": Op(about="norm, NaN and Inf of every tensor", make=measuring.grad_stats),
    "flags": Op(about="whether anything is NaN or Inf", make=measuring.flags),
    "scale_": Op(about="multiply by a number on the device", make=clipping.scale_),
    "fingerprint": Op(about="hash every tensor", make=measuring.fingerprint),
    "rule": Op(
        about="one step of a clipper", make=rules.clip_by_rule, has_rules=True, may_clip=True
    ),
    "step": Op(
        about="clip and step AdamW", make=stepping.step, has_backends=False, reads_params=True
    ),
}

RULES = tuple(rules.RULES)


@dataclass(frozen=True)
class Case:
    """One row of the table: an operator on certain gradients."""

    op: str
    shapes: str
    dtype: str = "float32"
    rule: str | None = None
    clips: bool = False
    values: str = NORMAL

    @property
    def name(self) -> str:
        """What the table and the files call it; the same in every run, so runs can be compared."""
        parts = [self.rule or self.op, self.shapes, self.dtype]
        parts += ["clipped"] if self.clips else []
        return ", ".join([*parts, self.values] if self.values != NORMAL else parts)

    @property
    def reads_params(self) -> bool:
        """Whether the parameters are read too, and so take memory."""
        return OPS[self.op].reads_params or self.rule == "agc"

    def work(self, gradients: Gradients, backends: list[str], rivals: list[str]) -> Work:
        """Return the contenders on these gradients."""
        op = OPS[self.op]
        chosen: dict[str, object] = {"rule": self.rule} if op.has_rules else {}
        if op.may_clip:
            chosen["clips"] = self.clips
        return op.make(gradients, backends if op.has_backends else [], rivals, **chosen)
