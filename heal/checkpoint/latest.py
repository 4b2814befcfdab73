"""Which checkpoint all ranks use: the newest that every one of them can read."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from heal.checkpoint import strict_json
from heal.checkpoint.errors import CheckpointError
from heal.checkpoint.folders import StepFolder, committed
from heal.checkpoint.ranks import Ranks

Found = TypeVar("Found")
NONE = [-1, 0]


def newest_common(
    directory: Path,
    ranks: Ranks,
    read: Callable[[StepFolder], Found],
    note: Callable[[str], None],
    most: int | None = None,
) -> tuple[StepFolder, Found] | None:
    """Return the newest checkpoint that every rank can read, and what was read of it.

    Every rank has to call this. One collective if the newest is good everywhere; one more for
    each that some rank could not read: all fall back together.

    Args:
        directory: of the store.
        ranks: who has to agree.
        read: reads and verifies this rank's part.
        note: told of every checkpoint that was passed over.
        most: the latest step that will do.
    """
    bound: StepFolder | None = None
    kept: tuple[StepFolder, Found] | None = None
    while True:
        if kept is None or (bound is not None and bound < kept[0]):
            kept = _newest_readable(directory, read, note, bound, most)
        mine = NONE if kept is None else [kept[0].step, kept[0].retry]
        said = [strict_json.from_bytes(word, directory) for word in ranks.gather(_word(mine))]
        lowest = min(map(tuple, said))
        if lowest == tuple(NONE):
            return None
        if all(tuple(word) == lowest for word in said):
            return kept
        bound = StepFolder(*lowest)
        if kept is not None and bound < kept[0]:
            note(f"{kept[0].path.name}: another rank cannot read it; trying an older one")


def _newest_readable(
    directory: Path,
    read: Callable[[StepFolder], Found],
    note: Callable[[str], None],
    bound: StepFolder | None,
    most: int | None,
) -> tuple[StepFolder, Found] | None:
    for folder in reversed(committed(directory)):
        if (bound is not None and folder > bound) or (most is not None and folder.step > most):
            continue
        try:
            return folder, read(folder)
        except (CheckpointError, OSError, MemoryError) as error:
            note(f"{folder.path.name} cannot be used: {error}")
    return None


def _word(folder: list[int]) -> bytes:
    return strict_json.to_bytes(folder)
