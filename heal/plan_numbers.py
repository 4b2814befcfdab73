"""Which numbers an action may be told. Settings are checked where they are read; a hook may
compute anything, and a plan with NaN in it would be carried out as it is.
"""

import math
from typing import Any

from heal.state.plain_values import plain


def check_number(action: Any, name: str, least: float = 0.0, most: float = math.inf) -> None:
    """Refuse what is no finite number from ``least`` to ``most``; numpy's and torch's are numbers.

    Raises:
        ValueError: names the action, the field, what it is and what was wanted.
    """
    _check(action, name, (int, float), f"a finite number{_range(least, most)}", least, most)


def check_above_zero(action: Any, name: str) -> None:
    """Refuse what is no finite number above 0: a factor of 0 could never be taken back."""
    _check(action, name, (int, float), "a finite number > 0", math.nextafter(0.0, 1.0), math.inf)


def check_count(action: Any, name: str, least: int = 0, most: float = math.inf) -> None:
    """Refuse what is no whole number from ``least`` to ``most``."""
    _check(action, name, (int,), f"a whole number{_range(least, most)}", least, most)


def _check(action: Any, name: str, kinds: Any, wanted: str, least: float, most: float) -> None:
    value = plain(getattr(action, name))
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        raise ValueError(f"{type(action).__name__}: {name} is {value!r}; wanted {wanted}")


def _range(least: float, most: float) -> str:
    return f" >= {least:g}" if math.isinf(most) else f" from {least:g} to {most:g}"
