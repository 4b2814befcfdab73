"""Names of parameters and modules that do not hang on what is wrapped around the model."""

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that DDP, torch.compile, activation checkpointing and FSDP put into those of parameters."""


def plain_name(name: str) -> str:
    """Return a name without the wrappers around the model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
