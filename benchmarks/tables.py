"""Tables of results, as the documentation includes them."""

from collections.abc import Sequence
from pathlib import Path


def write_table(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    """Write a table in Markdown, and below it under which circumstances it was made.

    Args:
        path: of the file.
        head: two lines, the names of the columns and how they are aligned.
        rows: a cell for each column.
        note: a sentence, without its full stop.
    """
    lines = [*head, *("| " + " | ".join(row) + " |" for row in rows)]
    path.write_text("\n".join([*lines, "", note + ".", ""]))
