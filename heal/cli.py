"""The command line: ``heal <command>``.

A command is three names: its help, what it takes, and ``run(arguments) -> exit code``. A command
imports what it needs when it runs, so that ``heal init`` never waits for torch.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import heal
from heal.config import ConfigError, HealingConfig

if TYPE_CHECKING:
    from heal.doctor import Finding
    from heal.healer import Healer


def at_least_one(word: str) -> int:
    """Return the whole number that a word is, 1 or more; argparse names the argument."""
    if not word.strip().isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {word!r}")
    return int(word)


DEMO_HELP = """Train a small GPT on the CPU, break it a dozen times, and watch it heal.

The text that it learns ships with Python. Takes about a minute on two quiet cores. Ends with a
table of faults and what they cost, the final loss beside that of the undisturbed run, and a plot.
"""

STEPS = 400


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--steps", type=at_least_one, default=STEPS, help="optimizer steps of each run"
    )
    parser.add_argument("--seed", type=int, default=0, help="of model, data and faults")
    parser.add_argument("--run-dir", type=Path, default=Path("heal-demo"), help="for the journal")
    parser.add_argument("--plain", action="store_true", help="no progress bar, no colours")


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demonstration; 1 if a fault went unnoticed, or did not strike."""
    from heal.testing import demo

    demo.quiet_threads()
    console = demo.console_for(arguments.plain)
    found = demo.demonstrate(
        arguments.steps, arguments.seed, arguments.run_dir, console, not arguments.plain
    )
    return int(found.num_not_struck > 0 or any(outcome.is_missed for outcome in found.outcomes))


DOCTOR_HELP = """Check checkpoints, settings or the cluster, and say what to do about each fault.

heal doctor checkpoints/
heal doctor --config heal.toml
heal doctor checkpoints/ --cluster

Every byte of every checkpoint is read; --quick looks at the manifests only. Exit code: 0 if all is
well, 1 if there are warnings, 2 if there are errors.
"""

SIGNS = {"ok": "ok   ", "warn": "WARN ", "error": "ERROR"}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("checkpoints", nargs="?", type=Path, help="folder of checkpoints")
    parser.add_argument("--quick", action="store_true", help="do not read the tensors")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a heal.toml to look at")
    parser.add_argument(
        "--cluster", action="store_true", help="look at launcher, network, GPU, folder and clock"
    )


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings; return the exit code of the gravest."""
    found = check_all(arguments)
    if found is None:
        print(
            "heal doctor: expected a folder of checkpoints, --config heal.toml or --cluster, got "
            "none of them",
            file=sys.stderr,
        )
        return 2
    for finding in found:
        print(f"{SIGNS[finding.level]} {finding.what}")
        if finding.todo:
            print(f"      {finding.todo}")
    levels = {finding.level for finding in found}
    return 2 if "error" in levels else 1 if "warn" in levels else 0


def check_all(arguments: argparse.Namespace) -> "list[Finding] | None":
    """Return the findings of every check that was asked for; None if none was."""
    found: list[Finding] = []
    asked = False
    if arguments.checkpoints is not None:
        from heal.doctor import check_checkpoints

        asked = True
        found += check_checkpoints(arguments.checkpoints, quick=arguments.quick)
    if arguments.config is not None:
        from heal.doctor import check_config

        asked = True
        found += check_config(arguments.config)
    if arguments.cluster:
        from heal.doctor import check_cluster

        asked = True
        found += check_cluster(shared_dir=arguments.checkpoints)
    return found if asked else None


DRILL_HELP = """Break a training run of your own, and see how it heals.

heal drill train:build --steps 300
heal drill train:build --fault nan_gradient@50 --fault nan_loss@100x6 --fault bad_batch~0.01

``train:build`` names a function in a module that can be imported from here. Called without
arguments it returns ``(healer, train_step, loader)``, as for ``healer.run(train_step, loader)``.
Without --fault a dozen faults are spread over the run. The exit code is 0 if every fault struck,
was found and healed, 1 if one was missed or did not strike, that of the halt if healing came to its
end, 2 on bad arguments and if the function does not make a run.
"""

MISSED = 1  # the exit code if a fault was not found, or did not strike


def add_drill_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("target", metavar="module:function", help="makes the run")
    parser.add_argument("--steps", type=at_least_one, default=300, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of what is hit")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="FAULT", help="kind@attempt or kind~rate"
    )
    parser.add_argument("--plain", action="store_true", help="no progress bar, no colours")


def run_drill(arguments: argparse.Namespace) -> int:
    """Run the drill; return the exit code that is told above."""
    from heal.actions import HealingError
    from heal.testing import demo
    from heal.testing.drill import Drill, parse_fault, standard_faults

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
    except HealingError as halt:
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
    from heal.healer import Healer

    module, colon, function = target.partition(":")
    if not colon:
        raise ValueError(f"expected module:function, got {target!r}")
    sys.path.insert(0, "")
    build = getattr(import_module(module), function)
    try:
        made = build()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        raise ValueError(f"{target} raised {error!r} at {where}") from error
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], Healer):
        kinds = [type(item).__name__ for item in made] if isinstance(made, tuple) else made
        raise ValueError(f"{target}: expected (healer, train_step, loader), got {kinds}")
    return made


FORECAST_HELP = """Moved: ``python -m tools.forecast train`` or ``evaluate``, in the repository.

