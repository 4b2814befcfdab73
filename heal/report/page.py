"""The report as one HTML file that needs nothing but a browser.

Everything in a journal may be hostile: text is escaped, data cannot close its script element, and
the page's policy runs no script but ours.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from statistics import median
from string import Template
from typing import Any

from heal.report import words
from heal.report.collect import LOSS, STEP, Row, RunReport
from heal.report.data import report_data

# The parts of the page are there without scripts, for printers and screen readers.


def escaped(text: object) -> str:
    """Return text that means itself in HTML, in attributes too."""
    return html.escape(str(text), quote=True)


def pairs(entries: Iterable[tuple[str, str]], kind: str) -> str:
    """Return names and values, which are HTML already."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries)
    return f'<dl class="{kind}">{listed}</dl>'


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    texts: int,
    *,
    caption: str,
    instead: str = "",
) -> str:
    """Return a table, of whose columns the last ``texts`` are text; ``instead`` if it is empty."""
    numbers = len(names) - texts

    def cells(tag: str, row: Sequence[object], scope: str = "") -> str:
        kinds = [' class="number"'] * numbers + [""] * texts
        each = zip(kinds, row, strict=True)
        return "".join(f"<{tag}{scope}{kind}>{escaped(cell)}</{tag}>" for kind, cell in each)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    if not body:
        return f"<p>{instead}</p>"
    head = cells("th", names, ' scope="col"')
    return (
        f'<table><caption class="visually-hidden">{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def tiles(totals: dict[str, Any]) -> str:
    """Return the numbers at the top."""
    goal = totals["goal"]
    of_goal = f" <small>of {goal:,}</small>" if goal and goal > totals["steps"] else ""
    shown = [
        ("steps", f"{totals['steps']:,}{of_goal}"),
        ("time", words.duration(totals["seconds"])),
        ("incidents", f"{totals['incidents']:,} <small>{totals['acted']:,} acted on</small>"),
        ("steps lost", f"{totals['lost_steps']:,}"),
        ("time lost", f"<small>about</small> {words.duration(totals['lost_seconds'])}"),
    ]
    if "first_loss" in totals:
        first, last = totals["first_loss"], totals["last_loss"]
        shown.append(("loss, first to last", f"{first:.3g} <small>to</small> {last:.3g}"))
    return pairs(shown, "tiles")


def incident_list(report: RunReport) -> str:
    """Return the incidents; a sentence if there were none."""
    if not report.incidents:
        return "<p>None. Healing changed nothing in this run.</p>"
    rows = next((c.rows() for c in report.curves.values() if c.count), [])
    parts = (
        _incident(i, incident, thumbnail(rows, incident), len(report.ranks) > 1)
        for i, incident in enumerate(report.incidents)
    )
    return f'<ol class="incidents">{"".join(parts)}</ol>'


def _incident(index: int, incident: dict[str, Any], picture: str, has_ranks: bool) -> str:
    steps, ranks = incident["steps"], incident["ranks"]
    on = f", rank {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)}" if has_ranks else ""
    sure, paper = incident["confidence"], incident["reference"]
    source = [f"confidence {sure:.0%}"] if isinstance(sure, (int, float)) else []
    source += [escaped(paper)] if paper else []
    done = [escaped(words.times(action["text"], action["times"])) for action in incident["actions"]]
    entries = [
        ("cause", escaped(incident["cause"]) + f'<p class="quiet">{", ".join(source)}</p>'),
        ("action", "<br>".join(done) or "none"),
        ("outcome", escaped(incident["outcome_text"])),
        ("cost", escaped(incident["cost"])),
        ("experiments", "<br>".join(map(escaped, incident["experiments"]))),
        *(
            (
                "evidence" + (f" ({escaped(part['title'])})" if i else ""),
                pairs(((escaped(n), escaped(v)) for n, v in part["values"]), "evidence"),
            )
            for i, part in enumerate(incident["evidence"])
        ),
    ]
    return (
        f'<li data-incident-row="{index}"><h3><span class="kind" '
        f'data-kind="{escaped(incident["kind"])}">{escaped(incident["what"])}</span> '
        f'<span class="outcome {incident["outcome"]}">{incident["outcome_label"]}</span></h3>'
        f'<p class="quiet"><button type="button" aria-label="Show step {steps} on the charts">'
        f"step {steps}</button>{escaped(on)}</p>{picture}"
        f"{pairs(((name, value) for name, value in entries if value), 'facts')}</li>"
    )


WIDTH, HEIGHT = 240, 56  # of a thumbnail


def thumbnail(rows: Sequence[Row], incident: dict[str, Any]) -> str:
    """Return the loss around an incident as a small picture; nothing where too little is known."""
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
        return ""
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
    label, width = f"Loss: {', '.join(figures)}", max(2.0, x(last) - x(start))
    return (
        f'<svg class="thumbnail" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<rect x="{x(start):.0f}" width="{width:.0f}" height="{HEIGHT}"/><path d="{path}"/></svg>'
        f'<p class="quiet">{label}.</p>'
    )


SCRIPTS = ("numbers.js", "chart.js", "report.js", "controls.js")
BADGES = {"finished": "finished", "stopped": "stopped", "open": "no end recorded"}
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def make_page(report: RunReport) -> str:
    """Return the page."""
    data = report_data(report)
    summary = data["summary"]
    style, script = _web("report.css"), "\n".join(map(_web, SCRIPTS))
    damage = "".join(f"<li>{escaped(sentence)}</li>" for sentence in _notices(data))
    environment = pairs(((escaped(n), escaped(v)) for n, v in data["environment"]), "pairs")
    return Template(_web("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escaped(f"Report of {data['run_dir']}"),
        name=escaped(data["run_dir"] + (f", run {report.number}" if report.runs > 1 else "")),
        state=summary["state"],
        badge=BADGES[summary["state"]],
        dates=escaped(_dates(report)),
        story=escaped(" ".join(summary["sentences"])),
        tiles=tiles(summary["totals"]),
        damage=f'<ul class="damage">{damage}</ul>' if damage else "",
        incident_count=str(len(data["incidents"])),
        incidents=incident_list(report),
        experiments=table(
            ("step", "suspicion", "result"),
            [(f"{e['step']:,}", e["suspicion"], e["text"]) for e in data["experiments"]],
            2,
            caption="Experiments",
            instead="None were needed.",
        ),
        tensors=table(
            ("times", "tensor", "what happened"),
            [(f"{e['times']:,}", e["tensor"], _failures(e)) for e in data["tensors"]],
            2,
            caption="Tensors",
            instead="None.",
        ),
        ranks=table(
            ("rank", "steps seen", "last step", "median step", "end"),
            map(_rank_row, data["ranks"]),
            1,
            caption="Ranks",
        ),
        environment=environment if data["environment"] else "<p>The journal does not say.</p>",
        style=style,
        script=script,
        data=_in_script(data),
    )


def _failures(entry: dict[str, Any]) -> str:
    return "; ".join(words.times(words.title(f), n) for f, n in entry["failures"].items())


def _rank_row(entry: dict[str, Any]) -> tuple[object, ...]:
    seconds = words.duration(entry["usual_seconds"]) if entry["usual_seconds"] else "-"
    reached = (f"{entry['records']:,}", words.show(entry["last_step"]), seconds)
    return entry["rank"], *reached, entry["ending"] or "none recorded"


def _in_script(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the element it stands in; ASCII, so no line separators."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _notices(data: dict[str, Any]) -> list[str]:
    notices = list(data["damage"])
    if data["runs"] > 1:
        notices.append(
            f"This folder holds {data['runs']} runs; this is run {data['run']}. "
            "heal report --run N shows another."
        )
    if data["incidents_left_out"]:
        notices.append(f"{data['incidents_left_out']:,} incidents, the mildest, are left out.")
    if data["events_left_out"]:
        notices.append(f"{data['events_left_out']:,} events are not marked on the charts.")
    return notices


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
