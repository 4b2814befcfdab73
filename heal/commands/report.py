"""Show what happened in a run: one HTML page that needs no network, a text, or JSON.

heal report runs/7                      # writes runs/7/report.html
heal report runs/7 --text
heal report runs/7 --json | jq .summary.totals
"""

import argparse
import json
import sys
from pathlib import Path

PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", type=Path, help="the run_dir that was given to Healer")
    parser.add_argument(
        "--output", "-o", metavar="FILE", help=f"where to write; RUN_DIR/{PAGE} by default, - shows"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it for a terminal")
    form.add_argument("--json", action="store_true", help="print it for machines")


def run(arguments: argparse.Namespace) -> int:
    """Make the report; 2 if the folder holds no run, 1 if the report cannot be written."""
    from heal.report.collect import read_run
    from heal.report.data import report_data
    from heal.report.page import make_page
    from heal.report.plain_files import replace_text
    from heal.report.read import NotARun
    from heal.report.text import make_text

    try:
        report = read_run(arguments.run_dir)
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
    print(f"{path} ({len(made.encode()) / 1e6:.1f} MB): open it in a browser")
    return 0