The corpus and the training of the forecast are not part of the installed package.
"""


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what the command took, to say where it went."""
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_forecast(arguments: argparse.Namespace) -> int:
    """Say where the command is now; 2 because nothing was done."""
    words = " ".join(["python -m tools.forecast", *arguments.words])
    print(
        f"heal forecast: moved out of the package; in a checkout of the repository run: {words}",
        file=sys.stderr,
    )
    return 2


INIT_HELP = """Print a commented heal.toml with every setting, for you to change.

heal init > heal.toml
heal init --preset aggressive lr_factor=0.7
"""

PRESETS: dict[str, Callable[[], HealingConfig]] = {
    "default": HealingConfig,
    "aggressive": HealingConfig.aggressive,
    "conservative": HealingConfig.conservative,
}


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--preset", choices=PRESETS, default="default", help="where to start")
    parser.add_argument("--output", metavar="FILE", help="write here, not to standard output")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings to change")


def run_init(arguments: argparse.Namespace) -> int:
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


REPORT_HELP = """Show what happened in a run: one HTML page that needs no network, a text, or JSON.

heal report runs/7                      # writes runs/7/report.html
heal report runs/7 --text
heal report runs/7 --run 1              # the first of several runs in that folder
heal report runs/7 --json | jq .summary.totals
"""

PAGE = "report.html"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", type=Path, help="the run_dir that was given to Healer")
    parser.add_argument(
        "--output", "-o", metavar="FILE", help=f"where to write; RUN_DIR/{PAGE} by default, - shows"
    )
    parser.add_argument(
        "--run", type=at_least_one, metavar="N", help="which run of the folder; the last by default"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it for a terminal")
    form.add_argument("--json", action="store_true", help="print it for machines")


def run_report(arguments: argparse.Namespace) -> int:
    """Make the report; 2 if the folder holds no run, 1 if the report cannot be written."""
    from heal.report.collect import read_run
    from heal.report.data import report_data
    from heal.report.page import make_page
    from heal.report.read import NotARun, replace_text
    from heal.report.text import make_text

    try:
        report = read_run(arguments.run_dir, run=arguments.run)
    except (NotARun, OSError) as error:
        print(f"heal report: {error}", file=sys.stderr)
        return 2
    for sentence in report.damage.sentences():
        print(f"heal report: {sentence}", file=sys.stderr)
    goes_out = arguments.output == "-" or (
        not arguments.output and (arguments.text or arguments.json)
    )
    if arguments.json:
        made = json.dumps(report_data(report), allow_nan=False) + "\n"
    elif arguments.text:
        made = make_text(report, to_terminal=goes_out)
    else:
        made = make_page(report)
    if goes_out:
        sys.stdout.write(made)
        return 0
    path = Path(arguments.output) if arguments.output else arguments.run_dir / PAGE
    try:
        replace_text(path, made)
    except OSError as error:
        print(f"heal report: {error}; --output says where to write instead", file=sys.stderr)
        return 1
    is_page = not (arguments.text or arguments.json)
    print(f"{path} ({len(made.encode()) / 1e6:.1f} MB){': open it in a browser' * is_page}")
    return 0


WATCH_HELP = """Follow a run in the terminal while it trains: progress, loss, events, rank by rank.

heal watch runs/7

Waits for a run that has not begun; says how a finished one ended. Ctrl-C ends the watching, not
the run. Reads the journal only, so that it works from any machine that sees the folder.
"""


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", type=Path, help="the run_dir that was given to Healer")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks")
    parser.add_argument("--plain", action="store_true", help="lines only, no screen")


def run_watch(arguments: argparse.Namespace) -> int:
    """Follow the run; 2 if the arguments make no sense."""
    from heal.report.watch import follow

    if not 0.05 <= arguments.interval <= 3600:
        print(
            f"heal watch: --interval: expected 0.05 to 3600 seconds, got {arguments.interval:g}",
            file=sys.stderr,
        )
        return 2
    if arguments.run_dir.is_file():
        print(f"heal watch: expected a folder, got the file {arguments.run_dir}", file=sys.stderr)
        return 2
    follow(arguments.run_dir, interval=arguments.interval, plain=arguments.plain)
    return 0


class Command(NamedTuple):
    """One sub-command: a line for the list of commands, its own help, and what it does."""

    line: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "demo": Command(
        "train a small GPT, break it a dozen times, watch it heal",
        DEMO_HELP,
        add_demo_arguments,
        run_demo,
    ),
    "doctor": Command(
        "examine checkpoints, settings or the cluster",
        DOCTOR_HELP,
        add_doctor_arguments,
        run_doctor,
    ),
    "drill": Command(
        "break a training run of your own and see how it heals",
        DRILL_HELP,
        add_drill_arguments,
        run_drill,
    ),
    "forecast": Command(
        "moved to the repository: python -m tools.forecast",
        FORECAST_HELP,
        add_forecast_arguments,
        run_forecast,
    ),
    "init": Command(
        "print a commented heal.toml",
        INIT_HELP,
        add_init_arguments,
        run_init,
    ),
    "report": Command(
        "show what happened in a run: a page, a text or JSON",
        REPORT_HELP,
        add_report_arguments,
        run_report,
    ),
    "watch": Command(
        "follow a run in the terminal while it trains", WATCH_HELP, add_watch_arguments, run_watch
    ),
}
"""Every command, in alphabetical order."""


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
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.line, add_help=False)
    called = parser.parse_args(words[:1]).command
    command = COMMANDS[called]
    own = argparse.ArgumentParser(
        prog=f"heal {called}",
        description=command.help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(own)
    return int(command.run(own.parse_args(words[1:])))


if __name__ == "__main__":
    raise SystemExit(main())
