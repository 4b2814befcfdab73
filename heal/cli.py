"""The command line: ``heal <command>``.

Each command is a function ``run_<command>(arguments) -> exit code``; its docstring is its help. A
command imports what it needs when it runs, so that ``heal init`` never waits for torch.
"""

import argparse
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import heal
from heal.config import ConfigError, HealingConfig

if TYPE_CHECKING:
    from heal.healer import Healer

SIGNS = {"ok": "ok   ", "warn": "WARN ", "error": "ERROR"}
MISSED = 1  # the exit code of a drill if a fault was not found, or did not strike
PAGE = "report.html"
PRESETS: dict[str, Callable[[], HealingConfig]] = {
    "default": HealingConfig,
    "aggressive": HealingConfig.aggressive,
    "conservative": HealingConfig.conservative,
}


def fail(command: str, message: object, code: int = 2) -> int:
    """Print an error of a command; return its exit code."""
    print(f"heal {command}: {message}", file=sys.stderr)
    return code


def run_demo(arguments: argparse.Namespace) -> int:
    """Train a small GPT on the CPU, break it a dozen times, and watch it heal.

    The text that it learns ships with Python. Takes about a minute on two quiet cores. Ends with a
    table of faults and what they cost, the final loss beside that of the undisturbed run, and a
    plot. The exit code is 1 if a fault went unnoticed, or did not strike.
    """
    from heal.testing import demo

    demo.quiet_threads()
    console = demo.console_for(arguments.plain)
    found = demo.demonstrate(
        arguments.steps, arguments.seed, arguments.run_dir, console, not arguments.plain
    )
    return int(found.num_not_struck > 0 or any(outcome.is_missed for outcome in found.outcomes))


def run_doctor(arguments: argparse.Namespace) -> int:
    """Check checkpoints, settings or the cluster, and say what to do about each fault.

    heal doctor checkpoints/
    heal doctor --config heal.toml
    heal doctor checkpoints/ --cluster

    Every byte of every checkpoint is read; --quick looks at the manifests only. Exit code: 0 if all
    is well, 1 if there are warnings, 2 if there are errors.
    """
    from heal import doctor

    if arguments.checkpoints is None and arguments.config is None and not arguments.cluster:
        expected = "expected a folder of checkpoints, --config heal.toml or --cluster"
        return fail("doctor", f"{expected}, got none of them")
    found: list[doctor.Finding] = []
    if arguments.checkpoints is not None:
        found += doctor.check_checkpoints(arguments.checkpoints, quick=arguments.quick)
    if arguments.config is not None:
        found += doctor.check_config(arguments.config)
    if arguments.cluster:
        found += doctor.check_cluster(shared_dir=arguments.checkpoints)
    for finding in found:
        print(f"{SIGNS[finding.level]} {finding.what}")
        if finding.todo:
            print(f"      {finding.todo}")
    levels = {finding.level for finding in found}
    return 2 if "error" in levels else 1 if "warn" in levels else 0


def run_drill(arguments: argparse.Namespace) -> int:
    """Break a training run of your own, and see how it heals.

    heal drill train:build --steps 300
    heal drill train:build --fault nan_gradient@50 --fault nan_loss@100x6 --fault bad_batch~0.01

    ``train:build`` names a function in a module that can be imported from here. Called without
    arguments it returns ``(healer, train_step, loader)``, as ``healer.run(train_step, loader)``
    takes them. Without --fault a dozen faults are spread over the run. The exit code is 0 if
    every fault struck, was found and healed, 1 if one was missed or did not strike, that of the
    halt if healing came to its end, 2 on bad arguments and if the function does not make a run.
    """
    from heal.actions import HealingError
    from heal.testing import demo
    from heal.testing.drill import Drill, parse_fault, standard_faults

    try:
        faults = [parse_fault(word) for word in arguments.fault]
        healer, train_step, loader = _build(arguments.target)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        return fail("drill", error)
    faults = faults or standard_faults(arguments.steps, healer.optimizers)
    drill = Drill(healer, faults, arguments.seed)
    code = 0
    try:
        drill.run(train_step, loader, arguments.steps, not arguments.plain)
    except HealingError as halt:
        code = fail("drill", halt, halt.exit_code)
    demo.console_for(arguments.plain).print(demo.outcome_table(drill.outcomes))
    if drill.missed:
        fail("drill", f"not found: {', '.join(drill.missed)}")
    if drill.not_struck:
        names = ", ".join(map(str, drill.not_struck))
        fail("drill", f"did not strike, or found nothing to break: {names}")
    return code or (MISSED if drill.missed or drill.not_struck else 0)


def _build(target: str) -> "tuple[Healer, Any, Any]":
    """Make the run that ``module:function`` names; raise ValueError if it makes none."""
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


def run_forecast(arguments: argparse.Namespace) -> int:
    """Moved: ``python -m tools.forecast train`` or ``evaluate``, in the repository.

    The corpus and the training of the forecast are not part of the installed package.
    """
    words = " ".join(["python -m tools.forecast", *arguments.words])
    moved = "moved out of the package; in a checkout of the repository run"
    return fail("forecast", f"{moved}: {words}")


