"""The command line: ``heal <command>``. The commands are listed in :mod:`heal.commands`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import heal
from heal.commands import COMMANDS


class ShowVersion(argparse.Action):
    """Read the version only when it is asked for: it comes from zclip, which imports torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"heal {heal.__version__}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="heal", description="Training runs that heal themselves.")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
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
