"""State beside parameters and buffers: of modules, of schedulers, and of the user."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

Note = Callable[[str], None]

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that DDP, torch.compile, activation checkpointing and FSDP put into those of parameters."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the wrappers around the model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def extra_states(model: Module, note: Note) -> dict[str, Any]:
    """Return ``get_extra_state`` of each module that defines it, by name; nothing is copied.

    One that fails is noted and left out: a snapshot without it is better than none.
    """
    found = {}
    for name, module in model.named_modules():
        if _defines(module):
            try:
                found[plain_name(name)] = module.get_extra_state()
            except Exception as error:
                note(f"get_extra_state of {_module_name(name, module)} failed: {error!r}")
    return found


def set_extra_states(model: Module, states: Mapping[str, Any], note: Note) -> None:
    """Give each module its state again; one that is gone, or fails, is left out."""
    for name, module in model.named_modules():
        if plain_name(name) in states and _defines(module):
            try:
                module.set_extra_state(states[plain_name(name)])
            except Exception as error:
                note(f"set_extra_state of {_module_name(name, module)} failed: {error!r}")


def _defines(module: Module) -> bool:
    kind = type(module)
    own_get = kind.get_extra_state is not Module.get_extra_state
    return own_get and kind.set_extra_state is not Module.set_extra_state


def _module_name(name: str, module: Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


class AddedStates:
    """State that lives outside the model and the optimizers, saved and loaded by functions.

    Copies are in host memory, and the functions get copies too, which they may change. ``note``
    gets a text for each state that could not be saved, and is not in a snapshot.
    """

    def __init__(self, note: Note = lambda text: None) -> None:
        self._kept: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._unclaimed: dict[str, Any] = {}  # of a checkpoint, for states that are added later
        self._note = note

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Have a state saved and loaded under a name that is not taken."""
        if not isinstance(name, str):
            raise TypeError(f"name: expected a str, got {type(name).__name__}")
        for argument, function in (("save", save), ("load", load)):
            if not callable(function):
                raise TypeError(
                    f"{argument}: expected a function, got {type(function).__name__}; pass for "
                    "example ema.state_dict and ema.load_state_dict"
                )
        if name in self._kept:
            raise ValueError(f"name: expected a new one, got {name!r}, which was added before")
        self._kept[name] = save, load
        if name in self._unclaimed:
            load(self._unclaimed.pop(name))

    def saved(self) -> dict[str, Any]:
        """Return copies of all states as they are now, in host memory; waits for the device."""
        found = {}
        for name, (save, _) in self._kept.items():
            try:
                found[name] = on_host(save())
            except Exception as error:  # a snapshot without it is better than none
                self._note(f"add_state: {name} could not be saved: {error!r}")
        return found

    def load(self, states: Mapping[str, Any]) -> None:
        """Give each its state again; one that was not added when they were saved stays as it is."""
        for name, (_, load) in self._kept.items():
            if name in states:
                load(on_host(states[name]))
        self._unclaimed = {n: on_host(s) for n, s in states.items() if n not in self._kept}


def on_host(value: Any) -> Any:
    """Return a deep copy with every tensor in host memory, detached."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(on_host(entry) for entry in value)
    if isinstance(value, dict):
        pairs = {key: on_host(entry) for key, entry in value.items()}
        return OrderedDict(pairs) if type(value) is OrderedDict else pairs
    return copy.deepcopy(value)


def listed(scheduler: Any) -> list[Any]:
    """Return one, several or no schedulers as a list."""
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]


def state_of(scheduler: Any) -> Any:
    """Return the state of a scheduler; None if it cannot be saved and loaded."""
    return scheduler.state_dict() if _has(scheduler, "state_dict", "load_state_dict") else None


def _has(owner: Any, *methods: str) -> bool:
    return all(callable(getattr(owner, name, None)) for name in methods)


def note_stateless(schedulers: Sequence[Any], note: Note) -> None:
    """Name schedulers that a rollback and a checkpoint cannot return."""
    for scheduler in schedulers:
        if not _has(scheduler, "state_dict", "load_state_dict"):
            note(
                f"the scheduler is a {type(scheduler).__name__} without state_dict and "
                "load_state_dict: snapshots hold the learning rate but not its place in the "
                "schedule, which goes on as if no step were taken back"
            )


def note_rewriting(optimizers: Sequence[Any], note: Note) -> None:
    """Name optimizers that rewrite the weights for an evaluation, as schedule-free ones do."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner", optimizer)
        if _has(inner, "eval", "train"):
            note(
                f"{type(inner).__name__} rewrites the weights in eval() and train(), which rounds "
                "them; a replay after a rollback does so only where your loop evaluates again, and "
                "may differ from the run that never failed in the last bits"
            )
