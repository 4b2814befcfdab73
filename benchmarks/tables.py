"""Tables of results, as the documentation includes them."""

from collections.abc import Sequence
from pathlib import Path


def publish(
    path: Path | None, head: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Say under which circumstances a table was made, and write it in Markdown if it is wanted.

    Args:
        path: of the file, whose folder is made if needed; None if it is not to be written.
        head: two lines, the names of the columns and how they are aligned.
        rows: a cell for each column.
        note: a sentence, without its full stop.
    """
    print(note)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # after a quarter of an hour it must not fail
    lines = [*head, *("| " + " | ".join(row) + " |" for row in rows)]
    path.write_text("\n".join([*lines, "", note + ".", ""]))
