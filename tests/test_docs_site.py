"""The documentation builds without a warning, and every page can be found from its menu."""

import importlib
import importlib.util
import re
import subprocess
import sys
import types
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
    html = "\n".join(path.read_text() for path in site.rglob("*.html"))
    fetched = re.findall(r'(?:<script[^>]+src|<link[^>]+stylesheet[^>]+href)="(https?:[^"]+)', html)
    assert fetched == []
    assert "mermaid" not in html, "its script is fetched from elsewhere: draw an SVG"


def test_the_site_works_when_it_is_opened_from_its_folder(site):
    """A browser shows no index of a folder that was opened as a file."""
    missing = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # served at any address, so its links are absolute
            continue
        for target in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', page.read_text()):
            if not (page.parent / target).is_file():
                missing.append((str(page.relative_to(site)), target))
    assert missing == []


PUBLIC = {
    "zclip": ["zclip"],
    "heal": [
        "heal",
        "heal.checkpoint",
        "heal.cluster",
        "heal.lab.probes",
        "heal.testing",
        "heal.journal",
    ],
}
"""The packages whose public names are on a page of the reference."""


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_has_every_public_name_and_no_raw_role(site, name):
    page = (site / "api" / f"{name}.html").read_text()
    public = [
        public for module in PUBLIC[name] for public in importlib.import_module(module).__all__
    ]
    missing = [public for public in public if f">{public}<" not in page]
    assert missing == [], f"add them to docs/api/{name}.md"
    assert not re.search(r":(func|class|mod|meth|data|attr|exc):<", page)


def offered_by(kind):
    """Return the public methods and properties of a class, inherited from our classes too."""
    ours = [base for base in kind.__mro__ if base.__module__.split(".")[0] in PUBLIC]
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {
        name
        for base in ours
        for name, value in vars(base).items()
        if isinstance(value, kinds) and not name.startswith("_")
    }


@pytest.mark.parametrize(
    "name",
    ["heal.Healer", "zclip.ClippedOptimizer", "zclip.ZClip", "zclip.PythonRule", "zclip.Mailbox"],
)
def test_the_reference_has_all_that_a_class_offers_inherited_or_not(site, name):
    package, _, attribute = name.rpartition(".")
    kind = getattr(importlib.import_module(package), attribute)
    page = (site / "api" / f"{package}.html").read_text()
    path = f"{kind.__module__}.{kind.__qualname__}"
    shown = set(re.findall(rf'id="{re.escape(path)}\.(\w+)"', page))
    offered = offered_by(kind)
    assert offered
    assert offered - shown == set()


def test_tables_of_results_are_on_the_page_of_benchmarks(site):
    page = (site / "benchmarks.html").read_text()
    assert "clip_grad_norm_, gpt2-small, float32" in page
    assert "--8<--" not in page


COMMANDS = ["report", "watch", "doctor", "drill", "demo", "init"]


@pytest.mark.parametrize("words", [["heal", name] for name in COMMANDS] + [["zclip.bench"]])
def test_every_option_of_a_command_is_on_the_page_of_commands(words):
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    heading = "zclip-bench" if words == ["zclip.bench"] else " ".join(words)
    section = (DOCS / "cli.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z-]+[a-z]", done.stdout)) - {"--help", "--version"}
    assert sorted(option for option in options if option not in section) == []


def test_the_words_of_the_glossary_are_few():
    rows = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line[:2] == "| "]
    assert len(rows) - 1 <= 20


CAPABILITIES = {
    "experiments": "experiments.md",
    "expect_change": "healer.md",
    "add_detector": "extend.md",
    "add_state": "healer.md",
    "forward=": "experiments.md",
    "on_instability": "extend.md",
    "on_rollback": "extend.md",
    "on_record": "extend.md",
    "zclip.optim": "optimizers.md",
    "PythonRule": "rules.md",
    "disabled_detectors": "healing.md",
    "healer.pieces": "healer.md",
}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_every_capability_is_described(name):
    assert name in (DOCS / CAPABILITIES[name]).read_text()


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


def test_every_event_of_the_journal_is_on_the_page_of_the_journal():
    sources = "\n".join(path.read_text() for path in (ROOT / "heal").rglob("*.py"))
    kinds = set(re.findall(r'\.event\(\s*"(\w+)"', sources))
    assert {"started", "recovery", "experiment"} <= kinds
    page = (DOCS / "journal.md").read_text()
    assert sorted(kind for kind in kinds if f"`{kind}`" not in page) == []


def test_every_reason_to_exit_is_on_the_page_of_the_journal():
    from heal.journal import ExitReason

    page = (DOCS / "journal.md").read_text()
    assert [reason.value for reason in ExitReason if f"`{reason.value}`" not in page] == []
