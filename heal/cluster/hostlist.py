"""Reads SLURM's short form of many host names: ``gpu[01-03,07],login``."""

import re
from collections.abc import Iterator

MOST_HOSTS = 100_000  # more is a slip of the pen, and would fill memory

_PART = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return every host that the text stands for, in its order.

    Raises:
        ValueError: it is not a list of hosts.
    """
    hosts: list[str] = []
    rest = text.strip()
    while rest:
        match = _PART.match(rest)
        part = match.group() if match else ""
        if not part or (len(part) < len(rest) and rest[len(part)] != ","):
            raise ValueError(
                f"{text!r} is not a list of hosts; wanted one like gpu[01-03,07],login"
            )
        for host in _expand(part, text):
            hosts.append(host)
            if len(hosts) > MOST_HOSTS:
                raise ValueError(f"{text[:80]!r} stands for more than {MOST_HOSTS} hosts")
        rest = rest[len(part) + 1 :]
    return tuple(hosts)


def _expand(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"{text!r} has the range {piece!r}; wanted one like 01-03")
        first, last = match.group(1), match.group(2) or match.group(1)
        for number in range(int(first), int(last) + 1):
            for end in _expand(tail, text):
                yield f"{head}{number:0{len(first)}d}{end}"
