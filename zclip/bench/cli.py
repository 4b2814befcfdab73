"""``zclip-bench``: the command line of the benchmark."""

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from zclip.bench import results as report
from zclip.bench.cases import CASES
from zclip.bench.measure import interleaved, load_average

ROUNDS, QUICK_ROUNDS = 25, 7
SECONDS, QUICK_SECONDS = 20.0, 1.0  # per case, whatever the rounds


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the manual."""
    parser = argparse.ArgumentParser(
        prog="zclip-bench",
        description="Measure gradient clipping on this machine, beside torch, in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds; under 20 s")
    parser.add_argument("--rounds", type=int, help="rounds per case")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice if absent")
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help=f"of: {', '.join(CASES)}"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead")
    parser.add_argument("--save", type=Path, help="write bench.json and bench.md into this folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark. Interrupting it keeps what was measured."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    if rounds < 2:
        parser.error(f"--rounds must be at least 2, got {rounds}")
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)

    json_path = options.json or (options.save and options.save / "bench.json")
    console = Console()
    results: list[report.Result] = []
    try:
        with Progress(console=console, transient=True) as progress:
            for name in progress.track(options.only or list(CASES), description="measuring"):
                results.append(run_case(name, rounds, QUICK_SECONDS if options.quick else SECONDS))
                if json_path:
                    report.save_json(results, json_path)
    except KeyboardInterrupt:
        console.print("Interrupted; this is what was measured so far.")
    if options.markdown:
        print(report.markdown(results))
    else:
        report.show(results, console)
    if options.save:
        (options.save / "bench.md").write_text(report.markdown(results))


def run_case(name: str, rounds: int, seconds: float) -> report.Result:
    """Build a case, check it against float64, time it, and let its memory go."""
    case = CASES[name]()
    case.check()
    load = load_average()
    result = report.Result.of(case, interleaved(case.contenders, rounds, seconds), load)
    del case
    gc.collect()
    return result
