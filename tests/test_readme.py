"""Every Python block of the README and the docs runs as it stands."""

import re
import textwrap
from pathlib import Path

import pytest

from heal.journal import LEFT_OUT

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^([ \t]*)```python\b[^\n]*\n(.*?)^\1```", re.S | re.M)
OTHER_SPELLINGS = re.compile(r"^[ \t]*(?:```|~~~)\s*\{?\.?(?:py|python3|Python|pycon)\b", re.M)


def blocks_of(text):
    """The Python blocks of a page, also those inside of lists and admonitions."""
    return [textwrap.dedent(source) for _, source in FENCE.findall(text)]


def blocks():
    for page in PAGES:
        for number, source in enumerate(blocks_of(page.read_text())):
            yield pytest.param(source, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("source", list(blocks()))
def test_the_example_runs(source, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)  # an example may write files
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    assert LEFT_OUT not in caplog.text


def test_get_started_shows_what_its_script_prints(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/index.md").read_text()
    script = next(source for source in blocks_of(text) if "runs/first" in source)
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    printed = [*caplog.messages, *capsys.readouterr().out.splitlines()]
    shown = re.search(r"^\$ python train.py\n(.*?)^```", text, re.S | re.M)[1].splitlines()
    samples = re.compile(r"samples (\d+, \d+)[^)]*")  # of which the page shows two
    assert {samples.sub(r"samples \1", line) for line in printed} == {
        samples.sub(r"samples \1", line) for line in shown
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_escapes_by_another_spelling(page):
    text = page.read_text()
    assert not OTHER_SPELLINGS.findall(text), "write ```python, so that the block is run"
    assert len(blocks_of(text)) == len(re.findall(r"```python", text))


def test_indented_blocks_and_titled_ones_are_found():
    indented = '- item\n\n    ```python title="x"\n    a = 1\n    b = 2\n    ```\n\n'
    page = indented + "```python\nc = 3\n```\n"
    assert blocks_of(page) == ["a = 1\nb = 2\n", "c = 3\n"]
    for fence in ("~~~py", "```python3", "``` py", "```{.python3}"):
        assert OTHER_SPELLINGS.search(f"{fence}\n")


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_and_images_of_the_pages_outside_of_docs_lead_somewhere(page):
    missing = [target for target in LINK.findall(page.read_text()) if not (ROOT / target).exists()]
    assert missing == []
