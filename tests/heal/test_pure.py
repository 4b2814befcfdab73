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
    "cli",
    "cluster/__init__",
    "cluster/attempt",
    "cluster/deadline",
    "cluster/hostlist",
    "cluster/patience",
    "cluster/progress_board",
    "cluster/slurm",
    "cluster/stacks",
    "commands/__init__",
    "commands/init",
    "config",
    "detect",
    "detectors/__init__",
    "detectors/divergence",
    "detectors/gradients",
    "detectors/health",
    "detectors/loss_spike",
    "detectors/pace",
    "detectors/progress",
    "diagnose",
    "doctor/__init__",
    "doctor/config",
    "doctor/finding",
    "exceptions",
    "forecast/__init__",
    "forecast/conformal",
    "forecast/features",
    "forecast/hysteresis",
    "forecast/names",
    "forecast/score",
    "forecast/watch",
    "exit_codes",
    "history",
    "journal",
    "json_lines",
    "policy",
    "postmortem",
    "robust",
    "settings",
    "settings_toml",
    "verdict",
]
MAY_IMPORT = set(sys.stdlib_module_names) | {"heal", "tomli"}


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
        assert "heal.detect" not in source
        assert "heal.journal" not in source
