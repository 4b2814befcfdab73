"""Attributes set on one object for a while, and put back as they were, whatever happens."""

from typing import Any

_ABSENT = object()


class Patches:
    """Sets attributes of instances; :meth:`put_back` undoes it, last one first.

    Classes are never touched: another trainer of the same kind does not notice.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what the instance itself had under that name."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Undo everything; safe to call twice."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
