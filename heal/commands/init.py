"""Print a commented heal.toml with every setting, for you to change.

heal init > heal.toml
heal init --preset aggressive lr_factor=0.7
"""

import argparse
import os
import sys
from collections.abc import Callable

from heal.config import ConfigError, HealingConfig

PRESETS: dict[str, Callable[[], HealingConfig]] = {
    "default": HealingConfig,
    "aggressive": HealingConfig.aggressive,
    "conservative": HealingConfig.conservative,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--preset", choices=PRESETS, default="default", help="where to start")
    parser.add_argument("--output", metavar="FILE", help="write here, not to standard output")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings to change")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the settings; 2 if a setting is wrong, 1 if the file cannot be written."""
    try:
        text = PRESETS[arguments.preset]().override(arguments.settings).to_toml()
    except ConfigError as error:
        print(f"heal init: {error}", file=sys.stderr)
        return 2
    text = f"# Settings of heal; preset: {arguments.preset}.\n\n{text}"
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if arguments.force else os.O_EXCL)
    try:
        with open(os.open(arguments.output, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"heal init: {arguments.output} exists; --force overwrites it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"heal init: {error}", file=sys.stderr)
        return 1
    return 0
