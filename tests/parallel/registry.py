"""The list of checks that a world runs, each with the sizes of world it makes sense in."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

MODULES = (
    "norms",
    "models",
    "clippers",
    "fused",
    "during_backward",
    "faults",
    "records",
    "trials",
    "other_loops",
    "healing",
)
WORLDS = (2, 3, 4)


class Check(NamedTuple):
    run: Callable[[], None]
    worlds: tuple[int, ...]
    slow: bool
    needs: str | None  # a package that may not be installed


_checks: dict[str, Check] = {}


def check(*worlds: int, slow: bool = False, needs: str | None = None):
    """Mark a function as a check for worlds of these sizes; of any size if none is given."""

    def register(function):
        _checks[function.__name__] = Check(function, worlds or WORLDS, slow, needs)
        return function

    return register


def checks_for(size: int, names: tuple[str, ...] = ()) -> dict[str, Callable[[], None]]:
    """Return the checks for a world, in a fixed order: the named ones, else all quick ones."""
    return {
        name: check.run
        for name, check in _load().items()
        if size in check.worlds
        and (name in names if names else not check.slow)
        and (check.needs is None or importlib.util.find_spec(check.needs))
    }


def cases(slow: bool = False) -> list[tuple[int, str, str | None]]:
    """Return every pair of world and check, with what the check needs."""
    return [
        (size, name, check.needs)
        for size in WORLDS
        for name, check in _load().items()
        if size in check.worlds and check.slow == slow
    ]


def _load():
    for module in MODULES:
        importlib.import_module(f"tests.parallel.{module}")
    return _checks
