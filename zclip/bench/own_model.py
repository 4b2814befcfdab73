"""The user's own model, as shapes to measure on: ``--model module:factory``."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.nn import Module

from zclip.bench.catalogue import DTYPES
from zclip.bench.shapes import Shape


def load_model(reference: str) -> Module:
    """Call the factory that ``module:factory`` names; return the model that it makes.

    Raises:
        ValueError: the reference, the module, the factory or what it returned is not right; says
            which, and what was expected.
    """
    module_name, colon, factory_name = reference.partition(":")
    if not (module_name and colon and factory_name):
        raise ValueError(f"--model: expected module:factory, as train:build_model, got {reference}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does, and the installed script does not
    try:
        factory = getattr(import_module(module_name), factory_name)
        model: Any = factory()
    except Exception as error:
        raise ValueError(f"--model {reference}: {type(error).__name__}: {error}") from error
    if not isinstance(model, Module):
        raise ValueError(
            f"--model {reference}: expected a torch.nn.Module, got {type(model).__name__} from "
            f"{factory_name}()"
        )
    return model


def shapes_of(model: Module, reference: str) -> tuple[list[Shape], str]:
    """Return the shapes of the trainable parameters, and the dtype of most of them.

    Raises:
        ValueError: no parameter requires a gradient, so that there is nothing to clip.
    """
    everything = list(model.parameters())
    trained = [p for p in everything if p.requires_grad]
    if not trained:
        raise ValueError(
            f"--model {reference}: expected a model with something to train, got none of "
            f"{len(everything)} parameters that requires a gradient"
        )
    names = {dtype: name for name, dtype in DTYPES.items()}
    sizes: dict[str, int] = {}
    for parameter in trained:
        if parameter.dtype not in names:
            raise ValueError(
                f"--model {reference}: expected parameters of {', '.join(DTYPES)}, got "
                f"{parameter.dtype}"
            )
        name = names[parameter.dtype]
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return [tuple(p.shape) for p in trained], max(sizes, key=lambda name: sizes[name])
