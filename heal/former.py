"""Names that a module has without holding them: loaded on first use, or of version 0.1.

What version 0.1 called something else works until 0.3, with a warning that names the new one.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

MOVED = {
    "heal.chaos": "heal.testing",
    "heal.checkpointing": "heal.durable",
    "heal.detect": "heal.detectors.watch",
    "heal.exceptions": "heal.exception_causes",
    "heal.probes": "heal.lab.probes",
    "heal.run": "heal.training_run",
    "heal.settings": "heal.config_fields",
    "heal.verdict": "heal.record",
}
"""Each module that could be imported by another path, and where it is now."""


class Moved(ModuleType):
    """Stands for a module that has another path now, and loads that on first use."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Moved to :mod:`{new}`.")
        self.__path__: list[str] = []
        self._new = new

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # of ``import *``, which then asks for each of them
            present = vars(import_module(self._new))
            return present.get("__all__", [name for name in present if name[0] != "_"])
        if name.startswith("__"):
            raise AttributeError(name)  # asked for by the import system
        text = f"{self.__name__} has moved: import {self._new}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(self._new), name)


def install() -> None:
    """Let ``import heal.chaos`` and the like find what has moved."""
    for old, new in MOVED.items():
        package, _, name = old.partition(".")
        setattr(sys.modules[package], name, sys.modules.setdefault(old, Moved(old, new)))


class OldName:
    """The old name of an attribute: it works, and warns. The new one may have dots."""

    def __init__(self, now: str) -> None:
        self._now = now

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"{owner.__name__}.{name} is {owner.__name__}.{self._now} now"

    def __get__(self, instance: Any, owner: type) -> Any:
        warnings.warn(self._text, DeprecationWarning, stacklevel=2)
        return attrgetter(self._now)(owner if instance is None else instance)


def names_of(
    module: str, loaded: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a ``__getattr__``: of names and their modules, of old names and the new ones."""

    def getter(name: str) -> Any:
        if name in loaded:
            return getattr(import_module(loaded[name]), name)
        now = (renamed or {}).get(name)
        if now is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {now} now", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], now)

    return getter
