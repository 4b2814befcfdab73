"""Tables of the page. They are there without scripts, for printers and screen readers."""

import html
from typing import Any

from heal.report import words

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
