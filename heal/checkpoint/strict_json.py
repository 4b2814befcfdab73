"""JSON as this package writes it, and no other: anything else raises an error that names it."""

import json
import math
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from heal.checkpoint.files import CheckpointRefused

MAX_DIGITS = 20  # of a whole number; larger ones are written as hexadecimal text
FORMAT, VERSION = "heal-checkpoint", 1
MAX_DIMS = 64
MAX_SIZE = 2**48  # of one dimension
MAX_ELEMENTS = 2**60  # of a tensor; with a size of zero the product would hide the others


def to_bytes(value: Any) -> bytes:
    """Return strict JSON, the same bytes for the same value."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def from_bytes(data: bytes, path: Path) -> Any:
    """Return what :func:`to_bytes` was given.

    Args:
        data: the JSON.
        path: where it comes from, for messages.

    Raises:
        CheckpointRefused: not UTF-8, not JSON, a key comes twice, a number is absurd, or it is
            nested beyond reason.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) != len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointRefused(f"{path}: key {twice[:100]!r} comes twice")
        return made

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise CheckpointRefused(f"{path}: a whole number has {len(digits)} digits")
        return int(digits)

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise CheckpointRefused(f"{path}: number {text[:40]} is beyond all floats")
        return value

    def constant(word: str) -> NoReturn:
        raise CheckpointRefused(f"{path}: {word} is not JSON")

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=whole,
            parse_float=real,
            parse_constant=constant,
        )
    except RecursionError:
        raise CheckpointRefused(f"{path} is nested beyond reason") from None
    except ValueError as error:  # also what is not UTF-8
        raise CheckpointRefused(f"{path} is not JSON: {error}") from None


def page_bytes(**fields: Any) -> bytes:
    """Return a file that :class:`Page` reads."""
    return to_bytes({"format": FORMAT, "version": VERSION, **fields})


class Page:
    """A parsed file. Each method reads a field and checks its type; errors name file and field."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._path = path
        page = from_bytes(data, path)
        if not isinstance(page, dict):
            self.fail(f"expected an object, got a {type(page).__name__}")
        self._page: Mapping[str, Any] = page
        if self["format"] != FORMAT:
            self.fail(f"format: expected {FORMAT!r}, got {str(self['format'])[:100]!r}")
        if type(self["version"]) is not int or self["version"] != VERSION:
            self.fail(f"version: expected {VERSION}, got {str(self['version'])[:40]}")

    def fail(self, why: str) -> NoReturn:
        """Raise, naming the file."""
        raise CheckpointRefused(f"{self._path}: {why}")

    def __getitem__(self, name: str) -> Any:
        if name not in self._page:
            self.fail(f"{name} is missing")
        return self._page[name]

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        value = self[name]
        if type(value) is not int or not least <= value <= most:
            self.fail(f"{name}: expected a whole number {least} to {most}, got {str(value)[:40]}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object."""
        value = self[name]
        if not isinstance(value, dict):
            self.fail(f"{name}: expected an object, got a {type(value).__name__}")
        return value

    def text(self, what: str, value: Any, pattern: str) -> str:
        """Return a text that matches a pattern as a whole."""
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            self.fail(f"{what}: expected text of the form {pattern}, got {str(value)[:100]!r}")
        return value

    def sizes(self, where: str, value: Any) -> tuple[int, ...]:
        """Return sizes of dimensions whose product is no absurd number of elements."""
        good = isinstance(value, list) and len(value) <= MAX_DIMS
        if not good or any(type(n) is not int or not 0 <= n < MAX_SIZE for n in value):
            self.fail(f"{where}: expected a shape, got {str(value)[:100]}")
        if prod(max(n, 1) for n in value) >= MAX_ELEMENTS:
            self.fail(
                f"{where}: expected under {MAX_ELEMENTS} elements, got shape {str(value)[:100]}"
            )
        return tuple(value)
