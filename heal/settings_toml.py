"""Settings as TOML text: read with a closed schema, written with a comment for each."""

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from heal.settings import ConfigError, settings_of, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMENT_COLUMNS = 98


def text_of(path_or_text: str | os.PathLike[str]) -> tuple[str, str]:
    """Return TOML text and whose it is.

    A string with a line break or an equals sign is text itself, unless it ends in ``.toml`` or is
    the path of a file.

    Raises:
        ConfigError: the file is not UTF-8.
        OSError: there is no such file.
        TypeError: it is neither.
    """
    if not isinstance(path_or_text, (str, os.PathLike)):
        kind = type(path_or_text).__name__
        raise TypeError(f"path_or_text is {kind}; wanted a path, or TOML as a str")
    if isinstance(path_or_text, str) and _is_text(path_or_text):
        return path_or_text, "the text"
    try:
        return Path(path_or_text).read_text(encoding="utf-8"), str(path_or_text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(
            f"{path_or_text} is not UTF-8: byte 0x{byte:02x} at position {error.start}; wanted a "
            "text file with TOML"
        ) from None


def read_settings(text: str, table: str, where: str, kind: type) -> dict[str, Any]:
    """Return the values of ``table``, or those at the top if the text has no such table.

    Raises:
        ConfigError: the text is not TOML (``where`` says whose text it is), or a setting of
            ``kind`` stands outside of the table and would have no effect.
    """
    try:
        tables = tomllib.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        raise ConfigError(f"{where} is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(
            f"{where} is nested too deeply; expected one table [{table}] with plain values"
        ) from None
    ours: Any = tables.get(table, tables)
    if not isinstance(ours, dict):
        raise ConfigError(f"{table} is {ours!r}; wanted a table")
    if ours is not tables:
        _refuse_outside(tables, table, where, kind)
    return dict(ours)


def _refuse_outside(tables: dict[str, Any], table: str, where: str, kind: type) -> None:
    """Other keys may belong to others, even one named ``data``; what could be ours may not."""
    for name, (wanted, _, about) in settings_of(kind).items():
        value = tables.get(name)
        is_ours = isinstance(value, (int, float) if wanted is float else wanted)
        if is_ours and (not about.choices or value in about.choices):
            raise ConfigError(
                f"{name} = {shown(value)} stands before [{table}] in {where}, where it has no "
                f"effect; wanted it in the table [{table}]"
            )


def _is_text(string: str) -> bool:
    if "\n" in string or not string:
        return True
    return "=" in string and not string.endswith(".toml") and not os.path.isfile(string)


def write_settings(values: Any) -> str:
    """Return the settings of a dataclass instance as TOML that explains itself."""
    lines: list[str] = []
    group = ""
    for name, (kind, default, about) in settings_of(type(values)).items():
        if about.group != group:
            group = about.group
            lines += ["", f"# --- {group}"]
        value = getattr(values, name)
        changed = "" if value == default else f" Default: {_literal(default)}."
        comment = f"{about.doc} ({about.wanted(kind)}){changed}"
        lines += ["", *(f"# {line}" for line in textwrap.wrap(comment, COMMENT_COLUMNS - 2))]
        lines.append(f"{name} = {_literal(value)}")
    return "\n".join(lines).strip() + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
