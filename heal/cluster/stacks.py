"""Writes down where every thread of this process is."""

import faulthandler
import os
import sys
from pathlib import Path

from heal.journal.json_lines import now


def dump_stacks(run_dir: str | os.PathLike[str] | None, why: str, rank: int | None = None) -> str:
    """Append the Python stacks of all threads to ``<why>.rank<r>.txt``; never raises.

    Args:
        run_dir: folder of the file, made if needed; standard error if None.
        why: first part of the file's name.
        rank: of this process; the environment's ``RANK`` if None.

    Returns:
        The path of the file, or "standard error".
    """
    if run_dir is not None:
        rank = rank if rank is not None else int(os.environ.get("RANK", "0") or 0)
        path = Path(run_dir) / f"{why}.rank{rank}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{now()} rank {rank} pid {os.getpid()}: {why}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return str(path)
        except OSError as error:
            print(f"heal: cannot write {path}: {error}", file=sys.stderr)
    try:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    except (OSError, ValueError):
        return "nowhere"  # no standard error either: whoever took it wants silence
    return "standard error"
