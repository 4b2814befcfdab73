"""Writes every speed figure of the README, in its table and in its prose, from saved results.

python -m benchmarks.update_readme [RESULTS]

Reads three kinds of files in the folder RESULTS: ``bench.json`` (``zclip-bench --save``),
``foreach*.json`` (the same with ``--backend foreach``) and ``loop.md`` (``bench_loop.py --save``).
Rows that were noisy are left out: a noisy measurement is no result. If no row is left, the README
stays as it is.
"""

import sys
from pathlib import Path

from zclip.bench.results import read_document
from zclip.bench.tables import COLUMNS, about

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = ("work", "zclip ms", "rival ms", "ratio", "GB/s", "roof", "syncs", "error")
CLIP, CLIPPED, BFLOAT16 = (
    "clip_grad_norm_, gpt2-small, float32",
    "clip_grad_norm_, gpt2-small, float32, clipped",
    "clip_grad_norm_, gpt2-small, bfloat16",
)
FLAGS, ZCLIP, STEP = (
    "flags, 98m-in-150, float32",
    "zclip, gpt2-small, float32",
    "step, gpt2-small, float32",
)
ROWS = (
    CLIP,
    CLIPPED,
    BFLOAT16,
    "clip_grad_norm_, moe-10000, float32",
    "clip_grad_norm_, 2000-small, float32",
    FLAGS,
    ZCLIP,
    "adagc, gpt2-small, float32",
    STEP,
)
SENTENCES = {
    (
        CLIP,
        BFLOAT16,
    ): "Where nothing has to be clipped, `clip_grad_norm_` is {:.1f}x as fast as torch's in "
    "float32 and {:.1f}x in bfloat16.",
    (
        CLIPPED,
    ): "Where every step is clipped it is {:.1f}x as fast, because all gradients are written.",
    (STEP,): "A whole AdamW step with clipping is {:.1f}x as fast.",
    (ZCLIP,): "ZClip is {:.1f}x as fast as the published code.",
    (FLAGS,): "NaN and Inf flags are {:.1f}x as fast as the check of a `GradScaler`.",
}
"""What to say about the ratios of some cases."""

FOREACH = "zclip[foreach]"
SMALL = "2000-small"


def kept(document):
    """Return the results that are no noise, by case."""
    return {result.case: result for result in document.results if not result.noise}


def table(document):
    """Return the rows that the README shows, and what they depend on."""
    found = kept(document)
    lines = ["| " + " | ".join(SHOWN) + " |", "|---|" + "---:|" * (len(SHOWN) - 1)]
    for name in ROWS:
        if name in found:
            lines.append("| " + " | ".join(COLUMNS[c](found[name]) for c in SHOWN) + " |")
    return "\n".join([*lines, "", f"Made by `zclip-bench` {document.version}: {about(document)}."])


def compiled(document):
    """Return in words what the table shows about the compiled kernels."""
    found = kept(document)
    return " ".join(
        text.format(*(found[case].ratio for case in cases))
        for cases, text in SENTENCES.items()
        if all(case in found for case in cases)
    )


def pure_python(documents):
    """Return in words how the package without a compiler compares with torch."""
    spans = {}
    for document in documents:
        for result in kept(document).values():
            if FOREACH in result.contenders and result.rival:
                rival = result.contenders[result.rival].milliseconds
                size = "small" if result.shapes == SMALL else "large"
                share = result.contenders[FOREACH].milliseconds / rival
                spans.setdefault((result.dtype, size), []).append(share)
    parts = {kind: f"{min(found):.1f} to {max(found):.1f}" for kind, found in spans.items()}
    return " ".join(
        f"Its time over torch's in {dtype}: {parts[dtype, 'large']} with large tensors, "
        f"{parts[dtype, 'small']} with small ones."
        for dtype in ("float32", "bfloat16")
        if (dtype, "large") in parts and (dtype, "small") in parts
    )


def healing(loop):
    """Return as a table what a healer adds to whole loops, from the lines of ``loop.md``."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in loop.splitlines()]
    added = {row[0]: row[2].strip("+ %") for row in rows if len(row) > 2 and row[1] == "healed"}
    head = ["| on one core | a healer with ZClip adds |", "|---|---:|"]
    return "\n".join([*head, *(f"| {work} | {share} % |" for work, share in added.items())])


def figures(folder):
    """Return the blocks of the README, by name."""
    document = read_document(folder / "bench.json")
    without = [read_document(path) for path in sorted(folder.glob("foreach*.json"))]
    loop = folder / "loop.md"
    blocks = {"table": table(document), "compiled": compiled(document)}
    if without:
        blocks["pure python"] = pure_python(without)
    if loop.exists():
        blocks["healing"] = healing(loop.read_text())
    return blocks


def updated(text, blocks):
    """Return the README with the blocks put into their places."""
    for name, block in blocks.items():
        start = f"<!-- {name}: made by benchmarks/update_readme.py -->\n"
        end = f"<!-- end of {name} -->"
        before, found, rest = text.partition(start)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise SystemExit(f"README.md has no place for the block {name!r}")
        text = f"{before}{start}{block}\n{end}{after}"
    return text


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    document = read_document(folder / "bench.json")
    if not kept(document).keys() & set(ROWS):
        noise = next((result.noise for result in document.results), "nothing was measured")
        print(f"README.md is left as it is: no result, {noise}")
        return
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text(), figures(folder)))


if __name__ == "__main__":
    main()
