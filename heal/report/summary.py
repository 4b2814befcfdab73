"""The run in a few sentences and numbers, for somebody who has never seen the project."""

from collections import Counter
from typing import Any

from heal.exit_codes import ExitCode
from heal.journal.json_lines import number
from heal.report import words
from heal.report.collect import RunReport
from heal.report.words import count, duration

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
