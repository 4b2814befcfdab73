"""List every message that a user can meet: what ``zclip`` and ``heal`` raise, warn, note and print,
and what the checks of the compiled operators in ``csrc`` raise.

``python tools/list_messages.py`` prints one line per message: file, line, kind and text, with
``{...}`` where a value is put in. The form of an error is "expected X, got Y; do Z".
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zclip", "heal")

CALLS = {
    "warn": "warning",
    "warning": "warning",
    "note": "note",
    "_note": "note",
    "add": "note",
    "refuse": "error",
    "error": "error",
    "report_failure": "warning",
    "print": "print",
}
"""Functions and methods whose texts reach a user, and what kind of message they make."""


class Message(NamedTuple):
    """A text of the source that a user may read."""

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def messages(root: Path = ROOT) -> Iterator[Message]:
    """Yield the messages of both packages and of the compiled operators, file by file."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found = _of_file(ast.parse(path.read_text(encoding="utf-8")))
            for line, kind, text in sorted(set(found)):
                yield Message(path.relative_to(root), line, kind, text)
    for path in sorted((root / "csrc").rglob("*.*")):
        for line, text in _of_source(path.read_text(encoding="utf-8")):
            yield Message(path.relative_to(root), line, "error", text)


LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
CHECK = re.compile(r'\bSTD_TORCH_CHECK\(((?:"(?:[^"\\]|\\.)*"|[^"])*?)\);')


def _of_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every check, with ``{}`` for values between and after literals."""
    for check in CHECK.finditer(source):
        text, end = "", None
        for literal in LITERAL.finditer(check[1]):
            is_value = end is not None and check[1][end : literal.start()].strip()
            text += ("{}" if is_value else "") + literal[1]
            end = literal.end()
        is_value = end is not None and check[1][end:].strip()
        yield source.count("\n", 0, check.start()) + 1, text + ("{}" if is_value else "")


def _of_file(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    constants = {
        target.id: text_of(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, arguments = "error", node.exc.args
        elif isinstance(node, ast.Call) and _name(node.func) in CALLS:
            kind, arguments = CALLS[_name(node.func)], node.args
        else:
            continue
        for argument in arguments:
            text = text_of(argument)
            if isinstance(argument, ast.Name):
                text = constants.get(argument.id, "")
            if " " in text:  # one word is a key, not a message
                yield argument.lineno, kind, text


def text_of(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with the source of what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else text_of(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def main() -> int:
    """Print the list; those that hold a word only if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="word", default="", help="only messages with this text")
    wanted = parser.parse_args()
    for message in messages():
        if wanted.word in message.text:
            print(message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
