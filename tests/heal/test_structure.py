"""The loop can be read: few files a step, no hands in another object, public seams only."""

import ast
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from heal.guarded_step import TOGETHER
from tools import ownership, trace_calls

ROOT = Path(__file__).parents[2]
MOST_FILES = 12  # that a step of a healthy run visits
MOST_CALLS = 18  # of our functions in it, those that measure and clip included
MOST_CALLS_ABOVE = 10  # above one of our optimizers, which measures, clips and watches the loss
MOST_CALLS_POLLED = 60  # for each calm record that is polled, 25 at a time
FORMER = {"Parts", "Given", "Owner", "catch_up", "on_restore", "healing_state", "tell"}
"""What version 0.1 was wired with."""


def parsed(path):
    return ast.parse(path.read_text())


def of_a_step(is_fused=False):
    trace = trace_calls.healthy_step(is_fused=is_fused)
    return len(trace.visited), trace.files


def of_steps():
    run = trace_calls.Run()
    run.build()
    run.step(60)
    return [len(run.trace_step().visited) for _ in range(60, 99)]  # up to the next snapshot


def of_a_loop():
    run, traces = trace_calls.Run(is_fused=True), []
    for number, _ in enumerate(run.build().batches(range(80))):
        traces.append(run.trace_step() if number >= 60 else run.step())
    return sorted(len(trace.visited) for trace in traces[60:])


@pytest.fixture(scope="module")
def alone():
    """Call a function in a process of its own, where no other healer has left a hook open."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def test_a_healthy_step_is_few_calls_in_few_files(alone):
    calls, files = alone(of_a_step)
    assert len(files) <= MOST_FILES, sorted(files)
    assert calls <= MOST_CALLS


def test_a_calm_record_that_is_polled_is_few_calls(alone):
    polled = [count for count in alone(of_steps) if count > MOST_CALLS]
    assert len(polled) == 1, "a process alone polls for nothing but its records"
    assert polled[0] <= MOST_CALLS + TOGETHER * MOST_CALLS_POLLED


def test_a_healthy_step_adds_few_calls_to_a_fused_optimizer(alone):
    calls, files = alone(of_a_step, True)
    assert len(files) < MOST_FILES, sorted(files)
    assert calls <= MOST_CALLS_ABOVE


def test_a_loop_over_batches_adds_one_call_that_notices_other_optimizers(alone):
    assert alone(of_a_loop)[10] == MOST_CALLS_ABOVE + 1


def test_nobody_assigns_an_attribute_of_a_collaborator():
    """In no module of heal, whatever the object is called: only methods change it."""
    assert list(ownership.Code(ROOT / "heal").foreign()) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("def f(ring: Ring):\n    ring.room = 3", True),
        ("def f(ring: Ring):\n    del ring.room", True),
        ("def f(ring: Ring):\n    ring.room += 1", True),
        ("def f(ring: 'Ring | None'):\n    setattr(ring, 'room', 3)", True),
        ("def f(ring: Ring):\n    undo.callback(setattr, ring, 'room', 3)", True),
        ("def f(rings):\n    for ring in rings:\n        ring.room, other = 3, 4", True),
        ("class A:\n    def __init__(self, ring: Ring):\n        self.a, self.r = 1, ring\n"
         "    def f(self):\n        self.r.room = 3", True),
        ("class A:\n    room: int = 2\n    def f(self):\n        self.r = Ring()\n"
         "    def g(self):\n        mine = self.r\n        mine.room = 3", True),
        ("def f(ring: Any):\n    ring.room = 3", False),
        ("class A:\n    def f(self):\n        self.room = 3", False),
        ("def f(params):\n    for param in params:\n        param.grad = None", False),
    ],
)  # fmt: skip
def test_an_attribute_of_a_collaborator_is_recognised(text, is_found, tmp_path):
    ring = "class Ring:\n    def __init__(self):\n        self.room, self.grad = 2, 3"
    (tmp_path / "ring.py").write_text(ring)
    (tmp_path / "user.py").write_text(text)
    found = list(ownership.Code(tmp_path).foreign())
    assert bool(found) == is_found


def test_the_healer_is_one_class_without_owners_parts_and_mixins():
    tree = parsed(ROOT / "heal" / "healer.py")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["Healer"]
    assert classes[0].bases == []
    for name in ("healer", "monitor", "training_run"):
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
