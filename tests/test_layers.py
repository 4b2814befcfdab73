"""Imports point one way, the pure parts stay pure, and both languages number columns alike."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zclip import layout
from zclip.reference import IDS

ROOT = Path(__file__).parent.parent

ABOVE = {"heal.recovery", "heal.failed_steps", "heal.healer", "heal.integrations"}
"""What puts the rest of healing together."""

STEP = {"heal.guarded_step", "heal.lr_schedules", "heal.micro_batch", "heal.ranks"}
"""One optimizer step, guarded."""

FORBIDDEN = {
    "zclip": {"heal"},
    "zclip/config.py": {"torch", "zclip"},
    "zclip/layout.py": {"torch", "zclip"},
    "zclip/checks.py": {"zclip"},
    "zclip/parallel": {"zclip.clippers", "zclip.functional", "zclip.ops", "zclip.optim"},
    "zclip/reference": {"triton", "zclip.ops", "zclip.backends", "zclip.functional"},
    "zclip/schemas": {"zclip.reference", "zclip.ops", "zclip.backends"},
    "zclip/ops.py": {"zclip.functional", "zclip.backends"},
    "zclip/clippers": {"zclip.optim", "zclip.mailbox", "zclip.backends", "zclip.functional"},
    "zclip/mailbox.py": {"zclip.clippers", "zclip.optim", "zclip.ops"},
    "heal/training_state.py": {"heal.data", *STEP, "heal.monitor", "heal.training_run", *ABOVE},
    "heal/snapshots.py": {"heal.data", *STEP, "heal.monitor", "heal.training_run", *ABOVE},
    "heal/buffers.py": {"heal.data", *STEP, "heal.monitor", "heal.training_run", *ABOVE},
    "heal/data": {*STEP, "heal.monitor", "heal.training_run", *ABOVE},
    **{
        f"{name.replace('.', '/')}.py": {
            "heal.detectors.watch",
            "heal.policy",
            "heal.monitor",
            "heal.training_run",
            *ABOVE,
        }
        for name in sorted(STEP)
    },
    "heal/detectors": {
        "heal.training_state",
        "heal.snapshots",
        "heal.data",
        *STEP,
        "heal.monitor",
        *ABOVE,
    },
    "heal/policy.py": {
        "heal.detectors.watch",
        "heal.detectors",
        "heal.journal",
        "heal.training_run",
        *ABOVE,
    },
    "heal/monitor.py": {"heal.healer", "heal.integrations"},
    "heal/journal.py": {"heal.training_state", *STEP, "heal.monitor", "heal.training_run", *ABOVE},
    "heal/recovery.py": {"heal.healer", "heal.integrations"},
    "heal/checkpoint": {*STEP, "heal.monitor", "heal.training_run", *ABOVE},
}


def imported_names(path: Path) -> set[str]:
    """Every module that a file imports, with all its parents: a.b.c, a.b and a.

    What only a type checker imports may point anywhere.
    """
    tree, names = ast.parse(path.read_text()), set()
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 2)}


@pytest.mark.parametrize("where", FORBIDDEN)
def test_imports_point_one_way(where):
    root = ROOT / where
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        assert not imported_names(path) & FORBIDDEN[where], path


def test_the_shared_arithmetic_knows_no_torch_and_no_threads():
    for path in (ROOT / "csrc/math").glob("*.h"):
        includes = re.findall(r'#include [<"](.+)[>"]', path.read_text())
        assert set(includes) <= {"cstdint", "cstring", "math.h"} | {
            p.name for p in (ROOT / "csrc/math").glob("*.h")
        }, path


def test_importing_zclip_loads_nothing_heavy():
    source = (
        "import sys, torch; before = set(sys.modules); import zclip;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.split()
    unwanted = {"heal", "triton", "transformers", "lightning", "matplotlib", "rich", "numpy"}
    assert not set(loaded) & unwanted


def enum_values(header: str, enum: str) -> dict[str, int]:
    """The names and numbers of a C++ enum, worked out as the compiler would."""
    text = re.sub(r"//.*", "", (ROOT / "csrc/math" / header).read_text())
    body = re.search(rf"enum (?:class )?{enum}\b[^{{]*{{(.*?)}}", text, re.DOTALL).group(1)
    values, following = {}, 0
    for entry in filter(None, (part.strip() for part in body.split(","))):
        name, _, number = (part.strip() for part in entry.partition("="))
        following = int(number) if number else following
        values[name] = following
        following += 1
    return values


def shouted(name: str) -> str:
    """kClippedNorm -> CLIPPED_NORM."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("k")).upper()


