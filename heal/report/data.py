"""The report as plain data: what ``--json`` prints and what the page's script draws."""

import math
from collections import Counter
from typing import Any

from heal.exit_codes import ExitCode
from heal.json_lines import encodable, number
from heal.report import words
from heal.report.collect import COLUMNS, Row, RunReport
from heal.report.story import KINDS
from heal.report.words import count, duration

# The run in a few sentences and numbers, for somebody who has never seen the project.


INTRODUCTION = (
    "This page was made by heal, which watches over a model while it is trained. A step that would "
    "break the model is refused, damage that got through is undone by returning to an earlier "
    "copy, and every such event is written down. Here is what it wrote."
)
ENDINGS = {
    "completed": "finished",
    "exception": "was ended by an error",
    "oom": "ran out of memory",
    "nan": "was stopped because its numbers broke",
    "divergence": "was stopped because its loss diverged",
    "sigterm": "was told to stop",
    "hung": "took no step in time and was ended",
    "sigint": "was interrupted by hand",
    "exited": "was left before its end",
    "unrecoverable": "was stopped because nothing was left to try",
}
MAX_KINDS = 8  # of trouble, named in one sentence


def summarise(report: RunReport) -> dict[str, Any]:
    """Return state, headline, sentences and totals."""
    state, ending = _ending(report)
    incidents = report.incidents
    acted = [i for i in incidents if i["kind"] != "alert"]
    totals = {
        "steps": report.last_step + 1,
        "goal": report.story.goal,
        "ranks": len(report.ranks),
        "seconds": round(report.live_for, 3),
        "incidents": len(incidents) + report.story.left_out,
        "acted": len(acted),
        "lost_steps": sum(i["lost_steps"] for i in incidents),
        "lost_seconds": round(sum(i["lost_seconds"] for i in incidents), 3),
        "skipped_batches": sum(i["skipped_batches"] for i in incidents),
        "starts": sum(1 for event in report.story.sessions if event.rank == min(report.ranks)),
    }
    losses = next((c.losses for c in report.curves.values() if c.losses), None)
    if losses is not None:
        names = ("first_loss", "last_loss", "lowest_loss", "highest_loss")
        totals |= dict(zip(names, losses, strict=True))
    sentences = [_first(report, totals, ending)]
    sentences += _troubles(report, incidents, totals)
    sentences += _losses(totals, state)
    return {"state": state, "ending": ending, "sentences": sentences, "totals": totals}


def _ending(report: RunReport) -> tuple[str, str]:
    page = report.postmortem
    if page is None:
        return "open", "has left no ending: it is still going, or it was killed"
    reason = str(page.get("exit_reason", ""))
    ending = ENDINGS.get(reason, f"ended ({words.shorten(reason, 40)})")
    code = number(page.get("exit_code"))
    if reason != "completed" and abs(code) < 1000:
        names = {int(c): c.name for c in ExitCode}
        named = f" {names[int(code)]}" if int(code) in names else ""
        ending += f" (exit code {int(code)}{named})"
    return ("finished" if reason == "completed" else "stopped"), ending


def _first(report: RunReport, totals: dict[str, Any], ending: str) -> str:
    goal = totals["goal"]
    reached = count(totals["steps"], "step")
    if goal and goal > totals["steps"]:
        reached = f"{totals['steps']:,} of {count(goal, 'step')}"
    on = f" on {count(totals['ranks'], 'rank')}" if totals["ranks"] > 1 else ""
    took = f" in {duration(report.live_for)}" if report.live_for else ""
    restarts = totals["starts"] - 1
    again = f" It was started {count(totals['starts'], 'time')}." if restarts > 0 else ""
    silent = [rank for rank in report.ranks if rank not in report.postmortems]
    lost = ""
    if silent and report.postmortems:
        names = ", ".join(map(str, silent[:MAX_KINDS])) + (
            " ..." if len(silent) > MAX_KINDS else ""
        )
        lost = (
            f" Rank {names} left no ending." if len(silent) == 1 else f" Ranks {names} left none."
        )
    return f"The run took {reached}{on}{took} and {ending}.{again}{lost}"


def _troubles(
    report: RunReport, incidents: list[dict[str, Any]], totals: dict[str, Any]
) -> list[str]:
    if not incidents:
        return ["It met no trouble, and healing changed nothing."]
    kinds = Counter(words.title(i["failures"][0]) for i in incidents)
    listed = [
        (name[:1].lower() + name[1:]) + (f" ({times} times)" if times > 1 else "")
        for name, times in kinds.most_common(MAX_KINDS)
    ]
    more = f", and {count(len(kinds) - MAX_KINDS, 'other kind')}" if len(kinds) > MAX_KINDS else ""
    if totals["incidents"] == 1:
        (one,) = incidents
        return [f"It met trouble once: {listed[0]}. {one['outcome_text']}", _cost(report, totals)]
    told = [f"It met trouble {totals['incidents']:,} times: {'; '.join(listed)}{more}."]
    outcomes = Counter(i["outcome"] for i in incidents)
    parts = [
        f"{count(outcomes[name], one, many)} {what}"
        for name, one, many, what in (
            ("healed", "was", "were", "healed"),
            ("unhealed", "was", "were", "not recovered"),
            ("undone", "was", "were", "rolled back"),
            ("contained", "was", "were", "contained before any harm was done"),
            ("noted", "was", "were", "only noted"),
            ("resumed", "needed", "needed", "a new start"),
            ("ended", "ended", "ended", "the run"),
            ("open", "is", "are", "still open"),
        )
        if outcomes[name]
    ]
    told.append(f"Of these {_listed(parts)}.")
    return [*told, _cost(report, totals)]


def _cost(report: RunReport, totals: dict[str, Any]) -> str:
    if not totals["lost_steps"] and not totals["skipped_batches"]:
        return "No step was lost."
    done = sum(c.count for c in report.curves.values()) / max(1, len(report.curves))
    part = totals["lost_steps"] / done if done else 0.0
    share = f" ({part:.1%} of the work)" if part >= 0.001 else " (hardly any of the work)"
    batches = totals["skipped_batches"]
    skipped = f" and {count(batches, 'batch', 'batches')} of data" if batches else ""
    return (
        f"All of it together cost {count(totals['lost_steps'], 'step')}{share}{skipped}, "
        f"about {duration(totals['lost_seconds'])}."
    )


def _losses(totals: dict[str, Any], state: str) -> list[str]:
    if "first_loss" not in totals:
        return []
    first, last, high = (totals[f"{name}_loss"] for name in ("first", "last", "highest"))
    peak = f", after a peak of {high:.4g}" if high > 1.5 * max(first, last) else ""
    verb = "fell" if last < first else "went"
    return [f"The loss {verb} from {first:.4g} to {last:.4g}{peak}."]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


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
