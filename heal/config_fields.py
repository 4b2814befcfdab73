"""One setting: its default, what it means, which values it takes, and how these are checked.

Knows nothing of healing; :mod:`heal.config` lists the settings.
"""

import difflib
import functools
import math
import numbers
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
Class = TypeVar("Class", bound=type)

_KEY = "setting"
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MOST_BITS = 63  # of a whole number: what TOML promises, and what fits into a tensor
MOST_SHOWN = 80  # characters of a value in an error
_BOOLS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


class ConfigError(ValueError):
    """A setting is unknown or has a value it cannot have; the message names all three."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting beyond its name, type and default."""

    doc: str
    group: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def wanted(self, kind: type) -> str:
        """Return in words which values are taken."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">", self.above), (">=", self.least), ("<=", self.most))
            if bound is not None
        ]
        return " ".join([_WORDS[kind], " and ".join(bounds)]).strip()


def setting(default: T, doc: str, **details: Any) -> T:
    """Declare a setting as the default of a dataclass field; see :class:`Setting`."""
    return field(default=default, metadata={_KEY: Setting(doc, **details)})


def settings_of(kind: type) -> dict[str, tuple[type, Any, Setting]]:
    """Return type, default and description of every setting of a dataclass, by name."""
    group, found = "", {}  # a group goes on until the next one begins
    for f in fields(kind):
        about: Setting = f.metadata[_KEY]
        group = about.group or group
        found[f.name] = cast(type, f.type), f.default, replace(about, group=group)
    return found


@dataclass(frozen=True, slots=True)
class Renamed:
    """A setting that has another name now, and perhaps other words for its values."""

    to: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that has no effect any more, and why or what to use."""

    instead: str


Old = Mapping[str, Renamed | Removed]


def present_names(kind: type, values: Mapping[str, Any], old: Old) -> dict[str, Any]:
    """Return settings by their present names; warn once of all that are out of date.

    Raises:
        ConfigError: there is no setting of that name, and there was none, or a setting is given by
            its old and by its new name.
    """
    known = settings_of(kind)
    now: dict[str, Any] = {}
    advice: list[str] = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{shown(name)} = {shown(value)}: expected the name of a setting, a str, got "
                f"{type(name).__name__}"
            )
        entry = old.get(name)
        if name in known:
            now[name] = value
        elif entry is None:
            near = difflib.get_close_matches(name, known, n=1)
            wanted = near[0] if near else f"one of {', '.join(known)}"
            raise ConfigError(
                f"{name} = {shown(value)}: expected {wanted}, got no setting of that name"
            )
        elif isinstance(entry, Removed):
            advice.append(f"{name} has no effect: {entry.instead}")
        elif entry.to in values:
            raise ConfigError(
                f"{entry.to}: expected the setting once, got it as {name} too, its old name; "
                f"leave out {name}"
            )
        else:
            now[entry.to] = entry.values.get(value, value) if isinstance(value, str) else value
            advice.append(f"{name} = {shown(value)} is now {entry.to} = {shown(now[entry.to])}")
    if advice:
        text = f"settings of version 0.1, an error from 0.3 on: {'; '.join(advice)}"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return now


def accepts_old(old: Old) -> Callable[[Class], Class]:
    """Decorate a dataclass of settings: old names are translated, unknown ones raise by name."""

    def decorate(kind: Class) -> Class:
        init = kind.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def checked_init(self: Any, *values: Any, **settings: Any) -> None:
            init(self, *values, **present_names(kind, settings, old))

        kind.__init__ = checked_init  # type: ignore[misc]
        return kind

    return decorate


def shown(value: Any) -> str:
    """Return a value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}\u2026"


def checked(name: str, value: Any, kind: type, about: Setting) -> Any:
    """Return ``value`` as the type of the setting; raise ConfigError if it cannot have it."""
    try:
        return _converted(value, kind, about)
    except ValueError as error:
        wanted = about.wanted(kind)
        raise ConfigError(f"{name}: expected {wanted}, got {shown(value)}{error}") from None


def _converted(value: Any, kind: type, about: Setting) -> Any:
    """Return ``value`` as a ``kind``; a ValueError says what more is to be said of it."""
    if kind in (bool, str):
        is_right = isinstance(value, kind)
    else:
        number = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, number):
            raise ValueError
        if kind is int and int(cast(int, value)).bit_length() > MOST_BITS:
            raise ValueError(f", which has more than {MOST_BITS} bits")
        try:
            value = kind(value)
        except OverflowError:
            raise ValueError(", which no float can hold") from None
        is_right = (
            math.isfinite(value)
            and (about.least is None or value >= about.least)
            and (about.most is None or value <= about.most)
            and (about.above is None or value > about.above)
        )
    if not is_right or (about.choices and value not in about.choices):
        raise ValueError
    return value


def parsed(name: str, text: str, kind: type, about: Setting) -> Any:
    """Read a value from a command line; only what the type allows, nothing is evaluated."""
    value: Any = text
    try:
        if kind is bool:
            value = _BOOLS[text.lower()]
        elif kind is not str:
            value = kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name}: expected {about.wanted(kind)}, got {shown(text)}") from None
    return checked(name, value, kind, about)


# Settings as TOML text: read with a closed schema, written with a comment for each.


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMENT_COLUMNS = 98


def text_of(path_or_text: str | os.PathLike[str]) -> tuple[str, str]:
    """Return TOML text and whose it is; see :meth:`heal.config.HealingConfig.from_toml`."""
    if not isinstance(path_or_text, (str, os.PathLike)):
        kind = type(path_or_text).__name__
        raise TypeError(f"path_or_text: expected a path, or TOML as a str, got {kind}")
    if isinstance(path_or_text, str) and _is_text(path_or_text):
        return path_or_text, "the text"
    try:
        return Path(path_or_text).read_text(encoding="utf-8"), str(path_or_text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(
            f"{path_or_text}: expected a text file with TOML, got byte 0x{byte:02x} at position "
            f"{error.start}, which is not UTF-8"
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
            f"{where}: expected one table [{table}] with plain values, got tables nested too deeply"
        ) from None
    ours: Any = tables.get(table, tables)
    if not isinstance(ours, dict):
        raise ConfigError(f"{table}: expected a table, got {ours!r}")
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
                f"{name} = {shown(value)}: expected it in the table [{table}], got it before "
                f"[{table}] in {where}, where it has no effect"
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
