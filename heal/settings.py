"""One setting: its default, what it means, which values it takes, and how these are checked.

Knows nothing of healing; :mod:`heal.config` lists the settings.
"""

import difflib
import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
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
    return {
        f.name: (cast(type, f.type), None if f.default is MISSING else f.default, f.metadata[_KEY])
        for f in fields(kind)
    }


def check_names(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse a setting that does not exist, and guess which one was meant.

    Raises:
        ConfigError: there is no setting of that name.
    """
    known = settings_of(kind)
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{shown(name)} = {shown(value)}: wanted the name of a setting, a str"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            wanted = near[0] if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{name} = {shown(value)}: there is no such setting; wanted {wanted}")


def refuses_unknown(kind: Class) -> Class:
    """Decorate a dataclass of settings: an unknown one is named with its value and a guess."""
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked_init(self: Any, *values: Any, **settings: Any) -> None:
        check_names(kind, settings)
        init(self, *values, **settings)

    kind.__init__ = checked_init  # type: ignore[misc]
    return kind


def shown(value: Any) -> str:
    """Return a value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}\u2026"


def checked(name: str, value: Any, kind: type, about: Setting) -> Any:
    """Return ``value`` as the type of the setting.

    Raises:
        ConfigError: it is of another type, out of range or not finite.
    """
    wrong = ConfigError(f"{name} is {shown(value)}; wanted {about.wanted(kind)}")
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise wrong
    else:
        wanted = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise wrong
        if kind is int and int(cast(int, value)).bit_length() > MOST_BITS:
            raise ConfigError(f"{wrong}, of at most {MOST_BITS} bits")
        try:
            value = kind(value)
        except OverflowError:
            raise ConfigError(f"{wrong} that a float can hold") from None
        if not math.isfinite(value):
            raise wrong
        if about.least is not None and value < about.least:
            raise wrong
        if about.most is not None and value > about.most:
            raise wrong
        if about.above is not None and value <= about.above:
            raise wrong
    if about.choices and value not in about.choices:
        raise wrong
    return value


def parsed(name: str, text: str, kind: type, about: Setting) -> Any:
    """Read a value from a command line; only what the type allows, nothing is evaluated.

    Raises:
        ConfigError: the text does not say a value that the setting can have.
    """
    value: Any = text
    try:
        if kind is bool:
            value = _BOOLS[text.lower()]
        elif kind is not str:
            value = kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {shown(text)}; wanted {about.wanted(kind)}") from None
    return checked(name, value, kind, about)
