"""The documentation builds without a warning, and every page can be found from its menu."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Lets tags of mkdocs' own pass."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def pages_of(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(target, str):
                yield target
            else:
                yield from pages_of(target)


def test_every_page_is_in_the_menu_and_every_entry_of_the_menu_is_a_page():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    listed = list(pages_of(config["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == written, "add one line to nav in mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_it_builds_without_a_warning_and_needs_no_network(site):
    html = "\n".join(path.read_text() for path in site.rglob("index.html"))
    fetched = re.findall(r'(?:<script[^>]+src|<link[^>]+stylesheet[^>]+href)="(https?:[^"]+)', html)
    assert fetched == []
    assert "mermaid" not in html, "its script is fetched from elsewhere: draw an SVG"


def test_the_reference_has_every_public_name_and_no_raw_role(site):
    import heal
    import zclip

    for package in (zclip, heal):
        page = (site / "api" / package.__name__ / "index.html").read_text()
        missing = [name for name in package.__all__ if f">{name}<" not in page]
        assert missing == [], f"add them to docs/api/{package.__name__}.md"
        assert not re.search(r":(func|class|mod|meth|data|attr|exc):<", page)


def test_the_reference_has_all_that_a_healer_offers(site):
    import heal

    page = (site / "api/heal/index.html").read_text()
    offered = [name for name in dir(heal.Healer) if not name.startswith("_")]
    assert {"step", "metrics", "resume", "close", "add_probe"} <= set(offered)
    assert [name for name in offered if f'id="heal.healer.Healer.{name}"' not in page] == []


def test_tables_of_results_are_on_the_page_of_benchmarks(site):
    page = (site / "benchmarks" / "index.html").read_text()
    assert "clip_grad_norm_, gpt2-small, float32" in page
    assert "--8<--" not in page


def test_the_page_of_settings_is_current():
    spec = importlib.util.spec_from_file_location("update_config", DOCS / "update_config.py")
    update = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(update)
    assert update.PAGE.read_text() == update.page(), "run: python docs/update_config.py"
    assert "| `nan_patience` | `5` |" in update.page()


@pytest.mark.parametrize("image", sorted((DOCS / "images").iterdir()), ids=lambda path: path.name)
def test_images_are_small_and_shown(image):
    assert image.stat().st_size < 200_000
    texts = [path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    assert any(f"images/{image.name}" in text for text in texts)
