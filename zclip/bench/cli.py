"""``zclip-bench``: the command line of the benchmark."""

import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from zclip.bench import compare, plots, results, shapes, tables
from zclip.bench.arguments import Plan, build_parser, listing, plan_of
from zclip.bench.catalogue import Case
from zclip.bench.run import TooLarge, run_case
from zclip.version import __version__

EXIT_WRONG, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, to be treated as Ctrl-C is."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and exit. Interrupting it keeps what was measured."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options = parser.parse_args(words)
    if options.list:
        print(listing())
        return
    try:
        plan = plan_of(options)
        old = results.read_document(options.compare) if options.compare else None
    except ValueError as error:
        parser.exit(EXIT_BAD_INPUT, f"zclip-bench: {error}\n")
    if options.threads:
        torch.set_num_threads(options.threads)
    document = results.Document(
        ["zclip-bench", *map(shlex.quote, words)],
        results.machine(plan.device),
        version=__version__,
    )
    document.left_out += plan.left_out
    code = measure(plan, document, Console())
    try:
        report(plan, document, options.markdown)
    except ValueError as error:
        parser.exit(EXIT_BAD_INPUT, f"zclip-bench: {error}\n")
    if document.complete and not document.results:
        parser.exit(EXIT_BAD_INPUT, "zclip-bench: nothing was measured; the lines above say why\n")
    for line in document.wrong():
        print(f"WRONG: {line}")
        code = code or EXIT_WRONG
    if old is not None:
        changes = compare.compare(old, document, options.tolerance)
        print(*compare.as_lines(changes), sep="\n")
        print(f"{sum(c.is_regression for c in changes)} regressions in {len(changes)} cases")
        code = code or EXIT_WRONG * any(change.is_regression for change in changes)
    if code:
        sys.exit(code)


def measure(plan: Plan, document: results.Document, console: Console) -> int:
    """Measure one case after the other, and save after each; return the exit code so far."""
    code = 0
    before = _on_sigterm()
    progress = tqdm(plan.cases, unit="case", leave=False, disable=None)
    try:
        for case in progress:
            progress.set_description(case.name)
            one_case(plan, case, document)
            save(plan, document)
        document.complete = True
    except KeyboardInterrupt as interruption:
        console.print("Interrupted; this is what was measured so far.")
        code = EXIT_TERMINATED if isinstance(interruption, Terminated) else EXIT_INTERRUPTED
    finally:
        progress.close()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    save(plan, document)
    return code


def one_case(plan: Plan, case: Case, document: results.Document) -> None:
    """Add the result of a case to the document, or the reason why it has none."""
    found = plan.own_shapes.get(case.shapes) or shapes.named(case.shapes)
    try:
        document.results.append(
            run_case(
                case,
                found,
                plan.device,
                plan.rounds,
                plan.seconds,
                plan.backends,
                plan.rivals,
                document.left_out,
            )
        )
    except TooLarge as problem:
        document.left_out.append(str(problem))


def save(plan: Plan, document: results.Document) -> None:
    """Write what there is so far; every file is whole at any moment."""
    if plan.json:
        results.write_whole(plan.json, document.as_json())
    if plan.csv:
        results.write_whole(plan.csv, document.as_csv())


def report(plan: Plan, document: results.Document, as_markdown: bool) -> None:
    """Print the table; write the page and the plot."""
    if as_markdown:
        print(tables.markdown(document))
    else:
        tables.show(document, Console())
    if plan.page:
        results.write_whole(plan.page, tables.markdown(document))
    if plan.plot and document.results:
        results.write_whole(plan.plot, plots.plot(document, plan.plot.suffix or ".png"))
        print(f"plot: {plan.plot}")


def _on_sigterm() -> Any:
    """Make SIGTERM interrupt as Ctrl-C does; return the handler from before, None if it cannot."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        return signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: whoever runs us there has handlers of their own
        return None
