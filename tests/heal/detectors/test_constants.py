"""The tuned numbers of all detectors: few, each named, each with a reason, none hidden in code."""

import ast
from pathlib import Path

import heal.detectors
from benchmarks.suspicions import PAGE, ROWS, constants_of

FOLDER = Path(heal.detectors.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
MOST_CONSTANTS = 25

PLAIN = {-1, 0, 1, 2, 0.25, 0.5, 0.75}
"""Numbers that code may hold without a name: counting, halves and quartiles. Nobody tunes them."""


def named_numbers(path):
    """Yield the numbers that a module or one of its classes names, and whether a reason follows."""
    tree = ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node, following in zip(owner.body, [*owner.body[1:], None], strict=True):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            numbers = [n for n in ast.walk(node.value) if is_number(n)]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target) if is_name(n)]
            is_tuned = not isinstance(node.value, ast.Dict) and any(n.value for n in numbers)
            if not is_tuned:
                continue
            where = owner.name + "." if isinstance(owner, ast.ClassDef) else ""
            has_reason = "#" in lines[node.lineno - 1] or is_text(following)
            for name in names:
                yield f"{path.stem}.{where}{name}", ast.unparse(node.value), has_reason


def is_number(node):
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_name(node):
    return isinstance(node, ast.Name)


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def numbers_in_code(path):
    """Yield the numbers inside of functions."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if is_number(node):
                    yield node.value, node.lineno


def test_detectors_have_few_constants_and_each_has_a_reason():
    found = [constant for path in FILES for constant in named_numbers(path)]
    for name, value, _ in found:
        print(f"{name} = {value}")
    print(f"{len(found)} constants")
    assert len(found) <= MOST_CONSTANTS
    assert {name for name, _, has_reason in found if not has_reason} == set()


def test_no_number_is_hidden_in_code():
    hidden = [
        (path.name, line, value)
        for path in FILES
        for value, line in numbers_in_code(path)
        if value not in PLAIN
    ]
    assert hidden == []


def test_constants_that_are_hidden_or_without_a_reason_are_found(tmp_path):
    path = tmp_path / "detector.py"
    path.write_text(
        "LIMIT = 3.0\nclass D:\n    SLACK, PATIENCE = 1.5, 7  # why\n"
        "    def f(self, x):\n        return x > 0.8\n"
    )
    assert list(named_numbers(path)) == [
        ("detector.LIMIT", "3.0", False),
        ("detector.D.SLACK", "(1.5, 7)", True),
        ("detector.D.PATIENCE", "(1.5, 7)", True),
    ]
    assert list(numbers_in_code(path)) == [(0.8, 5)]


def test_the_table_of_the_documentation_has_every_detector_and_its_constants():
    """Made by ``python -m benchmarks.suspicions --write``."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines()]
    shown = {row[1]: row[3].split(", ") for row in rows if len(row) == 7}
    for row in ROWS:
        assert shown[row.reacts_to] == (constants_of(row.detector) or ["-"])
    used = {name for row in ROWS for name in constants_of(row.detector)}
    found = {name.split(".")[-1] for path in FILES for name, _, _ in named_numbers(path)}
    assert found - used == {"QUARTILES_OF_NORMAL"}  # that of the window itself
