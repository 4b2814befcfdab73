"""The state of an optimizer as a dictionary that knows whether something in it was replaced.

Proving for ten thousand parameters in every step that their moments are still the same tensors
would take a millisecond; noticing a replacement when it happens takes none.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

_WRITERS = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault")


class WatchedState(defaultdict[Any, Any]):
    """As the ``state`` of a torch optimizer. ``changed`` is True until a reader sets it to False.

    Copies and pickles are plain dictionaries.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        for key, entry in state.items():
            self[key] = entry
        self.changed = True

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changed = True
        super().__setitem__(key, _Entry(value, self) if type(value) is dict else value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def plain(self) -> dict[Any, Any]:
        """Return the same tensors in plain dictionaries."""
        return {key: dict(e) if isinstance(e, _Entry) else e for key, e in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return (defaultdict, (dict, self.plain()))


class _Entry(dict[Any, Any]):
    """The state of one parameter; marks the whole when one of its tensors is replaced."""

    def __init__(self, values: Mapping[Any, Any], whole: WatchedState) -> None:
        super().__init__(values)
        self.whole = whole

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.whole.changed = True
        super().update(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def _noting(name: str, of_entry: bool) -> Callable[..., Any]:
    """Return a method of dict that notes that something changed."""
    original = getattr(dict, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        (self.whole if of_entry else self).changed = True
        return original(self, *args, **kwargs)

    return method


for _name in _WRITERS:
    setattr(_Entry, _name, _noting(_name, of_entry=True))
    if _name not in ("__setitem__", "setdefault", "__ior__"):  # these write through __setitem__
        setattr(WatchedState, _name, _noting(_name, of_entry=False))


def _setdefault(self: WatchedState, key: Any, default: Any = None) -> Any:
    if key not in self:
        self[key] = default
    return self[key]


def _ior(self: WatchedState, other: Any) -> WatchedState:
    self.update(other)
    return self


WatchedState.setdefault = _setdefault  # type: ignore[method-assign, assignment]
WatchedState.__ior__ = _ior  # type: ignore[method-assign, assignment]
