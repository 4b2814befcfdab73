"""Errors and warnings: every one can be listed, and all use the same words."""

import re
import subprocess
import sys

from tools.list_messages import ROOT, messages


def test_the_list_has_errors_warnings_and_notes_of_packages_and_operators():
    found = list(messages())
    assert len(found) > 500
    assert {m.kind for m in found} == {"error", "warning", "note", "print"}
    assert {m.path.parts[0] for m in found} == {"zclip", "heal", "csrc"}
    assert "zclip::agc_: expected one parameter per gradient ({}), got {}" in {
        m.text for m in found
    }
    assert "keep: expected at least 1, got {keep}" in {m.text for m in found}


OUTSIDE_BRACES = r"(?![^{]*})"  # not as the name of a value that is put in


def test_no_message_uses_words_that_the_style_replaces():
    """A step is skipped, a value is expected, a rank is missing, a copy is expensive."""
    says = re.compile(r"(?i)\b(wanted|told|heard|refused|nobody|dear)\b" + OUTSIDE_BRACES)
    odd = [str(m) for m in messages() if says.search(m.text)]
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


THE_PAPERS_WORDS = ("mode must be either", "clip_option must be either")
"""Errors of the published ZClip, which ours repeats word by word."""


def test_what_was_expected_comes_before_what_came():
    """Not "X is Y; expected Z" and not "X must be Z, got Y": X: expected Z, got Y; do W."""
    other = re.compile(rf"(?i)\bexpected\b{OUTSIDE_BRACES}(?!.*, got )|\bmust be\b")
    odd = [
        str(m)
        for m in messages()
        if other.search(m.text) and not any(words in m.text for words in THE_PAPERS_WORDS)
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
