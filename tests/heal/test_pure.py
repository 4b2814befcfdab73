"""The half of healing that decides imports no torch, so that it can be tested and read alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = [
    "__init__",
    "__main__",
    "actions",
    "causes",
    "checkpoint/__init__",
    "checkpoint/files",
    "checkpoint/manifest",
    "cli",
    "cluster/__init__",
    "cluster/slurm",
    "config",
    "config_fields",
    "detectors/__init__",
    "detectors/foreign_writes",
    "detectors/gradients",
    "detectors/host",
    "detectors/learning_rate",
    "detectors/loss",
    "detectors/plateau",
    "detectors/preference",
    "detectors/rewards",
    "detectors/robust",
    "detectors/watch",
    "detectors/weights",
    "diagnose",
    "exception_causes",
    "exit_codes",
    "former",
    "history",
    "integrations/__init__",
    "integrations/trackers",
    "journal",
    "json_lines",
    "lab/forecast/__init__",
    "lab/forecast/features",
    "lab/forecast/forecast_watch",
    "policy",
    "record",
    "report/__init__",
    "report/collect",
    "report/data",
    "report/page",
    "report/read",
    "report/story",
    "report/text",
    "report/live",
    "report/words",
]
MAY_IMPORT = set(sys.stdlib_module_names) | {"heal", "jinja2", "rich", "tomli"}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_file_imports_only_the_standard_library_and_heal(name):
    tree = ast.parse((ROOT / "heal" / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= MAY_IMPORT


def test_the_pure_half_runs_without_torch():
    modules = [
        "heal." + name.replace("/", ".").removesuffix(".__init__")
        for name in PURE
        if not name.startswith("__")
    ]
    source = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


def test_decisions_do_not_depend_on_detection_nor_on_the_journal():
    for name in ("policy", "diagnose", "history", "actions"):
        source = (ROOT / "heal" / f"{name}.py").read_text()
        assert "heal.detectors.watch" not in source
        assert "heal.journal" not in source
