"""Follow a run in the terminal while it trains: progress, loss, events, rank by rank.

heal watch runs/7

Waits for a run that has not begun; says how a finished one ended. Ctrl-C ends the watching, not
the run. Reads the journal only, so that it works from any machine that sees the folder.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", type=Path, help="the run_dir that was given to Healer")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks")
    parser.add_argument("--plain", action="store_true", help="lines only, no screen")


def run(arguments: argparse.Namespace) -> int:
    """Follow the run; 2 if the arguments make no sense."""
    from heal.watch.follow import follow

    if not 0.05 <= arguments.interval <= 3600:
        print(
            f"heal watch: --interval is {arguments.interval:g}; wanted 0.05 to 3600 seconds",
            file=sys.stderr,
        )
        return 2
    if arguments.run_dir.is_file():
        print(f"heal watch: {arguments.run_dir} is a file; wanted a folder", file=sys.stderr)
        return 2
    follow(arguments.run_dir, interval=arguments.interval, plain=arguments.plain)
    return 0
