"""The list of checks that a world runs, each with the sizes of world it makes sense in."""

import importlib
from collections.abc import Callable

MODULES = ("norms", "models", "clippers", "faults", "records", "trials")
WORLDS = (2, 3, 4)

_checks: dict[str, tuple[Callable[[], None], tuple[int, ...], bool]] = {}


def check(*worlds: int, slow: bool = False):
    """Mark a function as a check for worlds of these sizes; of any size if none is given."""

    def register(function):
        _checks[function.__name__] = (function, worlds or WORLDS, slow)
        return function

    return register


def checks_for(size: int, names: tuple[str, ...] = ()) -> dict[str, Callable[[], None]]:
    """Return the checks for a world, in a fixed order: the named ones, else all quick ones."""
    return {
        name: function
        for name, (function, worlds, slow) in _load().items()
        if size in worlds and (name in names if names else not slow)
    }


def cases(slow: bool = False) -> list[tuple[int, str]]:
    """Return every pair of world and check."""
    return [
        (size, name)
        for size in WORLDS
        for name, (_, worlds, is_slow) in _load().items()
        if size in worlds and is_slow == slow
    ]


def _load():
    for module in MODULES:
        importlib.import_module(f"tests.parallel.{module}")
    return _checks