def run_init(arguments: argparse.Namespace) -> int:
    """Print a commented heal.toml with every setting, for you to change.

    heal init > heal.toml
    heal init --preset aggressive lr_factor=0.7

    The exit code is 2 if a setting is wrong, 1 if the file cannot be written.
    """
    try:
        text = PRESETS[arguments.preset]().override(arguments.settings).to_toml()
    except ConfigError as error:
        return fail("init", error)
    text = f"# Settings of heal; preset: {arguments.preset}.\n\n{text}"
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(arguments.output, "w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return fail("init", f"{arguments.output} exists; --force overwrites it", 1)
    except OSError as error:
        return fail("init", error, 1)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Show what happened in a run: one HTML page that needs no network, a text, or JSON.

    heal report runs/7                      # writes runs/7/report.html
    heal report runs/7 --text
    heal report runs/7 --run 1              # the first of several runs in that folder
    heal report runs/7 --json | jq .summary.totals

    The exit code is 2 if the folder holds no run, 1 if the report cannot be written.
    """
    from heal.report.collect import read_run
    from heal.report.data import report_data
    from heal.report.page import make_page
    from heal.report.read import NotARun, write_report
    from heal.report.text import make_text

    try:
        report = read_run(arguments.run_dir, run=arguments.run)
    except (NotARun, OSError) as error:
        return fail("report", error)
    for sentence in report.damage.sentences():
        fail("report", sentence)
    is_page = not (arguments.text or arguments.json)
    goes_out = arguments.output == "-" or not (arguments.output or is_page)
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
        write_report(path, made)
    except OSError as error:
        why = error.strerror or error
        return fail("report", f"{path}: {why}; --output says where to write instead", 1)
    print(f"{path} ({len(made.encode()) / 1e6:.1f} MB){': open it in a browser' * is_page}")
    return 0


def run_watch(arguments: argparse.Namespace) -> int:
    """Follow a run in the terminal while it trains: progress, loss, events, rank by rank.

    heal watch runs/7

    Waits for a run that has not begun; says how a finished one ended. Ctrl-C ends the watching, not
    the run. Reads the journal only, so that it works from any machine that sees the folder.
    """
    from heal.report.live import follow

    if arguments.run_dir.is_file():
        return fail("watch", f"expected a folder, got the file {arguments.run_dir}")
    follow(arguments.run_dir, interval=arguments.interval, plain=arguments.plain)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": run_demo,
    "doctor": run_doctor,
    "drill": run_drill,
    "forecast": run_forecast,
    "init": run_init,
    "report": run_report,
    "watch": run_watch,
}
"""Every command, in alphabetical order."""


class ShowVersion(argparse.Action):
    """Read the version only when it is asked for: it comes from zclip, which imports torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"heal {heal.__version__}")
        parser.exit()


def at_least_one(word: str) -> int:
    """Return the whole number that a word is, 1 or more; argparse names the argument."""
    if not word.strip().isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {word!r}")
    return int(word)


def seconds_between_looks(word: str) -> float:
    """Return the seconds that a word is, neither too few nor too many."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.05 to 3600 seconds, got {word!r}")
    return seconds


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="heal", description="Training runs that heal themselves.")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="command", required=True)
    made: dict[str, argparse.ArgumentParser] = {}
    for name, run in COMMANDS.items():
        text = inspect.cleandoc(run.__doc__ or "").replace("``", "")
        made[name] = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made[name].set_defaults(run_command=run)
    for name, steps in (("demo", 400), ("drill", 300)):
        add = made[name].add_argument
        add("--steps", type=at_least_one, default=steps, help="optimizer steps of each run")
        add("--seed", type=int, default=0, help="of model, data and faults")
        add("--plain", action="store_true", help="no progress bar, no colours")
    for name in ("report", "watch"):
        made[name].add_argument("run_dir", type=Path, help="the run_dir that was given to Healer")

    add = made["demo"].add_argument
    add("--run-dir", type=Path, default=Path("heal-demo"), help="for the journal")

    add = made["doctor"].add_argument
    add("checkpoints", nargs="?", type=Path, help="folder of checkpoints")
    add("--quick", action="store_true", help="do not read the tensors")
    add("--config", type=Path, metavar="FILE", help="a heal.toml to look at")
    add("--cluster", action="store_true", help="look at launcher, network, GPU, folder and clock")

    add = made["drill"].add_argument
    add("target", metavar="module:function", help="makes the run")
    add("--fault", action="append", default=[], metavar="FAULT", help="kind@attempt or kind~rate")

    made["forecast"].add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    add = made["init"].add_argument
    add("--preset", choices=PRESETS, default="default", help="where to start")
    add("--output", metavar="FILE", help="write here, not to standard output")
    add("--force", action="store_true", help="overwrite the file")
    add("settings", nargs="*", metavar="key=value", help="settings to change")

    add = made["report"].add_argument
    add("--output", "-o", metavar="FILE", help=f"where to write; RUN_DIR/{PAGE}, or - to show it")
    add("--run", type=at_least_one, metavar="N", help="which run of the folder; else the last")
    form = made["report"].add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it for a terminal")
    form.add_argument("--json", action="store_true", help="print it for machines")

    add = made["watch"].add_argument
    add("--interval", type=seconds_between_looks, default=1.0, help="seconds between looks")
    add("--plain", action="store_true", help="lines only, no screen")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 1 if its output is closed before the end."""
    arguments = make_parser().parse_args(words)
    try:
        code = int(arguments.run_command(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # of our output, as when it goes to head
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # for what Python writes as it exits
            return 1
        raise


if __name__ == "__main__":
    raise SystemExit(main())
