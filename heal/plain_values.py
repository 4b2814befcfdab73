"""Numbers as JSON and checkpoints know them."""

from typing import Any


def plain(value: Any) -> Any:
    """Return a number of numpy or torch, or of an enum, as one of Python's; all else as it is.

    Hooks and detectors may compute with any of them. A checkpoint that held such a number could
    not be read without running code of others.
    """
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


# Names of parameters and modules that do not hang on what is wrapped around the model.


WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that DDP, torch.compile, activation checkpointing and FSDP put into those of parameters."""


def plain_name(name: str) -> str:
    """Return a name without the wrappers around the model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
