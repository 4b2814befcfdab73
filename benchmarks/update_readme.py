"""Puts the table of the README in place, from what ``zclip-bench --save`` wrote.

python -m benchmarks.update_readme [RESULTS]

Leaves the README as it is if the run was noisy: a noisy run is no result.
"""

import sys
from pathlib import Path

from zclip.bench.results import read_document
from zclip.bench.tables import COLUMNS, about

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- made by benchmarks/update_readme.py -->\n", "<!-- end -->"
SHOWN = ("work", "zclip ms", "rival ms", "ratio", "GB/s", "roof", "syncs", "error")
ROWS = (
    "clip_grad_norm_, gpt2-small, float32",
    "clip_grad_norm_, gpt2-small, float32, clipped",
    "clip_grad_norm_, gpt2-small, bfloat16",
    "clip_grad_norm_, moe-10000, float32",
    "clip_grad_norm_, 2000-small, float32",
    "flags, 98m-in-150, float32",
    "zclip, gpt2-small, float32",
    "adagc, gpt2-small, float32",
    "step, gpt2-small, float32",
)


def table(document):
    """The rows that the README shows, and what they depend on."""
    found = {result.case: result for result in document.results}
    lines = ["| " + " | ".join(SHOWN) + " |", "|---|" + "---:|" * (len(SHOWN) - 1)]
    for name in ROWS:
        if name in found:
            lines.append("| " + " | ".join(COLUMNS[c](found[name]) for c in SHOWN) + " |")
    return "\n".join([*lines, "", f"Made by `zclip-bench`: {about(document)}.", ""])


def updated(text, document):
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit("README.md has no place for the table of benchmarks")
    return f"{before}{START}{table(document)}{END}{after}"


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results"
    document = read_document(folder / "bench.json")
    if noise := next((r.noise for r in document.results if r.case in ROWS and r.noise), None):
        print(f"README.md is left as it is: no result, {noise}")
        return
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text(), document))


if __name__ == "__main__":
    main()
