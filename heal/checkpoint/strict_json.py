"""JSON as we write it and no other: what a hostile file could hide in it is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

from heal.checkpoint.errors import CheckpointRefused

MAX_DIGITS = 20  # of a whole number; larger ones are written as hexadecimal text


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

    def constant(word: str) -> Any:
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
