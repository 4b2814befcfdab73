"""Settings as TOML text: read with a closed schema, written with a comment for each."""

import sys
import textwrap
from typing import Any

from heal.settings import ConfigError, settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMENT_COLUMNS = 98


def read_settings(text: str, table: str, where: str) -> dict[str, Any]:
    """Return the values of ``table``, or those at the top if the text has no such table.

    Raises:
        ConfigError: the text is not TOML; ``where`` says whose text it is.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    ours = tables.get(table, tables)
    if not isinstance(ours, dict):
        raise ConfigError(f"{table} is {ours!r}; wanted a table")
    return ours


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
