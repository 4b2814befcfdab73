"""README, CONTRIBUTING and docs are written in plain English: short sentences, the field's words.

``python -m tests.test_prose`` prints the 20 longest sentences and every word to replace.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 35
"""Words in a sentence; a code span or a link's address counts as one word or none."""

UNREVISED: set[str] = set()
"""Pages still to be rewritten; remove each when that is done."""

MOST_README_LINES = 200

REPLACED = {
    "skipped": r"refus(?:e|es|ed|al|ing)|unfit|blam(?:e|es|ed|ing)",
    "polled, read": r"hears?|heard|hearing|listens?|listened",
    "reported, logged, warned": r"tells?|told|news",
    "expected": r"wanted",
    "expensive": r"dear",
    "rank, replica, peer": r"nobody|somebody|everybody",
    "again, new": r"anew",
}
"""What to write, and what it replaces."""

CONJUNCTION = re.compile(
    r"[,;:] for (?:it|its|they|their|there|these|those|we|you|he|she|others|not|then|nothing|"
    r"in|some|weights|faults|who|what|that is)\b",
    re.IGNORECASE,
)
"""``for`` where ``because`` is meant."""

FENCE = re.compile(r"^([ \t]*)(```|~~~).*?^\1\2[ \t]*$", re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->", re.S)
CODE = re.compile(r"``.+?``|`[^`\n]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ENDS = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=\*\w|[\"'(*]*[A-Z`#\d])|(?<=:)\s*\n\s*\n|\n\s*\n")


def prose(text):
    """Return a page without code blocks, comments, and addresses; code spans become ``X``."""
    text = COMMENT.sub("", FENCE.sub("\n\n", text))
    return LINK.sub(r"\1", CODE.sub("X", text))


def sentences(text):
    """Split a page into sentences; a table cell, a list item and a heading end one."""
    for line in re.split(r"\n(?=\s*(?:[-*] |\d+\. |#|\||>|!!!|:::|\[\^))|(?<=\|)\n", prose(text)):
        cells = line.split("|") if line.lstrip(" >").startswith("|") else [line]
        for cell in cells:
            for sentence in ENDS.split(cell):
                words = re.findall(r"[\w'%.,/+=-]*\w[\w'%-]*", sentence or "")
                if words:
                    yield len(words), " ".join(sentence.split())


def words_to_replace(text):
    """Return every word of the wrong column, with what should replace it."""
    plain = prose(text)
    found = [
        (match[0], better)
        for better, pattern in REPLACED.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", plain, re.IGNORECASE)
    ]
    return found + [(match[0], "because") for match in CONJUNCTION.finditer(plain)]


def explanations(path):
    """Yield the docstrings and comments of a module."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def name_of(page):
    return str(page.relative_to(ROOT))


CHECKED = [page for page in PAGES if name_of(page) not in UNREVISED]


@pytest.mark.parametrize("page", CHECKED, ids=name_of)
def test_no_sentence_is_longer_than_the_limit(page):
    long = [found for found in sentences(page.read_text()) if found[0] > LONGEST]
    assert long == []


@pytest.mark.parametrize("page", CHECKED, ids=name_of)
def test_pages_use_the_words_of_the_field(page):
    assert words_to_replace(page.read_text()) == []


SOURCES = [path for folder in ("heal", "zclip") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_docstrings_and_comments_use_the_words_of_the_field(path):
    """What a cause blames is the name of its column."""
    found = [found for text in explanations(path) for found in words_to_replace(text)]
    assert [f for f in found if not f[0].startswith("blame") and f[1] != "because"] == []


def test_the_checks_find_what_they_look_for():
    assert [count for count, _ in sentences("One two. Three `four five` six\n\n- seven\n")] == [
        2,
        3,
        1,
    ]
    assert [count for count, _ in sentences("| a b | c |\n|---|---|\n| d. E f | g |\n")] == [
        2,
        1,
        1,
        2,
        1,
    ]
    assert words_to_replace("Nobody is told.") == [
        ("told", "reported, logged, warned"),
        ("Nobody", "rank, replica, peer"),
    ]
    assert words_to_replace("It waits, for others wait.") == [(", for others", "because")]
    assert words_to_replace("`refused_patience` is a setting\n```\ntold\n```\n") == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def main():
    found = sorted(
        (
            (count, name_of(page), text)
            for page in PAGES
            for count, text in sentences(page.read_text())
        ),
        reverse=True,
    )
    for count, page, text in found[:20]:
        print(f"{count:3} {page}: {text}")
    for page in PAGES:
        for word, better in words_to_replace(page.read_text()):
            print(f"{name_of(page)}: {word!r} -> {better}")


if __name__ == "__main__":
    main()
