"""The report as one HTML file that needs nothing but a browser.

Everything in a journal may be hostile: text is escaped, data cannot close its script element, and
the page's policy runs no script but ours.
"""

import base64
import hashlib
import html
import json
from datetime import datetime, timezone
from importlib.resources import files
from string import Template
from typing import Any

from heal.report import words
from heal.report.collect import RunReport
from heal.report.data import INTRODUCTION, report_data

# Tables of the page. They are there without scripts, for printers and screen readers.


OUTCOMES = {
    "healed": "healed",
    "unhealed": "not recovered",
    "undone": "rolled back",
    "contained": "contained",
    "noted": "noted",
    "ended": "run stopped",
    "resumed": "started again",
    "open": "open",
}


def escaped(text: object) -> str:
    """Return text that means itself in HTML, in attributes too."""
    return html.escape(str(text), quote=True)


def tiles(totals: dict[str, Any]) -> str:
    """Return the numbers at the top."""
    goal = totals["goal"]
    of_goal = f" <small>of {goal:,}</small>" if goal and goal > totals["steps"] else ""
    shown = [
        ("steps", f"{totals['steps']:,}{of_goal}"),
        ("time", escaped(words.duration(totals["seconds"]))),
        ("incidents", f"{totals['incidents']:,} <small>{totals['acted']:,} acted on</small>"),
        ("steps lost", f"{totals['lost_steps']:,}"),
        ("time lost", f"<small>about</small> {escaped(words.duration(totals['lost_seconds']))}"),
    ]
    if "first_loss" in totals:
        first, last = totals["first_loss"], totals["last_loss"]
        shown.append(("loss, first to last", f"{first:.3g} <small>to</small> {last:.3g}"))
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown)


