"""Recompute activations in the backward pass: less memory for more time, the same gradients."""

from typing import Any

from torch.nn import Module, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: Module) -> bool:
    """Turn recomputation on, by the model's own switch if it has one.

    Without one, every block of the longest ModuleList or Sequential is recomputed; dropout draws
    the same numbers again.

    Returns:
        False if the model has no repeated blocks or recomputes already.
    """
    own_switch = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own_switch):
        if getattr(model, "is_gradient_checkpointing", False):
            return False
        own_switch()
        return True
    stacks = [m for m in model.modules() if isinstance(m, (ModuleList, Sequential)) and len(m) > 1]
    if not stacks:
        return False
    blocks = [b for b in max(stacks, key=len) if not hasattr(b, "_forward_once")]
    for block in blocks:
        _recompute(block)
    return bool(blocks)


def _recompute(block: Module) -> None:
    once = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return once(*args, **kwargs)
        return checkpoint(once, *args, use_reentrant=False, **kwargs)

    block._forward_once = once  # type: ignore[assignment]
    block.forward = forward
