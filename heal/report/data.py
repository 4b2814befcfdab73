"""The report as plain data: what ``--json`` prints and what the page's script draws."""

import math
from typing import Any

from heal.journal.json_lines import encodable
from heal.report import words
from heal.report.collect import RunReport
from heal.report.incident import KINDS
from heal.report.sample import COLUMNS, Row
from heal.report.summary import summarise

FORMAT = 1
DIGITS = 5  # significant ones of a curve
TIME = COLUMNS.index("time")
NOT_ENVIRONMENT = {"v", "time", "rank", "step", "event", "settings"}


def report_data(report: RunReport) -> dict[str, Any]:
    """Return everything, as values that JSON has."""
    began = report.began or 0.0
    of_incident = {id(incident): i for i, incident in enumerate(report.story.incidents)}
    present = {event.kind for event, _ in report.story.marks}
    data = {
        "format": FORMAT,
        "run_dir": words.shorten(str(report.folder.resolve().name or report.folder), 200),
        "summary": summarise(report),
        "began": report.began,
        "kinds": {kind: label for kind, label in KINDS.items() if kind in present},
        "incidents": report.incidents,
        "incidents_left_out": report.story.left_out,
        "events": [
            {
                "step": event.step,
                "time": None if event.time is None else round(event.time - began, 3),
                "rank": event.rank,
                "kind": event.kind,
                "text": _told(event.line, event.failure or event.name),
                "incident": of_incident.get(id(incident), -1),
            }
            for event, incident in report.story.marks
        ],
        "events_left_out": report.story.marks_left_out,
        "tensors": worst_tensors(report),
        "environment": environment(report),
        "ranks": [_rank(report, rank, began) for rank in report.ranks],
        "damage": [words.shorten(s, 300) for s in report.damage.sentences()],
        "z_threshold": _z_threshold(report),
    }
    return dict(encodable(data))


def worst_tensors(report: RunReport) -> list[dict[str, Any]]:
    """Return the tensors that were blamed, the most often blamed first."""
    counted: list[dict[str, Any]] = [
        {"tensor": name, "times": sum(counts.values()), "failures": counts}
        for name, counts in report.story.tensors.items()
    ]
    return sorted(counted, key=lambda entry: (-entry["times"], entry["tensor"]))[:50]


def environment(report: RunReport) -> list[tuple[str, str]]:
    """Return where the run ran, by the last start of the lowest rank."""
    starts = report.story.sessions
    if not starts:
        page = report.postmortem or {}
        return [("python", words.show(page["python"]))] if "python" in page else []
    lowest = min(event.rank for event in starts)
    newest = [event for event in starts if event.rank == lowest][-1].line
    hosts = sorted({words.show(event.line.get("host")) for event in starts})
    found = [
        (words.shorten(str(name), 60).replace("_", " "), words.show(value))
        for name, value in newest.items()
        if name not in NOT_ENVIRONMENT
    ]
    if len(hosts) > 1:
        found = [(name, ", ".join(hosts) if name == "host" else value) for name, value in found]
    settings = newest.get("settings")
    if isinstance(settings, dict):
        changed = [f"{words.show(str(k))} = {words.show(v)}" for k, v in settings.items()]
        found.append(("settings changed", ", ".join(changed) or "none"))
    return found


def _rank(report: RunReport, rank: int, began: float) -> dict[str, Any]:
    curves = report.curves.get(rank)
    page = report.postmortems.get(rank)
    found: dict[str, Any] = {
        "rank": rank,
        "records": curves.count if curves else 0,
        "last_step": curves.last_step if curves else None,
        "usual_seconds": curves.usual_seconds() if curves else None,
        "nonfinite": curves.nonfinite if curves else 0,
        "ending": None if page is None else words.shorten(str(page.get("exit_reason")), 40),
        "columns": {},
    }
    if curves is None:
        return found
    rows = curves.rows()
    for i, name in enumerate(COLUMNS):
        found["columns"][name] = [_short(row, i, began) for row in rows]
    return found


def _short(row: Row, column: int, began: float) -> float | None:
    value = row[column]
    if value is None or not math.isfinite(value) or isinstance(value, int):
        return value
    return round(value - began, 2) if column == TIME else float(f"{value:.{DIGITS}g}")


def _told(line: Any, name: str) -> str:
    diagnosis = line.get("diagnosis")
    summary = diagnosis.get("summary") if isinstance(diagnosis, dict) else None
    told = line.get("text") or line.get("error") or summary or words.title(name)
    return words.shorten(str(told), 160)


def _z_threshold(report: RunReport) -> float | None:
    for event in report.story.sessions:
        value = event.line.get("zclip_z_threshold")
        if isinstance(value, (int, float)):
            return float(value)
    return None
