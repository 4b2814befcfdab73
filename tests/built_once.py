"""One build at a time: of several test workers that want a file, one makes it and the rest wait."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def built_once(target: Path) -> Iterator[Path | None]:
    """Yield where to build, to be moved to ``target`` if all goes well; None if it is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        unfinished = target.with_name(f"{os.getpid()}-{target.name}")
        yield unfinished
        unfinished.replace(target)
