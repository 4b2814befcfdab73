"""PTX as text becomes kernels: parameters, registers, variables, labels and instructions."""

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.ptx.opcodes import TYPES

WARP = 32
SHARED_BASE, PARAM_BASE, LOCAL_BASE = 1 << 20, 1 << 24, 1 << 28
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)??(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?"
)


class PtxError(RuntimeError):
    """The program did what a GPU would not forgive, or what is not in the table."""


class Instruction(NamedTuple):
    guard: str | None
    negated: bool
    opcode: str
    operands: list[str]
    text: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """One entry of a PTX file."""

    name: str
    params: list[tuple[str, int, int]]  # name, size, alignment
    registers: dict[str, np.dtype]
    shared: dict[str, int]  # bytes of each variable
    local: dict[str, int]
    code: list[Instruction]
    labels: dict[str, int]
    targets: dict[str, list[str]]

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """Where parameters and variables lie, each space in a range of its own."""
        return {
            **_laid_out(PARAM_BASE, [(name, size, align) for name, size, align in self.params]),
            **_laid_out(SHARED_BASE, [(name, size, 16) for name, size in self.shared.items()]),
            **_laid_out(LOCAL_BASE, [(name, size, 16) for name, size in self.local.items()]),
        }

    def extent(self, base: int, sizes: dict[str, int]) -> int:
        """How many bytes the variables of a space take."""
        return max((self.addresses[n] + size - base for n, size in sizes.items()), default=0)


def _laid_out(base, variables):
    addresses, at = {}, base
    for name, size, align in variables:
        at += -at % align
        addresses[name] = at
        at += size
    return addresses


def parse(text: str) -> dict[str, Kernel]:
    """Return every kernel of a PTX file by its mangled name."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", text, re.S))
    shared = _variables(text[: entries[0].start()], "shared")
    kernels = {}
    for entry in entries:
        body = text[entry.end() : _matching(text, entry.end())]
        kernels[entry[1]] = _kernel(entry[1], entry[2], body, shared)
    return kernels


def _matching(text, at):
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _variables(text, space):
    found = {}
    pattern = rf"\.{space}\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
    for kind, name, count in re.findall(pattern, text):
        found[name] = TYPES[kind].itemsize * int(count or 1)
    return found


def _kernel(name, params, body, shared):
    declared = []
    for align, kind, param, count in re.findall(PARAMETER, params):
        size = TYPES[kind].itemsize * int(count or 1)
        declared.append((param, size, int(align or TYPES[kind].itemsize)))
    registers, code, labels, targets = {}, [], {}, {}
    for statement in body.split(";"):
        line = statement.strip()
        while True:
            line = line.lstrip("{} \t\n")
            label = re.match(r"([\w$]+):\s*", line)
            if not label:
                break
            labels[label[1]] = len(code)
            line = line[label.end() :]
            if line.startswith(".branchtargets"):
                targets[label[1]] = re.findall(r"[\w$]+", line.removeprefix(".branchtargets"))
                line = ""
        line = line.rstrip("} \t\n") if line.count("}") > line.count("{") else line
        if register := re.match(r"\.reg\s+\.(\w+)\s+(.+)", line, re.S):
            for word in register[2].replace(" ", "").split(","):
                ranged = re.match(r"(%?[\w$]+)<(\d+)>", word)
                names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [word]
                kind = TYPES[register[1]]
                raw = kind if kind == TYPES["pred"] else np.dtype(f"u{kind.itemsize}")
                registers |= dict.fromkeys(names, raw)
        elif line and not line.startswith("."):
            code.append(_instruction(line))
    code.append(Instruction(None, False, "ret", [], "ret"))
    own = shared | _variables(body, "shared")
    return Kernel(name, declared, registers, own, _variables(body, "local"), code, labels, targets)


def _instruction(line):
    guard = re.match(r"@(!?)(%\w+)\s+", line)
    rest = line[guard.end() :] if guard else line
    opcode, _, operands = re.sub(r"\s+", " ", rest).partition(" ")
    words = [w.strip() for w in re.split(r",(?![^{]*\})", operands) if w.strip()]
    return Instruction(guard and guard[2], bool(guard and guard[1]), opcode, words, line)
