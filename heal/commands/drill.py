"""Break a training run of your own, and see how it heals.

heal drill train:build --steps 300
heal drill train:build --fault nan_gradient@50 --fault nan_loss@100x6 --fault bad_batch~0.01

``train:build`` names a function in a module that can be imported from here. Called without
arguments it returns ``(healer, train_step, loader)``, as for ``healer.run(train_step, loader)``.
Without --fault a dozen faults are spread over the run. The exit code is 0 if every fault struck,
was found and healed, 1 if one was missed or did not strike, that of the halt if healing came to its
end, 2 on bad arguments and if the function does not make a run.
"""

import argparse
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from heal.commands.arguments import at_least_one

if TYPE_CHECKING:
    from heal.loop import Healer

MISSED = 1  # the exit code if a fault was not found, or did not strike


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("target", metavar="module:function", help="makes the run")
    parser.add_argument("--steps", type=at_least_one, default=300, help="optimizer steps")
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
        healer, train_step, loader = _build(arguments.target)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"heal drill: {error}", file=sys.stderr)
        return 2
    faults = faults or standard_faults(arguments.steps, healer.optimizers)
    drill = Drill(healer, faults, arguments.seed)
    code = 0
    try:
        drill.run(train_step, loader, arguments.steps, not arguments.plain)
    except CannotHeal as halt:
        print(f"heal drill: {halt}", file=sys.stderr)
        code = halt.exit_code
    demo.console_for(arguments.plain).print(demo.outcome_table(drill.outcomes))
    if drill.missed:
        print(f"heal drill: not found: {', '.join(drill.missed)}", file=sys.stderr)
    if drill.not_struck:
        told = ", ".join(map(str, drill.not_struck))
        print(f"heal drill: did not strike, or found nothing to break: {told}", file=sys.stderr)
    return code or (MISSED if drill.missed or drill.not_struck else 0)


def _build(target: str) -> "tuple[Healer, Any, Any]":
    """Make the run that ``module:function`` names.

    Raises:
        ValueError: it names nothing, or what it names makes no run.
    """
    from heal.loop import Healer

    module, colon, function = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r} names no function; wanted module:function")
    sys.path.insert(0, "")
    build = getattr(import_module(module), function)
    try:
        made = build()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        raise ValueError(f"{target} raised {error!r} at {where}") from error
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], Healer):
        wanted = "wanted (healer, train_step, loader)"
        kinds = [type(item).__name__ for item in made] if isinstance(made, tuple) else made
        raise ValueError(f"{target} returned {kinds}; {wanted}")
    return made
