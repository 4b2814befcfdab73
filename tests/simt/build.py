"""Builds the C++ of this folder with g++, once per content, into build/simt."""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

from tests.built_once import built_once

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUTPUT = ROOT / "build" / "simt"

CAN_RUN = shutil.which("g++") is not None and platform.machine() == "x86_64"

# nvcc neither assumes strict aliasing nor, under -fmad=false, fuses: the emulator does the same.
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-Wno-unknown-pragmas"]  # "unroll" is nvcc's
DEFINES = ["-DZCLIP_SIMT", f"-I{HERE}"]
SANITIZERS = {
    "plain": ["-O2"],
    "asan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-O1", "-fsanitize=thread"],
}

RACE, ADDRESS_ERROR = 66, 77  # exit statuses of a program that a sanitizer ended


def environment(sanitizer: str, *, for_python: bool = False) -> dict[str, str]:
    """Return the variables under which a build must run.

    A Python that imports a sanitized module must itself have loaded the sanitizer first, hence
    ``for_python``; it works with torch's own tensors as well.
    """
    variables = {
        **os.environ,
        # Python never frees all it allocates, which is no business of ours.
        "ASAN_OPTIONS": f"exitcode={ADDRESS_ERROR}:detect_leaks={int(not for_python)}",
        "UBSAN_OPTIONS": f"exitcode={ADDRESS_ERROR}:print_stacktrace=1",
        "TSAN_OPTIONS": f"exitcode={RACE}:halt_on_error=1",
    }
    libraries = {"plain": [], "asan": ["asan", "ubsan", "stdc++"], "tsan": ["tsan"]}[sanitizer]
    if for_python and libraries:
        paths = [_library(name) for name in libraries]
        variables["LD_PRELOAD"] = " ".join(paths)
    return variables


def _library(name: str) -> str:
    command = ["g++", f"-print-file-name=lib{name}.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _digest(command: list[str]) -> str:
    """Name of a build: its command and every C++ file it could include."""
    digest = hashlib.sha256("\0".join(command).encode())
    folders = [HERE, ROOT / "csrc", ROOT / "csrc" / "math", ROOT / "csrc" / "cuda"]
    for folder in folders:
        for path in sorted(folder.glob("*")):
            if path.suffix in {".h", ".cuh", ".cu", ".cpp"}:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(source: Path, flags: list[str], suffix: str) -> Path:
    command = ["g++", *FLAGS, *DEFINES, *flags, "-x", "c++", str(source)]
    target = OUTPUT / f"{source.stem}-{_digest(command)}{suffix}"
    if target.exists():
        return target
    with built_once(target) as unfinished:
        if unfinished is None:
            return target
        result = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"g++ could not build {source.name}:\n{result.stderr}")
    return target


def build_program(source: Path, sanitizer: str = "plain", defines: tuple[str, ...] = ()) -> Path:
    """Return an executable made from source under one of SANITIZERS."""
    return _compile(source, [*SANITIZERS[sanitizer], *defines], "")


def build_module(source: Path, sanitizer: str = "plain", defines: tuple[str, ...] = ()) -> Path:
    """Return a pybind11 module made from source; it must be loaded under the name of its stem."""
    import pybind11

    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    face = [f"-DMODULE_NAME={source.stem}", "-fPIC", "-shared", "-fvisibility=hidden"]
    return _compile(source, [*SANITIZERS[sanitizer], *face, *includes, *defines], ".so")


def load_module(
    source: Path, sanitizer: str = "plain", defines: tuple[str, ...] = ()
) -> ModuleType:
    """Build source as a pybind11 module and import it."""
    path = build_module(source, sanitizer, defines)
    spec = importlib.util.spec_from_file_location(source.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
