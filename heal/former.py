"""Import paths of version 0.1 that work until 0.3, with a warning that names the new one."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

MOVED = {
    "heal.chaos": "heal.testing",
    "heal.detect": "heal.detectors.watch",
    "heal.probes": "heal.lab.probes",
    "heal.settings": "heal.config_fields",
    "heal.verdict": "heal.record",
}
"""Each module that users could import by a path that is documented, and where it is now."""


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
        sys.modules.setdefault(old, Moved(old, new))
