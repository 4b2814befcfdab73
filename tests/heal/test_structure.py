"""The loop can be read: few files a step, no hands in another object, public seams only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import trace_calls

ROOT = Path(__file__).parents[2]
CORE = (
    *("checkpointing", "experiment", "failed_steps", "guarded_step", "healer", "monitor"),
    *("recovery", "run", "snapshots"),
)
"""The modules that a step, a rollback and a checkpoint pass through."""

MOST_FILES = 12  # that a step of a healthy run visits
MOST_CALLS = 19  # of our functions in it, those that measure and clip included
MOST_CALLS_ABOVE = 11  # above one of our optimizers, which measures, clips and watches the loss
FORMER = {"Parts", "Given", "Owner", "catch_up", "on_restore", "healing_state", "tell"}
"""What version 0.1 was wired with."""


def parsed(path):
    return ast.parse(path.read_text())


def assigned(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def test_a_healthy_step_is_few_calls_in_few_files():
    trace = trace_calls.healthy_step()
    assert len(trace.files) <= MOST_FILES, sorted(trace.files)
    assert len(trace.visited) <= MOST_CALLS


def test_a_healthy_step_adds_few_calls_to_a_fused_optimizer():
    trace = trace_calls.healthy_step(is_fused=True)
    assert len(trace.files) < MOST_FILES, sorted(trace.files)
    assert len(trace.visited) <= MOST_CALLS_ABOVE


def test_a_loop_over_batches_adds_one_call_that_notices_other_optimizers():
    run, traces = trace_calls.Run(is_fused=True), []
    for number, _ in enumerate(run.build().batches(range(80))):
        traces.append(run.trace_step() if number >= 60 else run.step())
    calls = sorted(len(trace.visited) for trace in traces[60:])
    assert calls[10] == MOST_CALLS_ABOVE + 1


@pytest.mark.parametrize("name", CORE)
def test_nobody_assigns_an_attribute_of_a_collaborator(name):
    found = [
        ast.unparse(target)
        for target in assigned(parsed(ROOT / "heal" / f"{name}.py"))
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Attribute)
        and ast.unparse(target.value).startswith("self.")
    ]
    assert found == []


def test_the_healer_is_one_class_without_owners_parts_and_mixins():
    tree = parsed(ROOT / "heal" / "healer.py")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["Healer"]
    assert classes[0].bases == []
    for name in ("healer", "monitor", "run"):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(parsed(ROOT / "heal" / f"{name}.py"))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        assert not names & (FORMER - {"catch_up"}), name


STEPS_OF_A_RECOVERY = ["settle", "diagnose", "examine", "decide", "ask_hook", "execute"]


def called(tree):
    """The names of functions and methods that are called, in the order of the text."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda function: (function.end_lineno, function.end_col_offset))
    return [getattr(call, "attr", getattr(call, "id", None)) for call in calls]


def test_what_a_sick_step_does_is_read_in_one_method_for_records_and_exceptions():
    tree = parsed(ROOT / "heal" / "healer.py")
    (recover,) = [n for n in ast.walk(tree) if getattr(n, "name", "") == "_recover"]
    steps = [name for name in called(recover) if name in STEPS_OF_A_RECOVERY]
    assert steps == STEPS_OF_A_RECOVERY
    assert len(ast.unparse(recover.body[1:]).splitlines()) <= 12
    for path in (ROOT / "heal").rglob("*.py"):
        elsewhere = called(parsed(path)).count("execute")
        assert elsewhere == (path.name == "healer.py"), path


def private_attributes(tree):
    """Attributes with an underscore that are not asked of ``self``, ``cls`` or a foreign object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if "healer" in owner.split(".") or owner.startswith("healer."):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "heal" / "integrations").rglob("*.py")), ids=lambda path: path.stem
)
def test_integrations_use_no_private_name_of_the_healer(path):
    private = [name for name in private_attributes(parsed(path)) if not name.endswith("__")]
    assert private == []
    imported = [
        alias.name
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("heal")
        for alias in node.names
    ]
    assert [name for name in imported if name.startswith("_")] == []


def test_an_integration_is_at_most_four_files():
    places = ROOT / "heal/integrations"
    assert (places / "lightning.py").is_file()
    files = [p.stem for p in (places / "transformers").glob("*.py")]
    assert 1 <= len(set(files) - {"__init__"}) <= 4


def test_the_laboratory_is_imported_only_when_used():
    source = (
        "import sys, torch; from heal import Healer; m = torch.nn.Linear(2, 1); "
        "h = Healer(m, torch.optim.AdamW(m.parameters())); "
        "m(torch.ones(1, 2)).sum().backward(); h.step(torch.tensor(1.0)); "
        "print([name for name in sys.modules if name.startswith('heal.lab')])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
