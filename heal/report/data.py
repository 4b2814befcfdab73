"""The report as plain data: what ``--json`` prints and what the page's script draws."""

import math
from collections import Counter
from typing import Any

from heal.exit_codes import ExitCode
from heal.json_lines import encodable, number
from heal.report import words
from heal.report.collect import COLUMNS, TIME, Row, RunReport
from heal.report.story import KINDS, OUTCOMES
from heal.report.words import ANSWERS, answer_of, count, duration

ENDINGS = {
    "completed": "finished",
    "exception": "was ended by an error",
    "oom": "ran out of memory",
    "nan": "was stopped because of NaN or Inf",
    "divergence": "was stopped because its loss diverged",
    "sigterm": "was asked to stop",
    "hung": "took no step in time and was ended",
    "sigint": "was interrupted by hand",
    "exited": "was left before its end",
    "unrecoverable": "was stopped because nothing was left to try",
}
MAX_KINDS = 8  # of incidents, or of ranks, named in one sentence


def summarise(report: RunReport) -> dict[str, Any]:
    """Return state, headline, sentences and totals."""
    state, ending = _ending(report)
    incidents = report.incidents
    totals = {
        "steps": report.last_step + 1,
        "goal": report.story.goal,
        "ranks": len(report.ranks),
        "seconds": round(report.live_for, 3),
        "incidents": len(incidents) + report.story.left_out,
        "acted": sum(i["kind"] != "alert" for i in incidents),
        "lost_steps": sum(i["lost_steps"] for i in incidents),
        "lost_seconds": round(sum(i["lost_seconds"] for i in incidents), 3),
        "skipped_batches": sum(i["skipped_batches"] for i in incidents),
        "experiments": len(report.story.experiments),
        "starts": sum(event.rank == min(report.ranks) for event in report.story.sessions),
    }
    losses = next((c.losses for c in report.curves.values() if c.losses), None)
    if losses is not None:
        names = ("first_loss", "last_loss", "lowest_loss", "highest_loss")
        totals |= dict(zip(names, losses, strict=True))
    sentences = [_course(report, totals, ending), *_incidents(report, totals)]
    answers = Counter(answer_of(e.line) for e in report.story.experiments.values())
    if answers:
        found = [f"{answers[key]} showed {name}" for key, name in ANSWERS.items() if answers[key]]
        sentences.append(f"{count(answers.total(), 'experiment')}: {', '.join(found)}.")
    if losses is not None:
        first, last, _, high = losses
        peak = f", after a peak of {high:.4g}" if high > 1.5 * max(first, last) else ""
        verb = "fell" if last < first else "went"
        sentences.append(f"The loss {verb} from {first:.4g} to {last:.4g}{peak}.")
    return {"state": state, "ending": ending, "sentences": sentences, "totals": totals}


def ending_words(page: dict[str, Any]) -> str:
    """Return how a run ended, by its postmortem, as the end of a sentence about it."""
    reason = str(page.get("exit_reason", ""))
    return ENDINGS.get(reason, f"ended ({words.shorten(reason, 40)})")


def _ending(report: RunReport) -> tuple[str, str]:
    page = report.postmortem
    if page is None:
        return "open", "has no recorded end: it is still running, or it was killed"
    ending, code = ending_words(page), number(page.get("exit_code"))
    if page.get("exit_reason") == "completed":
        return "finished", ending
    if abs(code) < 1000:
        name = {int(known): f" {known.name}" for known in ExitCode}.get(int(code), "")
        ending += f" (exit code {int(code)}{name})"
    return "stopped", ending


def _course(report: RunReport, totals: dict[str, Any], ending: str) -> str:
    goal = totals["goal"]
    reached = count(totals["steps"], "step")
    if goal and goal > totals["steps"]:
        reached = f"{totals['steps']:,} of {count(goal, 'step')}"
    on = f" on {count(totals['ranks'], 'rank')}" if totals["ranks"] > 1 else ""
    took = f" in {duration(report.live_for)}" if report.live_for else ""
    again = f" It was started {totals['starts']} times." if totals["starts"] > 1 else ""
    silent = [str(rank) for rank in report.ranks if rank not in report.postmortems]
    lost = ""
    if silent and report.postmortems:
        names = ", ".join(silent[:MAX_KINDS]) + " ..." * (len(silent) > MAX_KINDS)
        lost = f" No end was recorded by rank {names}."
    which = f" (run {report.number} of {report.runs} in its folder)" if report.runs > 1 else ""
    return f"The run{which} took {reached}{on}{took} and {ending}.{again}{lost}"


