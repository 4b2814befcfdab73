"""What a check of ``heal doctor`` has to say."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report: how grave it is, what was seen, what to do about it.

    Args:
        level: ``"ok"``, ``"warn"`` (it works, but not as well as it could) or ``"error"``.
        what: the thing that was looked at and how it is.
        todo: what to do next; "" where there is nothing to do.
    """

    level: Level
    what: str
    todo: str = ""
