"""Moved: ``python -m tools.forecast train`` or ``evaluate``, in a checkout of the repository.

The corpus and the training of the forecast are not part of the installed package.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what the command took, to say where it went."""
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Say where the command is now; 2 because nothing was done."""
    words = " ".join(["python -m tools.forecast", *arguments.words])
    print(
        f"heal forecast: moved out of the package; in a checkout of the repository run: {words}",
        file=sys.stderr,
    )
    return 2
