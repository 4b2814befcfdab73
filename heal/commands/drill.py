"""Break a training run of your own, and see how it heals.

heal drill train:build --steps 300
heal drill train:build --fault nan_gradient@50 --fault nan_loss@100x6 --fault bad_batch~0.01

``train:build`` names a function in a module that can be imported from here. Called without
arguments it returns ``(healer, train_step, loader)``, as for ``healer.run(train_step, loader)``.
Without --fault a dozen faults are spread over the run. The exit code is 0 if every fault was found
and healed, 1 if one was missed, that of the halt if healing came to its end, 2 on bad arguments.
"""

import argparse
import sys
from importlib import import_module

MISSED = 1  # the exit code if a fault was not found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("target", metavar="module:function", help="makes the run")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of what is hit")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="FAULT", help="kind@attempt or kind~rate"
    )
    parser.add_argument("--plain", action="store_true", help="no progress bar, no colours")


def run(arguments: argparse.Namespace) -> int:
    """Run the drill; return the exit code that is told above."""
    from heal import demo
    from heal.actions import CannotHeal
    from heal.drill import Drill, parse_fault, standard_faults

    try:
        faults = [parse_fault(word) for word in arguments.fault]
        module, colon, function = arguments.target.partition(":")
        if not colon:
            raise ValueError(f"{arguments.target!r} names no function; wanted module:function")
        sys.path.insert(0, "")
        healer, train_step, loader = getattr(import_module(module), function)()
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"heal drill: {error}", file=sys.stderr)
        return 2
    drill = Drill(healer, faults or standard_faults(arguments.steps), arguments.seed)
    code = 0
    try:
        drill.run(train_step, loader, arguments.steps, not arguments.plain)
    except CannotHeal as halt:
        print(f"heal drill: {halt}", file=sys.stderr)
        code = halt.exit_code
    demo.console_for(arguments.plain).print(demo.outcome_table(drill.outcomes))
    if drill.missed:
        print(f"heal drill: not found: {', '.join(drill.missed)}", file=sys.stderr)
    return code or (MISSED if drill.missed else 0)
