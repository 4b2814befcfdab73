"""The report as one HTML file that needs nothing but a browser; ``web/page.html`` is its template.

Everything in a journal may be hostile: the template escapes text, data cannot close its script
element, and the page's policy runs no script but ours. All but the charts is there without
scripts, for printers and screen readers.
"""

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from heal.report import words
from heal.report.collect import LOSS, STEP, Row, RunReport
from heal.report.data import report_data

SCRIPTS = ("numbers.js", "chart.js", "report.js", "controls.js")


def make_page(report: RunReport) -> str:
    """Return the page."""
    data = report_data(report)
    style, script = _web("report.css"), "\n".join(map(_web, SCRIPTS))
    rows = next((c.rows() for c in report.curves.values() if c.count), [])
    templates = Environment(
        loader=FunctionLoader(_web),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    templates.filters.update(
        duration=words.duration,
        number="{:,}".format,
        show=words.show,
        times=words.times,
        title=words.title,
    )
    return templates.get_template("page.html").render(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        data=data,
        summary=data["summary"],
        dates=_dates(report),
        pictures=[thumbnail(rows, incident) for incident in data["incidents"]],
        style=style,
        script=script,
    )


SIZE = WIDTH, HEIGHT = 240, 56  # of a thumbnail


def thumbnail(rows: Sequence[Row], incident: dict[str, Any]) -> dict[str, Any] | None:
    """Return a small picture of the loss around an incident; None where too little is known."""
    start, last = incident["first_step"], incident["last_step"]
    first = min(start, incident["resumed_at"] or start)
    margin = max(10, (last - first) // 2)
    near = [
        (row[STEP] or 0.0, math.nan if row[LOSS] is None else row[LOSS] or 0.0)
        for row in rows
        if row[STEP] is not None and first - margin <= row[STEP] <= last + margin
    ]
    known = [(step, loss) for step, loss in near if math.isfinite(loss)]
    if len(known) < 4:
        return None
    began = next((i for i, (step, _) in enumerate(known) if step >= first), 0)
    over = max((i for i, (step, _) in enumerate(known) if step <= last), default=0)
    losses = [loss for _, loss in known]
    left, right = known[0][0], max(step for step, _ in near)
    low, high = min(losses), max(losses)

    def x(step: float) -> float:
        return max(0.0, (step - left) / ((right - left) or 1.0)) * WIDTH

    path, last_x = "", math.inf  # infinite: a gap
    for step, loss in near:
        if math.isfinite(loss):
            y = HEIGHT - 4 - (loss - low) / ((high - low) or 1.0) * (HEIGHT - 8)
            path += f"{'L' if step > last_x else 'M'}{x(step):.0f},{y:.0f}"
        last_x = step if math.isfinite(loss) else math.inf
    bad = " and NaN or Inf" * (len(known) < len(near))
    figures = [f"{median(losses[:began]):.4g} before"] if began else []
    figures += [f"{high:.4g} at most{bad}"]
    figures += [f"{median(losses[over + 1 :]):.4g} after"] if losses[over + 1 :] else []
    return {
        "size": SIZE,
        "x": round(x(start)),
        "width": round(max(2.0, x(last) - x(start))),
        "path": path,
        "label": f"Loss: {', '.join(figures)}",
    }


def _dates(report: RunReport) -> str:
    if report.began is None or report.ended is None:
        return ""
    times = (datetime.fromtimestamp(t, timezone.utc) for t in (report.began, report.ended))
    return " to ".join(f"{time:%Y-%m-%d %H:%M:%S} UTC" for time in times)


def _web(name: str) -> str:
    return (files("heal.report") / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
