"""What the command line takes, and the plan that follows from it. Bad input ends here."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zclip.bench import compare, forced, rivals, shapes, suites
from zclip.bench.catalogue import DTYPES, OPS, RULES, Case
from zclip.bench.gradients import NORMAL, VALUES
from zclip.bench.own_model import load_model, shapes_of
from zclip.version import __version__

ROUNDS, QUICK_ROUNDS = 25, 7
SECONDS, QUICK_SECONDS = 20.0, 0.4  # per case, whatever the rounds
OWN = "own model"


@dataclass
class Plan:
    """A run, with nothing left to decide."""

    cases: list[Case]
    rounds: int
    seconds: float
    device: torch.device
    backends: list[str]
    rivals: list[str]
    own_shapes: dict[str, list[shapes.Shape]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    json: Path | None = None
    csv: Path | None = None
    page: Path | None = None
    plot: Path | None = None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the manual."""
    parser = argparse.ArgumentParser(
        prog="zclip-bench",
        description="Measure gradient clipping on this machine, beside its rivals, in one run. "
        "Without --op, --shapes, --model, --dtype, --rule and --clipped: the standard cases.",
        epilog="Exit codes: 0 measured; 1 a result of ours was wrong, or --compare found a "
        "regression; 2 bad input; 130 or 143 interrupted.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"zclip-bench {__version__}")
    what = parser.add_argument_group("what to measure; every combination is a case")
    what.add_argument("--op", nargs="+", metavar="OP", help=f"of: {', '.join(OPS)}")
    what.add_argument("--shapes", nargs="+", metavar="NAME", help="of models; --list has them")
    what.add_argument("--model", metavar="MODULE:FACTORY", help="on the shapes of your own model")
    what.add_argument("--dtype", nargs="+", metavar="DTYPE", help=f"of: {', '.join(DTYPES)}")
    what.add_argument("--rule", nargs="+", metavar="RULE", help=f"of: {', '.join(RULES)}")
    what.add_argument(
        "--values",
        default=NORMAL,
        metavar="KIND",
        help=f"of gradients: {', '.join(VALUES)}; --op grad_stats compares with normal ones",
    )
    what.add_argument("--clipped", action="store_true", help="let every call clip")
    what.add_argument(
        "--backend", nargs="+", metavar="NAME", help=f"also force: {', '.join(forced.BACKENDS[1:])}"
    )
    what.add_argument(
        "--rival", nargs="+", metavar="NAME", help=f"insist on: {', '.join(rivals.PACKAGES)}"
    )
    add("--quick", action="store_true", help="fewer and smaller cases; under 20 s when quiet")
    add("--rounds", type=int, help="rounds per case")
    add("--threads", type=int, help="CPU threads; torch's own choice if absent")
    add("--device", help="cpu or cuda (timed by CUDA events); the GPU if there is one")
    add("--json", type=Path, help="write all results, after every case")
    add("--csv", type=Path, help="write one line per contender, after every case")
    add("--markdown", action="store_true", help="print a Markdown table instead")
    add("--plot", type=Path, help="write the plot, .png or .svg; runs the sweeps as well")
    add("--save", type=Path, help="write bench.json, .csv, .md and .png into this folder")
    add("--compare", type=Path, help="an earlier --json; says what became slower")
    add("--tolerance", type=float, default=compare.TOLERANCE, help="of --compare; default 0.1")
    add("--list", action="store_true", help="list operators, shapes, dtypes, rules and rivals")
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what to do.

    Raises:
        ValueError: something asked for does not exist or cannot be done; one line.
    """
    for name, least in (("rounds", 2), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name}: expected at least {least}, got {value}")
    device = _device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for flag, given, known in (
        ("--op", options.op, OPS),
        ("--dtype", options.dtype, DTYPES),
        ("--rule", options.rule, RULES),
        ("--values", [options.values], VALUES),
        ("--backend", options.backend, forced.BACKENDS),
    ):
        for name in given or ():
            if name not in known:
                raise ValueError(f"{flag}: expected one of {', '.join(known)}, got {name!r}")
    backends = [name for name in options.backend or [] if name != "auto"]
    for backend in backends:
        forced.operators(backend, device)
    present, left_out = _rivals(options.rival, device)
    own: dict[str, list[shapes.Shape]] = {}
    cases = _cases(options, own)
    save = options.save
    plot = options.plot or (save and save / "bench.png")
    if plot and not _is_chosen(options):
        cases += suites.sweeps(options.quick)
    return Plan(
        cases,
        options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        QUICK_SECONDS if options.quick else SECONDS,
        device,
        backends,
        present,
        own,
        left_out,
        options.json or (save and save / "bench.json"),
        options.csv or (save and save / "bench.csv"),
        save and save / "bench.md",
        plot,
    )


def _is_chosen(options: argparse.Namespace) -> bool:
    chosen = (options.op, options.shapes, options.model, options.dtype, options.rule)
    return any(chosen) or bool(options.clipped) or options.values != NORMAL


def _cases(options: argparse.Namespace, own: dict[str, list[shapes.Shape]]) -> list[Case]:
    """Return the cases; fills ``own`` with the shapes of the user's model."""
    if not _is_chosen(options):
        return list(suites.QUICK if options.quick else suites.STANDARD)
    ops = options.op or (["rule"] if options.rule else ["clip_grad_norm_"])
    dtypes = options.dtype or ["float32"]
    names = options.shapes or []
    for name in names:
        shapes.named(name)  # raises what is wrong with it
    if options.model:
        own[OWN], dtype = shapes_of(load_model(options.model), options.model)
        dtypes = options.dtype or [dtype]
        names = [*names, OWN]
    if options.rule and "rule" not in ops:
        raise ValueError(f"--rule: expected --op rule with it, got --op {' '.join(ops)}")
    rules = options.rule or list(RULES)
    return suites.crossed(
        ops, names or ["gpt2-small"], dtypes, rules, options.clipped, options.values
    )


def _rivals(wanted: list[str] | None, device: torch.device) -> tuple[list[str], list[str]]:
    """Return the optional rivals that take part, and a line for each that does not."""
    problems = {name: rivals.problem_with(name, device) for name in wanted or rivals.PACKAGES}
    if wanted and (missing := [line for line in problems.values() if line]):
        raise ValueError(f"--rival: {missing[0]}")
    present = [name for name, problem in problems.items() if problem is None]
    return present, [line for line in problems.values() if line]


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here")
    return torch.device(name)


def listing() -> str:
    """Return what there is to choose from, for ``--list``."""
    lines = ["operators"]
    lines += [f"  {name:18}{op.about}" for name, op in OPS.items()]
    lines += ["shapes"]
    for name, make in shapes.SHAPES.items():
        made = make()
        lines.append(f"  {name:18}{shapes.elements(made):>13,} in {len(made):,} tensors")
    lines += [
        f"  {shapes.BYTES}N{'':11}N bytes of float32 in {shapes.TENSORS_IN_BYTES} tensors",
        f"  {shapes.TENSORS}N{'':9}{shapes.ELEMENTS_IN_TENSORS:,} elements in N tensors",
    ]
    for title, names in (
        ("dtypes", DTYPES),
        ("rules", RULES),
        ("backends", forced.BACKENDS),
        ("rivals, besides torch and the published code", rivals.PACKAGES),
    ):
        lines += [title, f"  {', '.join(names)}"]
    return "\n".join(lines)
