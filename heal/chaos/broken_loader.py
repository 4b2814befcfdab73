"""A loader that fails where it is told to, for :mod:`heal.chaos.chaos`."""

from collections.abc import Callable, Iterator
from typing import Any


class BrokenLoader:
    """Passes on what a loader gives, except where it should fail."""

    def __init__(self, loader: Any, before_batch: Callable[[], None]) -> None:
        self._loader = loader
        self._before_batch = before_batch

    def __iter__(self) -> "_BrokenIterator":
        return _BrokenIterator(iter(self._loader), self._before_batch)

    def __getattr__(self, name: str) -> Any:
        """Samplers, generators and the like are the loader's own."""
        return getattr(self._loader, name)


class _BrokenIterator:
    """Goes on after an error, as the iterators of DataLoader do and generators do not."""

    def __init__(self, iterator: Iterator[Any], before_batch: Callable[[], None]) -> None:
        self._iterator = iterator
        self._before_batch = before_batch

    def __iter__(self) -> "_BrokenIterator":
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._before_batch()
        return batch
