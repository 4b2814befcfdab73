"""The report as one HTML file that needs nothing but a browser.

Everything in a journal may be hostile: text is escaped, data cannot close its script element, and
the page's policy runs no script but ours.
"""

import base64
import hashlib
import json
from datetime import datetime, timezone
from importlib.resources import files
from string import Template
from typing import Any

from heal.report.collect import RunReport
from heal.report.data import report_data
from heal.report.summary import INTRODUCTION
from heal.report.tables import (
    environment_list,
    escaped,
    incident_table,
    rank_table,
    tensor_table,
    tiles,
)

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
