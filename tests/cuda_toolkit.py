"""Compiles csrc/cuda with nvcc, once per content, into build/cuda, and reads what came out."""

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.built_once import built_once

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "cuda"
ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
HAS_NVCC = shutil.which("nvcc") is not None
SOURCE = ROOT / "csrc/cuda/launchers.cu"
UPDATE = ROOT / "csrc/cuda/update_launcher.cu"
# Its 24 loops take 12 s per architecture to compile, so the quick tests have two.
UPDATE_ARCHITECTURES = ("sm_80", "sm_100")
SLOW_ARCHITECTURES = ("sm_90", "sm_120")
# As in zclip/kernel_build.py; a test compares them.
FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler", "-fvisibility=hidden"]


@dataclass(frozen=True)
class Kernel:
    """What ptxas says about one kernel."""

    architecture: str
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def _digest(*parts: str) -> str:
    digest = hashlib.sha256("\0".join(parts).encode())
    for folder in ("csrc/cuda", "csrc/math"):
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in {".h", ".cuh", ".cu"}:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compiled_with(architecture: str, source: Path) -> tuple[str, ...]:
    """Return the architectures that share an object file with this one."""
    groups = (UPDATE_ARCHITECTURES, SLOW_ARCHITECTURES) if source == UPDATE else (ARCHITECTURES,)
    return next(group for group in groups if architecture in group)


@cache
def compile_object(source: Path = SOURCE, architecture: str = "sm_80") -> tuple[Path, str]:
    """Return an object file of the launchers that has this architecture, and ptxas' output."""
    architectures = compiled_with(architecture, source)
    codes = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in architectures]
    command = ["nvcc", *FLAGS, *codes, "--threads", "2", "-Xptxas", "-v", "-Xcompiler", "-fPIC"]
    target = OUTPUT / f"{source.stem}-{_digest(*command)}.o"
    log = target.with_suffix(".txt")
    if not (target.exists() and log.exists()):
        with built_once(target) as unfinished:
            if unfinished is not None:
                _run_nvcc([*command, "-c", str(source), "-o", str(unfinished)], log)
    return target, log.read_text()


def _run_nvcc(command: list[str], log: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc could not build:\n{done.stderr}")
    log.write_text(done.stderr)


def kernels(source: Path = SOURCE, architecture: str = "sm_80") -> list[Kernel]:
    """Return every kernel of an object file that has this architecture, by what ptxas said."""
    found = []
    log = compile_object(source, architecture)[1]
    sections = re.split(r"Compiling entry function '(\w+)' for '(\w+)'", log)
    for mangled, architecture, text in zip(
        sections[1::3], sections[2::3], sections[3::3], strict=True
    ):
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
        shared = re.search(r"(\d+) bytes smem", text)
        found.append(
            Kernel(
                architecture,
                plain_name(mangled),
                int(re.search(r"Used (\d+) registers", text)[1]),
                sum(map(int, spills)),
                int(shared[1]) if shared else 0,
            )
        )
    return found


def plain_name(mangled: str) -> str:
    """Return a short readable name: rewrite<1340, Scale>."""
    text = subprocess.run(
        ["c++filt", mangled], capture_output=True, text=True, check=True
    ).stdout.strip()
    name = re.search(r"zclip::cuda::(\w+)", text)[1]
    capacity = re.search(r"(?:Tensor|Update)Table<(\d+)>", text)
    change = re.search(r"cuda::(Scale|Clamp|ZeroNonFinite)\b", text)
    arithmetic = re.search(r"partials<(float|double),", text)
    arguments = [m[1] for m in (arithmetic, capacity, change) if m]
    return f"{name}<{', '.join(arguments)}>" if arguments else name


def cuobjdump(*arguments: str) -> str:
    """Run NVIDIA's object dumper, which comes inside the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


@cache
def machine_code(architecture: str, source: Path = SOURCE) -> dict[str, str]:
    """Return the SASS of each kernel by its plain name."""
    text = cuobjdump("-sass", "-arch", architecture, str(compile_object(source, architecture)[0]))
    sections = re.split(r"Function : (\w+)\n", text)
    return {plain_name(m): code for m, code in zip(sections[1::2], sections[2::2], strict=True)}


@dataclass(frozen=True)
class Loop:
    """An innermost loop of machine code, from its first instruction to the branch back."""

    opcodes: tuple[str, ...]

    def count(self, start: str) -> int:
        """Return how many instructions have an opcode that starts so."""
        return sum(opcode.startswith(start) for opcode in self.opcodes)

    def moved(self, start: str) -> int:
        """Return how many bytes a thread moves by opcodes that start so: ``LDG`` or ``STG``."""
        sizes = re.compile(rf"{start}\.E(?:\.(64|128|U16|U8))?")
        found = [m[1] for m in map(sizes.match, self.opcodes) if m]
        return sum({"64": 8, "128": 16, "U16": 2, "U8": 1, None: 4}[size] for size in found)

    def __len__(self) -> int:
        return len([opcode for opcode in self.opcodes if opcode != "NOP"])


def loops(code: str) -> list[Loop]:
    """Return the loops without a branch inside, of SASS as :func:`machine_code` returns it."""
    return [
        loop
        for loop in innermost_loops(code)
        if not any(opcode.startswith("BRA") for opcode in loop.opcodes[:-1])
    ]


def innermost_loops(code: str) -> list[Loop]:
    """Return the loops without a loop inside. They may branch around what is seldom needed."""
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);"
    lines = [(int(a, 16), opcode, rest) for a, opcode, rest in re.findall(pattern, code)]
    place = {address: i for i, (address, _, _) in enumerate(lines)}
    spans = []
    for i, (address, opcode, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode.startswith("BRA") and target and int(target[1], 16) <= address:
            spans.append((place[int(target[1], 16)], i))
    innermost = [
        (first, last)
        for first, last in spans
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
    ]
    return [Loop(tuple(o for _, o, _ in lines[first : last + 1])) for first, last in innermost]


# What the loop over whole rounds of a format must compute, by which it is known: FMUL, DMUL, and
# unpacking by HADD2, per 64 bytes.
ARITHMETIC = {
    "bfloat16": (32, 0, 0),
    "float16": (32, 0, 32),
    "float32": (16, 0, 0),
    "float64": (0, 8, 0),
}
WIDE_LOADS = 4  # of 16 bytes, in a round


def shortest_loop(code: str, dtype: str, *, writes: bool) -> float:
    """Return the instructions per 64 bytes of the loop over whole rounds of this format."""
    lengths = []
    for loop in loops(code):
        rounds = loop.count("LDG.E.128") / WIDE_LOADS
        arithmetic = [loop.count(opcode) for opcode in ("FMUL", "DMUL", "HADD2")]
        sums = loop.count("FADD") + loop.count("DADD")
        is_it = rounds >= 1 and arithmetic == [rounds * n for n in ARITHMETIC[dtype]]
        stores = loop.count("STG.E.128") == (WIDE_LOADS * rounds if writes else 0)
        if is_it and stores and (writes or sums >= sum(ARITHMETIC[dtype][:2])):
            lengths.append(len(loop) / rounds)
    return min(lengths)