def _incidents(report: RunReport, totals: dict[str, Any]) -> list[str]:
    incidents = report.incidents
    if not incidents:
        return ["No incidents: healing changed nothing."]
    outcomes = Counter(i["outcome"] for i in incidents)
    ended = [f"{outcomes[key]} {label}" for key, label in OUTCOMES.items() if outcomes[key]]
    kinds = Counter(words.title(i["failures"][0]) for i in incidents)
    listed = [words.times(name, times) for name, times in kinds.most_common(MAX_KINDS)]
    listed += ["and others"] * (len(kinds) > MAX_KINDS)
    lost = "No step was lost."
    if totals["lost_steps"] or totals["skipped_batches"]:
        done = sum(c.count for c in report.curves.values()) / max(1, len(report.curves))
        share = totals["lost_steps"] / done if done else 0.0
        part = f"{share:.1%} of the work" if share >= 0.001 else "under 0.1% of the work"
        cost = words.cost(totals["lost_steps"], totals["skipped_batches"], totals["lost_seconds"])
        they = "It" if totals["incidents"] == 1 else "Together they"
        lost = f"{they} cost {cost} ({part})."
    return [
        f"{count(totals['incidents'], 'incident')}: {', '.join(ended)}.",
        words.sentence(*listed, link="; ") + ".",
        lost,
    ]


FORMAT = 1
DIGITS = 5  # significant ones of a curve
NOT_ENVIRONMENT = {"v", "time", "rank", "step", "event", "settings", "run"}


def report_data(report: RunReport) -> dict[str, Any]:
    """Return everything, as values that JSON has."""
    began = report.began or 0.0
    of_incident = {id(incident): i for i, incident in enumerate(report.story.incidents)}
    present = {event.kind for event, _ in report.story.marks}
    data = {
        "format": FORMAT,
        "run_dir": words.shorten(str(report.folder.resolve().name or report.folder), 200),
        "run": report.number,
        "runs": report.runs,
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
                "text": words.shorten(words.event_words(event.line), 160),
                "incident": of_incident.get(id(incident), -1),
            }
            for event, incident in report.story.marks
        ],
        "events_left_out": report.story.marks_left_out,
        "experiments": [
            {
                "step": event.step,
                "suspicion": words.title(suspicion),
                "answer": words.show(event.line.get("answer")),
                "text": words.experiment_words(event.line),
            }
            for (_, suspicion), event in report.story.experiments.items()
        ],
        "tensors": worst_tensors(report),
        "environment": environment(report),
        "ranks": [_rank(report, rank, began) for rank in report.ranks],
        "damage": [words.shorten(s, 300) for s in report.damage.sentences()],
        "z_threshold": _z_threshold(report),
    }
    return dict(encodable(data))


def worst_tensors(report: RunReport) -> list[dict[str, Any]]:
    """Return the tensors that incidents name, the most often named first."""
    counted: list[dict[str, Any]] = [
        {"tensor": name, "times": counts.total(), "failures": dict(counts)}
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
    curves, page = report.curves.get(rank), report.postmortems.get(rank)
    rows = [] if curves is None else curves.rows()
    columns = {n: [_short(row, i, began) for row in rows] for i, n in enumerate(COLUMNS)}
    return {
        "rank": rank,
        "records": 0 if curves is None else curves.count,
        "last_step": None if curves is None else curves.last_step,
        "usual_seconds": None if curves is None else curves.median_seconds(),
        "nonfinite": 0 if curves is None else curves.nonfinite,
        "ending": None if page is None else words.shorten(str(page.get("exit_reason")), 40),
        "columns": {} if curves is None else columns,
    }


def _short(row: Row, column: int, began: float) -> float | None:
    value = row[column]
    if value is None or not math.isfinite(value) or isinstance(value, int):
        return value
    return round(value - began, 2) if column == TIME else float(f"{value:.{DIGITS}g}")


def _z_threshold(report: RunReport) -> float | None:
    values = (event.line.get("zclip_z_threshold") for event in report.story.sessions)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
