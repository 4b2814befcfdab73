"""The command line: ``heal <command>``. The commands are listed in :mod:`heal.commands`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from heal.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="heal", description="Training runs that heal themselves.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, help_line) in COMMANDS.items():
        commands.add_parser(name, help=help_line, add_help=False)
    called = parser.parse_args(words[:1]).command
    module = import_module(COMMANDS[called][0])
    own = argparse.ArgumentParser(
        prog=f"heal {called}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(own)
    return int(module.run(own.parse_args(words[1:])))


if __name__ == "__main__":
    raise SystemExit(main())