def incident_table(incidents: list[dict[str, Any]], num_ranks: int) -> str:
    """Return the table of incidents; a sentence if there were none."""
    if not incidents:
        return "<p>None. Healing changed nothing in this run.</p>"
    names = ("step", "what happened", "evidence", "cause", "action", "cost", "outcome")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(_incident(i, incident, num_ranks) for i, incident in enumerate(incidents))
    return (
        '<div class="scroll"><table class="incidents"><caption class="visually-hidden">Incidents, '
        "in the order in which they began. Choose one to see it on the charts.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _incident(index: int, incident: dict[str, Any], num_ranks: int) -> str:
    first, last = incident["first_step"], incident["last_step"]
    steps = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    label = escaped(f"Show step {steps} on the charts")
    cells = [
        f'<button type="button" aria-label="{label}">{steps}</button>'
        + (_ranks(incident["ranks"]) if num_ranks > 1 else ""),
        f'<p class="what">{escaped(incident["what"])}</p>'
        f'<p class="quiet kind" data-kind="{escaped(incident["kind"])}">'
        f"{escaped(incident['kind_label'])}</p>",
        "".join(_evidence(part, len(incident["evidence"]) > 1) for part in incident["evidence"]),
        _cause(incident),
        _actions(incident["actions"]),
        _cost(incident),
        f'<p><span class="outcome {incident["outcome"]}">{OUTCOMES[incident["outcome"]]}</span>'
        f'</p><p class="quiet">{escaped(incident["outcome_text"])}</p>',
    ]
    return f'<tr data-incident-row="{index}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _ranks(ranks: list[int]) -> str:
    told = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f'<p class="quiet">rank {told}</p>'


def _evidence(part: dict[str, Any], is_titled: bool) -> str:
    title = f'<p class="quiet">{escaped(part["title"])}</p>' if is_titled else ""
    pairs = "".join(
        f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in part["values"]
    )
    return f'{title}<div class="evidence"><dl>{pairs}</dl></div>'


def _cause(incident: dict[str, Any]) -> str:
    told = [f"<p>{escaped(incident['cause'])}</p>"]
    if isinstance(incident["confidence"], (int, float)):
        told.append(f'<p class="quiet">confidence {incident["confidence"]:.0%}</p>')
    if incident["reference"]:
        told.append(f'<p class="quiet">{escaped(incident["reference"])}</p>')
    return "".join(told)


def _actions(actions: list[dict[str, Any]]) -> str:
    if not actions:
        return '<span class="quiet">none needed</span>'
    items = "".join(
        f"<li>{escaped(action['text'])}"
        + (f" ({action['times']} times)" if action["times"] > 1 else "")
        + "</li>"
        for action in actions
    )
    return f"<ul>{items}</ul>"


def _cost(incident: dict[str, Any]) -> str:
    told = []
    if incident["lost_steps"]:
        told.append(words.count(incident["lost_steps"], "step"))
    if incident["skipped_batches"]:
        told.append(words.count(incident["skipped_batches"], "batch", "batches"))
    if incident["lost_seconds"] >= 0.005:
        told.append(words.duration(incident["lost_seconds"]))
    return "".join(f"<p>{escaped(line)}</p>" for line in told) or "nothing"


def tensor_table(tensors: list[dict[str, Any]]) -> str:
    """Return the tensors that were blamed."""
    if not tensors:
        return "<p>None.</p>"
    rows = "".join(
        f'<tr><td class="mono">{escaped(entry["tensor"])}</td>'
        f'<td class="number">{entry["times"]:,}</td><td>'
        + "<br>".join(
            escaped(f"{words.title(f)}" + (f" ({n} times)" if n > 1 else ""))
            for f, n in entry["failures"].items()
        )
        + "</td></tr>"
        for entry in tensors
    )
    head = '<th scope="col">tensor</th><th scope="col" class="number">times</th>'
    head += '<th scope="col">for</th>'
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def rank_table(ranks: list[dict[str, Any]]) -> str:
    """Return how each rank fared."""
    names = ("rank", "steps seen", "last step", "usual step", "ending")
    head = "".join(
        f'<th scope="col"{" class=number" if i < 4 else ""}>{name}</th>'
        for i, name in enumerate(names)
    )
    rows = ""
    for entry in ranks:
        usual = entry["usual_seconds"]
        cells = [entry["rank"], f"{entry['records']:,}", words.show(entry["last_step"])]
        cells.append(words.duration(usual) if usual else "-")
        numbers = "".join(f'<td class="number">{escaped(cell)}</td>' for cell in cells)
        rows += f"<tr>{numbers}<td>{escaped(entry['ending'] or 'none written')}</td></tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


def environment_list(pairs: list[tuple[str, str]]) -> str:
    """Return where the run ran."""
    if not pairs:
        return "<p>The journal does not say.</p>"
    entries = "".join(f"<dt>{escaped(n)}</dt><dd>{escaped(v)}</dd>" for n, v in pairs)
    return f'<dl class="pairs">{entries}</dl>'


SCRIPTS = ("numbers.js", "chart.js", "report.js", "controls.js")
BADGES = {"finished": "finished", "stopped": "stopped", "open": "no ending yet"}
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def make_page(report: RunReport) -> str:
    """Return the page."""
    data = report_data(report)
    summary = data["summary"]
    style, script = _web("report.css"), "\n".join(_web(name) for name in SCRIPTS)
    damage = "".join(f"<li>{escaped(sentence)}</li>" for sentence in _notices(data))
    return Template(_web("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escaped(f"Report of {data['run_dir']}"),
        name=escaped(data["run_dir"]),
        state=summary["state"],
        badge=BADGES[summary["state"]],
        dates=escaped(_dates(report)),
        introduction=escaped(INTRODUCTION),
        story=escaped(" ".join(summary["sentences"])),
        tiles=tiles(summary["totals"]),
        damage=f'<ul class="damage">{damage}</ul>' if damage else "",
        incident_count=str(len(data["incidents"])),
        incidents=incident_table(data["incidents"], len(data["ranks"])),
        tensors=tensor_table(data["tensors"]),
        ranks=rank_table(data["ranks"]),
        environment=environment_list(data["environment"]),
        style=style,
        script=script,
        data=_in_script(data),
    )


def _in_script(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the element it stands in; ASCII, so no line separators."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _notices(data: dict[str, Any]) -> list[str]:
    told = list(data["damage"])
    if data["incidents_left_out"]:
        told.append(
            f"{data['incidents_left_out']:,} incidents, the mildest, are left out of the table."
        )
    if data["events_left_out"]:
        told.append(f"{data['events_left_out']:,} events are not marked on the charts.")
    return told


def _dates(report: RunReport) -> str:
    def day(seconds: float) -> str:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
        return f"{moment:%Y-%m-%d %H:%M:%S} UTC"

    if report.began is None or report.ended is None:
        return ""
    return f"{day(report.began)} to {day(report.ended)}"


def _web(name: str) -> str:
    return (files("heal.report") / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
