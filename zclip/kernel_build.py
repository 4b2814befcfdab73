"""Compiles ``csrc`` into one shared library on torch's stable ABI.

Three callers share this file: ``setup.py`` when a wheel is built, the first ``import zclip`` where
a wheel brought no library, and ``python -m zclip.build``. It imports neither torch nor anything of
ours, so that ``setup.py`` can load it from an isolated build environment.

The stable ABI makes the result independent of the torch it was compiled against (2.10 or newer) and
of the Python that loads it, so any torch whose headers are at hand will do.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
# Sums must have the same bits on every machine, so no multiply-add may be contracted.
OPTIMISE = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fvisibility=hidden",
]
NVCC = ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler", "-fvisibility=hidden"]
# libtorch must stay in NEEDED, or the weak stream symbol is silently null under CUDA torch.
LINK_LINUX = ["-shared", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
LINK_MACOS = ["-bundle", "-undefined", "dynamic_lookup", "-ltorch"]
LIBRARIES = ["-ltorch_cpu", "-lc10"]
OLDEST_COMPUTE_CAPABILITY = (7, 5)
"""Turing: the oldest GPU that current CUDA toolkits and torch wheels support."""

_DESCRIBE_TORCH = """
import json, os, torch
flags = getattr(torch._C, "_cuda_getArchFlags", str)()
print(json.dumps([os.path.dirname(torch.__file__), torch.version.cuda, flags or ""]))
"""


class BuildError(RuntimeError):
    """The library cannot be built; the message names what is missing, or is the compiler's."""


@dataclass(frozen=True)
class Torch:
    """What a build needs to know about a torch."""

    home: Path
    cuda: str | None
    """The CUDA version it was built with."""
    architectures: tuple[str, ...] = ()
    """GPU architectures its own kernels support, as ``sm_80``; empty without CUDA."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the GPU code to generate with it."""

    home: Path
    flags: tuple[str, ...]
    """``-gencode`` options."""

    @property
    def nvcc(self) -> str:
        """Return the path of the compiler."""
        return str(self.home / "bin/nvcc")


def find_torch() -> Torch:
    """Return the torch of this environment, or of the environment that started an isolated build.

    pip isolates a build by ``PYTHONPATH`` and runs it with the interpreter that will import the
    result; that interpreter finds its own torch when it ignores the variable (``-E``). Other
    front ends start an interpreter of their own and leave only the name of the active environment.

    Raises:
        BuildError: none of them has a torch.
    """
    interpreters = [[sys.executable], [sys.executable, "-E"]]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = Path(os.environ.get(variable, "")) / "bin/python"
        if os.environ.get(variable) and active.exists():
            interpreters.append([str(active), "-E"])
    for interpreter in interpreters:
        command = [*interpreter, "-c", _DESCRIBE_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            home, cuda, flags = json.loads(done.stdout.splitlines()[-1])
            return Torch(Path(home), cuda, tuple(flags.split()))
    raise BuildError("no torch found in this environment")


def find_compiler() -> list[str]:
    """Return the C++ compiler: ``CXX``, or the first of the usual names.

    Raises:
        BuildError: there is none, or not one that is understood here.
    """
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"compiled kernels need Linux or macOS, got {sys.platform}")
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler found ({named[0] if named else 'c++, g++ or clang++'})")


def find_toolkit(torch: Torch) -> Toolkit:
    """Return the CUDA toolkit of ``CUDA_HOME`` or of the nvcc on the path.

    Raises:
        BuildError: there is none, or it cannot generate code for a GPU that this torch supports.
    """
    home = _cuda_home()
    if home is None:
        raise BuildError("no nvcc on the path and no CUDA_HOME")
    listed = subprocess.run(
        [str(home / "bin/nvcc"), "--list-gpu-code"], capture_output=True, text=True, check=False
    )
    known = re.findall(r"\bsm_\d+\b", listed.stdout)
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST")
    chosen = _requested(wanted) if wanted else architectures(known, torch.architectures)
    if not chosen:
        raise BuildError(f"{home}/bin/nvcc generates code for no GPU of this torch: {known}")
    return Toolkit(home, tuple(chosen))


def architectures(nvcc: list[str], torch: tuple[str, ...]) -> list[str]:
    """Return the ``-gencode`` options for what nvcc can generate and torch can run on.

    Machine code runs on every later GPU of the same major version, so the lowest of each is
    enough; PTX of the newest serves GPUs that do not exist yet.

    Args:
        nvcc: the names that ``nvcc --list-gpu-code`` prints.
        torch: the names torch was built for; empty if it has no CUDA, which excludes none.
    """
    majors = {_capability(name)[0] for name in torch if name.startswith("sm_")}
    lowest: dict[int, int] = {}
    for capability in sorted(map(_capability, nvcc)):
        if capability >= OLDEST_COMPUTE_CAPABILITY and (not majors or capability[0] in majors):
            lowest.setdefault(*capability)
    names = [f"{major}{minor}" for major, minor in lowest.items()]
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return flags + [f"-gencode=arch=compute_{name},code=compute_{name}" for name in names[-1:]]


