"""What a rank that must leave in the middle of a step asks of the run that is started next.

A resumed run is bit by bit the run that died, so that it would meet the same batch again. The rank
that could not use it says so in a file beside the checkpoints, and every rank of the next start
leaves the batch out, or cuts its batches finer.
"""

import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heal.checkpoint import strict_json
from heal.checkpoint.errors import CheckpointError
from heal.checkpoint.files import make_folder, read_file, remove_file, write_file

NAME = re.compile(r"remedy-(\d+)-rank(\d+)-(\d+)\.json")
MAX_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do otherwise from a step on.

    Attributes:
        step: that could not be taken.
        rank: that could not take it.
        cause: of :class:`heal.causes.Cause`, by its value.
        error: what was raised.
        batches: to leave out, by the number of batches drawn before each.
        micro: how finely to cut, as :meth:`heal.step.micro_batch.MicroBatcher.state` tells it.
    """

    step: int
    rank: int
    cause: str
    error: str = ""
    batches: list[int] = field(default_factory=list)
    micro: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, page: Any) -> "Remedy":
        """Return what a file says.

        Raises:
            ValueError: it says something else.
        """
        try:
            remedy = cls(**page)
            numbers = [remedy.step, remedy.rank, *remedy.batches, *remedy.micro.values()]
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError("expected whole numbers")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a remedy: {error}") from None
        return remedy


class Remedies:
    """The files of one checkpoint folder.

    Args:
        directory: of the checkpoints; all ranks see it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, remedy: Remedy) -> bool:
        """Write a remedy; False if the disk does not take it."""
        there = self.read()
        count = sum(1 for other in there if (other.step, other.rank) == (remedy.step, remedy.rank))
        name = f"remedy-{remedy.step}-rank{remedy.rank}-{count}.json"
        try:
            make_folder(self._directory)
            write_file(self._directory / name, [strict_json.to_bytes(asdict(remedy))])
        except OSError:
            return False
        return True

    def read(self) -> list[Remedy]:
        """Return all that can be read, in the order of their steps."""
        found = []
        for path in self._paths():
            try:
                page = strict_json.from_bytes(read_file(path, MAX_BYTES), path)
                found.append(Remedy.from_json(page))
            except (CheckpointError, OSError, ValueError):
                continue  # torn or forged: the run meets the batch again, and says so again
        return sorted(found, key=lambda remedy: (remedy.step, remedy.rank))

    def forget_before(self, step: int) -> None:
        """Remove those of steps that are done; what cannot be removed does no harm."""
        for path in self._paths():
            match = NAME.fullmatch(path.name)
            if match and int(match[1]) < step:
                try:
                    remove_file(path)
                except OSError:
                    continue

    def _paths(self) -> list[Path]:
        try:
            names = os.listdir(self._directory)
        except OSError:
            return []
        return [self._directory / name for name in sorted(names) if NAME.fullmatch(name)]
