"""Errors and warnings: every one can be listed, and all use the same words."""

import re
import subprocess
import sys

from tools.list_messages import ROOT, messages

NOT_YET = (
    "zclip/optim/",
    "zclip/clippers/",
    "heal/actions.py",
    "heal/dry_run.py",
    "heal/durable.py",
    "heal/guarded_step.py",
    "heal/healer.py",
    "heal/integrations/",
    "heal/lab/",
    "heal/lr_schedules.py",
    "heal/recovery.py",
    "heal/testing/",
)
"""Files that are being rewritten; the list may only become shorter."""


def is_done(message):
    return not message.path.as_posix().startswith(NOT_YET)


def test_the_list_has_errors_warnings_and_notes_of_both_packages():
    found = list(messages())
    assert len(found) > 400
    assert {m.kind for m in found} == {"error", "warning", "note", "print"}
    assert {m.path.parts[0] for m in found} == {"zclip", "heal"}
    assert "keep: expected at least 1, got {keep}" in {m.text for m in found}


def test_no_message_says_wanted():
    """The form is: expected X, got Y; do Z."""
    says = re.compile(r"(?i)\bwanted\b(?![^{]*})")  # not as the name of a value within braces
    odd = [str(m) for m in messages() if is_done(m) and says.search(m.text)]
    assert odd == []


def test_what_got_an_error_says_what_it_expected():
    """An error that says "got" without "expected", "must" or "has" leaves the reader guessing."""
    expected = re.compile(r"\b(expected|must|has|have|goes|need|needs)\b|{EXPECTED}")
    odd = [
        str(m)
        for m in messages()
        if m.kind == "error" and ", got " in m.text and not expected.search(m.text)
    ]
    assert odd == []


def test_the_list_is_printed():
    done = subprocess.run(
        [sys.executable, "tools/list_messages.py", "--with", "expected"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 50
    assert all("expected" in line for line in lines)
