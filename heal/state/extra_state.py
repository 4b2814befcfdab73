"""What modules keep beside tensors: their ``get_extra_state``, as torch's ``state_dict`` has it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

from heal.state.plain_name import plain_name


def extra_states(model: Module, note: Callable[[str], None]) -> dict[str, Any]:
    """Return what each module that defines it has to tell, by its name; nothing is copied.

    One that fails is told of and left out: a snapshot without it is better than none.
    """
    found = {}
    for name, module in model.named_modules():
        if _defines(module):
            try:
                found[plain_name(name)] = module.get_extra_state()
            except Exception as error:
                note(f"get_extra_state of {_shown(name, module)} failed: {error!r}")
    return found


def set_extra_states(model: Module, states: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Give each module its state again. One that is gone, or fails, costs the others nothing."""
    for name, module in model.named_modules():
        if plain_name(name) in states and _defines(module):
            try:
                module.set_extra_state(states[plain_name(name)])
            except Exception as error:
                note(f"set_extra_state of {_shown(name, module)} failed: {error!r}")


def _defines(module: Module) -> bool:
    kind = type(module)
    own_get = kind.get_extra_state is not Module.get_extra_state
    return own_get and kind.set_extra_state is not Module.set_extra_state


def _shown(name: str, module: Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
