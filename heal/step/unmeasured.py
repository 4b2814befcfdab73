"""Gradients that no kernel of ours measures, sparse and complex ones: what has them is left out.

They are stepped unguarded: not clipped, and NaN in them is seen only once it is in the weights or
in the loss. All else about the step is judged as ever, and what is refused is refused for them too.
"""

import math
from typing import Any

import torch
from torch import Tensor

from heal.state.measured import MEASURED
from zclip.clippers import ClipResult
from zclip.layout import CLIPPED_NORM, NORM, NUM_STATS, NUM_VERDICT, WORST
from zclip.schemas import wide_dtype

Groups = list[dict[str, Any]]


class Unmeasured:
    """Those parameters of one optimizer whose gradient was seen to be of such a kind."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._measured: Groups = []
        self._seen: list[tuple[int, int]] = []  # the groups, by identity and length

    def add_from(self, groups: Groups) -> list[tuple[Tensor, str]]:
        """Look for more of them; return each with what its gradient is."""
        known = {id(p) for p in self._params}
        found = [
            (param, kind)
            for group in groups
            for param in group["params"]
            if id(param) not in known and (kind := _kind(param.grad))
        ]
        self._params += [param for param, _ in found]
        self._seen = []
        return found

    def left_out_of(self, groups: Groups) -> Groups:
        """Return the groups without them; the same lists as long as nothing joins or leaves."""
        seen = [(id(group), len(group["params"])) for group in groups]
        if seen != self._seen:
            known = {id(p) for p in self._params}
            self._measured = [
                {"params": [p for p in group["params"] if id(p) not in known]} for group in groups
            ]
            self._seen = seen
        for measured, group in zip(self._measured, groups, strict=True):
            measured.update((key, value) for key, value in group.items() if key != "params")
        return self._measured

    def stand_in(self) -> ClipResult | None:
        """Return a result for a step in which nothing else has a gradient; None if they have none.

        It allows the step, and has NaN where a norm was not measured.
        """
        device = next((p.device for p in self._params if p.grad is not None), None)
        if device is None:
            return None
        verdict = torch.zeros(NUM_VERDICT, device=device)
        for column, value in ((NORM, math.nan), (CLIPPED_NORM, math.nan), (WORST, -1.0)):
            verdict[column].fill_(value)
        stats = torch.zeros(0, NUM_STATS, dtype=wide_dtype(device), device=device)
        return ClipResult(verdict[NORM], stats, stats[:, 0], verdict)


def _kind(grad: Tensor | None) -> str:
    """Say what keeps a gradient from being measured; empty if nothing does."""
    if grad is None:
        return ""
    if grad.layout is not torch.strided:
        return str(grad.layout).removeprefix("torch.")
    return "" if grad.dtype in MEASURED else str(grad.dtype).removeprefix("torch.")