@pytest.mark.parametrize(
    ("header", "enum", "renamed"),
    [
        ("grad_stats.h", "StatColumn", {"SUM_SQ": "SUMSQ"}),
        ("verdict.h", "VerdictColumn", {}),
        ("verdict.h", "VerdictFlag", {}),
        ("verdict.h", "NonFinite", {}),
        ("report.h", "CounterColumn", {}),
        ("optim.h", "Algorithm", {}),
        ("optim.h", "OptimSetting", {}),
        ("optim.h", "OptimFlag", {}),
        ("optim.h", "TelemetryColumn", {}),
        ("optim.h", "ForeignFlag", {}),
        ("optim.h", "SummaryColumn", {}),
        ("optim.h", "HealthFlag", {}),
        ("optim.h", "LedgerColumn", {}),
        ("zclip.h", "ZClipColumn", {}),
        ("spike_skip.h", "SpikeSkipColumn", {}),
        ("watch_loss.h", "LossColumn", {}),
    ],
)
def test_both_languages_number_alike(header, enum, renamed):
    values = enum_values(header, enum)
    assert len(values) > 2
    for name, number in values.items():
        python_name = renamed.get(shouted(name), shouted(name))
        assert getattr(layout, python_name) == number, name


@pytest.mark.parametrize(
    ("header", "enum", "codes"),
    [
        ("verdict.h", "OnNonFinite", layout.ON_NONFINITE),
        ("zclip.h", "ZClipMode", layout.ZCLIP_MODES),
        ("adagc.h", "AdaGcSeed", layout.ADAGC_SEEDS),
    ],
)
def test_both_languages_name_the_modes_alike(header, enum, codes):
    values = enum_values(header, enum)
    assert {shouted(name).lower(): number for name, number in values.items()} == codes


def test_both_languages_number_the_rules_alike():
    """A rule may lack compiled code, but what is compiled has the number that Python gives it."""
    text = (ROOT / "csrc/math/rules.h").read_text()
    compiled = {name: int(number) for number, name in re.findall(r"ROW\((\d+), (\w+),", text)}
    assert compiled
    assert compiled.items() <= IDS.items()


def test_both_languages_agree_on_the_special_coefficients():
    text = (ROOT / "csrc/math/verdict.h").read_text()
    for name in ("Keep", "Refuse"):
        value = float(re.search(rf"k{name} = (-?[\d.]+);", text).group(1))
        assert getattr(layout, name.upper()) == value


PLACES = re.findall(
    r"`((?:csrc|docs|heal|tests|zclip)/[\w./]*)`",
    re.search(r"## Where things are\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[1],
)


def test_the_map_of_the_code_names_what_exists():
    assert [place for place in PLACES if not (ROOT / place).exists()] == []


def test_every_module_of_healing_is_on_the_map():
    modules = {p.stem for p in (ROOT / "heal").glob("[!_]*.py")}
    assert {name for name in modules if f"heal/{name}.py" not in PLACES} == set()
    folders = [p.parent.name for p in (ROOT / "heal").glob("[!_]*/__init__.py")]
    assert [name for name in folders if f"heal/{name}/" not in PLACES] == []
    modules = [p for p in PLACES if p.startswith("heal/") and p.endswith(".py")]
    listed = {place.rpartition("/")[0] for place in modules}
    for folder in listed - {"heal", "heal/detectors", "heal/lab", "heal/integrations/transformers"}:
        files = {f"{folder}/{p.name}" for p in (ROOT / folder).glob("[!_]*.py")}
        assert files - set(PLACES) == set(), folder
