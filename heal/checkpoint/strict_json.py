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
        self.expect(isinstance(page, dict), "content", "an object", page)
        self._page: Mapping[str, Any] = page
        self.expect(self["format"] == FORMAT, "format", repr(FORMAT), self["format"])
        version = self["version"]
        self.expect(type(version) is int and version == VERSION, "version", VERSION, version)

    def expect(self, is_so: bool, what: str, expected: object, got: object) -> None:
        """Raise unless ``is_so``."""
        if not is_so:
            raise CheckpointRefused(
                f"{self._path}: {what}: expected {expected}, got {repr(got)[:100]}"
            )

    def __getitem__(self, name: str) -> Any:
        if name not in self._page:
            raise CheckpointRefused(f"{self._path}: {name} is missing")
        return self._page[name]

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        value = self[name]
        is_within = type(value) is int and least <= value <= most
        self.expect(is_within, name, f"a whole number {least} to {most}", value)
        return int(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object."""
        value: Mapping[str, Any] = self[name]
        self.expect(isinstance(value, dict), name, "an object", value)
        return value

    def text(self, what: str, value: Any, pattern: str) -> str:
        """Return a text that matches a pattern as a whole."""
        matches = isinstance(value, str) and re.fullmatch(pattern, value) is not None
        self.expect(matches, what, f"text of the form {pattern}", value)
        return str(value)

    def sizes(self, what: str, value: Any) -> tuple[int, ...]:
        """Return sizes of dimensions whose product is no absurd number of elements."""
        is_list = isinstance(value, list) and len(value) <= MAX_DIMS
        is_shape = is_list and all(type(n) is int and 0 <= n < MAX_SIZE for n in value)
        self.expect(is_shape, what, "a shape", value)
        count = prod(max(n, 1) for n in value)
        self.expect(count < MAX_ELEMENTS, what, f"under {MAX_ELEMENTS} elements", value)
        return tuple(value)
