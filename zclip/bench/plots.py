"""The plot of a run: how near to the memory's limit, and how cost grows with bytes and tensors."""

import io
from typing import Any

from zclip.bench.results import Document, Result
from zclip.bench.shapes import BYTES, TENSORS
from zclip.bench.suites import is_sweep
from zclip.bench.work import OURS, is_ours

COLOURS = {OURS: "#00796b", "torch foreach": "#d2691e", "torch loop": "#b39b82"}
RIVAL_COLOUR = "#d2691e"
LEAST_BYTES = 4_000_000
"""Work on less is bound by the host, and its share of the memory's limit says nothing."""


def plot(document: Document, suffix: str = ".png") -> bytes:
    """Return the figure: bars for the cases, and a curve for each sweep that was run.

    Raises:
        ValueError: matplotlib is not installed, or the format is none that it writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'zclip-heal[plot]'") from None
    cases = [r for r in document.results if r.ours.roofline and r.bytes >= LEAST_BYTES]
    cases = [r for r in cases if not is_sweep(r.shapes)]
    by_bytes = _sweep(document, BYTES)
    by_tensors = _sweep(document, TENSORS)
    curves = [points for points in (by_bytes, by_tensors) if len(points) > 1]
    height = 1.2 + 0.36 * len(cases)
    figure = Figure(
        figsize=(9, (height if cases else 0) + (3.6 if curves else 0) or 2), layout="constrained"
    )
    rows = figure.subfigures(
        bool(cases) + bool(curves) or 1,
        1,
        squeeze=False,
        height_ratios=[height] * bool(cases) + [3.6] * bool(curves) or None,
    )
    if cases:
        _roofline(rows[0, 0].subplots(), cases)
    if curves:
        axes = rows[-1, 0].subplots(1, len(curves), squeeze=False)[0]
        for axis, points in zip(axes, curves, strict=True):
            _curve(axis, points, BYTES if points is by_bytes else TENSORS)
    written = io.BytesIO()
    try:
        figure.savefig(written, format=suffix.lstrip("."), dpi=90)
    except ValueError as error:
        raise ValueError(f"--plot: {error}") from None
    return written.getvalue()


def _sweep(document: Document, prefix: str) -> list[tuple[int, Result]]:
    points = [r for r in document.results if r.shapes.startswith(prefix)]
    return sorted(((int(r.shapes.removeprefix(prefix)), r) for r in points), key=lambda p: p[0])


def _roofline(axis: Any, cases: list[Result]) -> None:
    """Draw ours and the fastest rival's share of the bandwidth limit, a pair per case."""
    for i, result in enumerate(cases):
        rows = [(OURS, result.ours)]
        if result.rival:
            rows.append((result.rival, result.contenders[result.rival]))
        for j, (name, measured) in enumerate(rows):
            share = 100 * (measured.roofline or 0.0)
            colour = COLOURS[OURS] if is_ours(name) else RIVAL_COLOUR
            at = i + 0.2 - 0.4 * (1 - j)
            axis.barh(at, share, height=0.38, color=colour)
            label = f" {measured.milliseconds:.1f} ms" + (f", {name}" if j else "")
            axis.text(share, at, label, va="center", fontsize=7)
    axis.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(cases)), [r.case + (" ?" if r.noise else "") for r in cases])
    axis.margins(y=0.01)
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 135)
    axis.set_xlabel("share of what memory allows, % (100: as fast as the bytes can be moved)")
    noisy = "  (noisy: not a result)" if any(r.noise for r in cases) else ""
    axis.set_title(f"zclip (green) and its fastest rival{noisy}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _curve(axis: Any, points: list[tuple[int, Result]], prefix: str) -> None:
    """Draw time against the size of the sweep, for every contender of its first point."""
    for name in points[0][1].contenders:
        places = [(at, r.contenders[name].milliseconds) for at, r in points if name in r.contenders]
        axis.plot(*zip(*places, strict=True), marker="o", label=name, color=COLOURS.get(name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylabel("ms per call")
    where = "bytes of gradients, 16 tensors" if prefix == BYTES else "tensors, 16 MB in all"
    axis.set_xlabel(where)
    axis.legend(fontsize=7, frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
