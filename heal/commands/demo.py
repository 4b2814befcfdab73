"""Train a small GPT on the CPU, break it a dozen times, and watch it heal.

The text that it learns ships with Python. Takes about a minute on two quiet cores. Ends with a
table of faults and what they cost, the final loss beside that of the undisturbed run, and a plot.
"""

import argparse
from pathlib import Path

from heal.commands.arguments import at_least_one

STEPS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--steps", type=at_least_one, default=STEPS, help="optimizer steps of each run"
    )
    parser.add_argument("--seed", type=int, default=0, help="of model, data and faults")
    parser.add_argument("--run-dir", type=Path, default=Path("heal-demo"), help="for the journal")
    parser.add_argument("--plain", action="store_true", help="no progress bar, no colours")


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; 1 if a fault went unnoticed, or did not strike."""
    from heal import demo

    demo.quiet_threads()
    console = demo.console_for(arguments.plain)
    found = demo.demonstrate(
        arguments.steps, arguments.seed, arguments.run_dir, console, not arguments.plain
    )
    return int(found.num_not_struck > 0 or any(outcome.is_missed for outcome in found.outcomes))
