"""A file of JSON whose every field is asked for by type; what is amiss is refused by name."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from heal.checkpoint.errors import CheckpointRefused

FORMAT, VERSION = "heal-checkpoint", 1
MAX_DIMS = 64
MAX_SIZE = 2**48  # of one dimension
MAX_ELEMENTS = 2**60  # of a tensor; with a size of zero the product would hide the others


class Page:
    """A parsed file whose every field is asked for by type."""

    def __init__(self, page: Any, path: Path) -> None:
        self._path = path
        if not isinstance(page, dict):
            self.refuse(f"is a {type(page).__name__}; wanted an object")
        self._page: Mapping[str, Any] = page

    def refuse(self, why: str) -> NoReturn:
        """Raise, naming the file."""
        raise CheckpointRefused(f"{self._path}: {why}")

    def __getitem__(self, name: str) -> Any:
        if name not in self._page:
            self.refuse(f"{name} is missing")
        return self._page[name]

    def check_format(self) -> None:
        """Refuse what is of another kind or from the future."""
        if self["format"] != FORMAT:
            self.refuse(f"format is {str(self['format'])[:100]!r}; wanted {FORMAT!r}")
        if type(self["version"]) is not int or self["version"] != VERSION:
            self.refuse(f"version is {str(self['version'])[:40]}; this release reads {VERSION}")

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        value = self[name]
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"{name} is {str(value)[:40]}; wanted a whole number {least} to {most}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object."""
        value = self[name]
        if not isinstance(value, dict):
            self.refuse(f"{name} is a {type(value).__name__}; wanted an object")
        return value

    def text(self, what: str, value: Any, pattern: str) -> str:
        """Return a text that matches a pattern as a whole."""
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            self.refuse(f"{what} is {str(value)[:100]!r}")
        return value

    def sizes(self, where: str, value: Any) -> tuple[int, ...]:
        """Return sizes of dimensions whose product is no absurd number of elements."""
        good = isinstance(value, list) and len(value) <= MAX_DIMS
        if not good or any(type(n) is not int or not 0 <= n < MAX_SIZE for n in value):
            self.refuse(f"{where} has shape {str(value)[:100]}")
        if prod(max(n, 1) for n in value) >= MAX_ELEMENTS:
            self.refuse(f"{where} has shape {str(value)[:100]}, an absurd number of elements")
        return tuple(value)