def compile_library(
    target: Path, sources: Path, work: Path, torch: Torch, toolkit: Toolkit | None = None
) -> None:
    """Compile all of ``sources`` and link ``target``, which appears only when it is whole.

    Args:
        target: the shared library to write.
        sources: the folder ``csrc``.
        work: a folder for object files; those whose sources did not change are kept.
        torch: whose headers to compile against.
        toolkit: to compile the CUDA kernels too.

    Raises:
        BuildError: there is no compiler, or one of them failed; with what it printed.
    """
    compiler = find_compiler()
    include = ["-I", str(torch.home / "include")]
    defines = [*STABLE_ABI]
    link = [*(LINK_MACOS if sys.platform == "darwin" else LINK_LINUX), *LIBRARIES]
    link += ["-L", str(torch.home / "lib")]
    if toolkit:
        defines.append("-DZCLIP_WITH_CUDA")
        include += ["-isystem", str(toolkit.home / "include")]
        link += [f"-L{toolkit.home}/lib64", f"-L{toolkit.home}/lib", "-lcudart_static"]
        link += ["-lrt", "-ldl", "-lpthread", "-Wl,--exclude-libs,ALL"]

    cxx = [*compiler, *OPTIMISE, "-fPIC", *defines, *include]
    nvcc = [toolkit.nvcc, *NVCC, *defines, *toolkit.flags, "-Xcompiler", "-fPIC"] if toolkit else []
    headers = digest_of(sources, (".h", ".cuh"))
    # The slowest first, which is also the likeliest to fail.
    files = [*sorted(sources.rglob("*.cu")), *sorted(sources.rglob("*.cpp"))]
    if not toolkit:
        files = [path for path in files if "cuda" not in path.relative_to(sources).parts]

    def compile_one(source: Path) -> Path:
        command = nvcc if source.suffix == ".cu" else cxx
        content = hashlib.sha256("\0".join([*command, headers]).encode() + source.read_bytes())
        name = "-".join(source.relative_to(sources).with_suffix("").parts)
        compiled = work / f"{name}-{content.hexdigest()[:16]}.o"
        if not compiled.exists():
            unfinished = compiled.with_suffix(f".{os.getpid()}.o")
            _run([*command, "-c", str(source), "-o", str(unfinished)])
            unfinished.replace(compiled)
        return compiled

    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()) as pool:
        under_way = [pool.submit(compile_one, path) for path in files]
        if wait(under_way, return_when=FIRST_EXCEPTION).not_done:
            pool.shutdown(wait=False, cancel_futures=True)
        objects = [future.result() for future in under_way if not future.cancelled()]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{os.getpid()}-{target.name}")
    _run([*compiler, *map(str, objects), *link, "-o", str(unfinished)])
    unfinished.replace(target)


def digest_of(folder: Path, suffixes: tuple[str, ...]) -> str:
    """Return a digest of the names and contents of the files with one of the suffixes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def recipe_digest(sources: Path) -> str:
    """Return what names a library built on this kind of machine from these sources."""
    flags = " ".join([*OPTIMISE, *STABLE_ABI, sys.platform, platform.machine()])
    content = digest_of(sources, (".h", ".cpp", ".cuh", ".cu"))
    return hashlib.sha256(f"{flags} {content}".encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip() or done.stdout.strip()}")


def _cuda_home() -> Path | None:
    nvcc = shutil.which("nvcc")
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    if not nvcc:
        return None
    beside = Path(os.path.realpath(nvcc)).parents[1]
    if (beside / "include/cuda_runtime.h").exists():
        return beside
    # A script that calls the real one, as some distributions have: nvcc itself knows where it is.
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    top = re.search(r"TOP=(.+)", asked.stderr)
    return Path(os.path.realpath(top[1].strip())) if top else None


def _capability(name: str) -> tuple[int, int]:
    number = int(re.sub(r"\D", "", name))
    return number // 10, number % 10


def _requested(text: str) -> list[str]:
    """Return the ``-gencode`` options of ``TORCH_CUDA_ARCH_LIST``, as in "8.0;9.0+PTX"."""
    flags = []
    for entry in re.split(r"[;\s,]+", text.strip()):
        if not re.fullmatch(r"\d+\.\d(\+PTX)?", entry):
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: expected numbers like 8.0;9.0+PTX, got {entry!r}"
            )
        name = entry.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{name},code=sm_{name}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{name},code=compute_{name}")
    return flags
