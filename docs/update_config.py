"""Writes ``docs/config.md`` from the dataclass; a test fails if the page is not current.

python docs/update_config.py
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from heal.config import OLD, HealingConfig  # noqa: E402
from heal.config_fields import Renamed, settings_of  # noqa: E402

PAGE = ROOT / "docs" / "config.md"

HEAD = """# Settings

Every setting of `heal.HealingConfig`, by the sections of `heal.toml`.
[Choose settings](choose-settings.md) says which to change. `python docs/update_config.py` writes
this page from the dataclass.

```python
from heal import HealingConfig

config = HealingConfig(nan_patience=3, lr_factor=0.7)
config = HealingConfig.aggressive()  # or .conservative()
config = config.override(["lr_factor=0.8"])  # from a command line
```

`heal init > heal.toml` prints all of them with comments, and `HealingConfig.from_toml("heal.toml")`
reads them. An unknown key, a wrong type, or a value out of range or not finite raises an error that
names the key, the value and what was expected.

The last column shows where a preset differs from the default: **a** for `aggressive()`, which acts
early and often, **c** for `conservative()`, which acts late and rarely.
"""

OLD_HEAD = """
## Settings of version 0.1

Accepted until 0.3, with a `DeprecationWarning`.

| old setting | now |
|---|---|"""


def page() -> str:
    """Return the text of the page."""
    lines, group = [HEAD], ""
    for name, (kind, default, about) in settings_of(HealingConfig).items():
        if about.group != group:
            group = about.group
            lines += [
                f"\n## {group[0].upper()}{group[1:]}\n",
                "| setting | default | takes | meaning | presets |",
                "|---|---|---|---|---|",
            ]
        lines.append(
            f"| `{name}` | `{_shown(default)}` | {about.wanted(kind)} | {about.doc} | "
            f"{_presets(name, default)} |"
        )
    lines += [OLD_HEAD, *map(_old, OLD)]
    return "\n".join(lines) + "\n"


def _old(name: str) -> str:
    entry = OLD[name]
    if not isinstance(entry, Renamed):
        return f"| `{name}` | no effect: {entry.instead} |"
    words = ", ".join(f'`"{old}"` is `"{new}"`' for old, new in entry.values.items())
    return f"| `{name}` | `{entry.to}`{': ' + words if words else ''} |"


def _presets(name: str, default: Any) -> str:
    """Return what the presets have instead of the default, empty if nothing."""
    presets = {"a": HealingConfig.aggressive(), "c": HealingConfig.conservative()}
    others = {letter: getattr(preset, name) for letter, preset in presets.items()}
    return ", ".join(f"**{k}** `{_shown(v)}`" for k, v in others.items() if v != default)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
