"""Every Python block of the README and the docs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks():
    for page in PAGES:
        for number, source in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)):
            yield pytest.param(source, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("source", list(blocks()))
def test_the_example_runs(source):
    exec(compile(source, "example", "exec"), {})
